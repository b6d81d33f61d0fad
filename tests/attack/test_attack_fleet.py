"""Processes that a fleet under attack leaves behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from processes import is_alive, wait_until

from . import fleet
from .fleet import Fleet, Process

LEAVES = """
import subprocess
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
"""


def test_a_process_that_outlives_its_parent_is_found_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(fleet, "LEFTOVER_S", 0.0)
    made = Fleet(tmp_path, engines=0)
    made.router = Process("leaves", 0, ("leaves",), tmp_path / "leaves.log")
    made.router.start()
    wait_until(lambda: made.router.has_exited, "the end of the parent")
    left = int(made.router.log.read_text())
    assert made.stop() == ["sleep 600"]
    wait_until(lambda: not is_alive(left), "the end of the process")
    assert made.stop() == []
