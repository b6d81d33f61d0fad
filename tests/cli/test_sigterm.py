"""SIGTERM while a command starts as the first process of a container."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FIRST_PROCESS = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
SCRIPT = """\
import os
from argosy import main
main.COMMANDS = (main.Command("slow", "slow_command:main", ""),)
assert os.getpid() == 1
raise SystemExit(main.main(["slow"]))
"""
SLOW = """\
import signal
print("importing", flush=True)
signal.pause()  # returns after a handler, if there is one
signal.pause()
"""


def test_a_container_that_is_stopped_while_it_imports_ends_at_once(tmp_path: Path) -> None:
    if subprocess.run([*FIRST_PROCESS, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs PID namespaces of its own")
    (tmp_path / "slow_command.py").write_text(SLOW)
    with subprocess.Popen(
        [*FIRST_PROCESS, sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as outer:
        try:
            assert outer.stdout is not None
            assert outer.stdout.readline() == "importing\n"
            (inner,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
            os.kill(int(inner), signal.SIGTERM)
            _, told = outer.communicate(timeout=20)
        finally:
            outer.kill()
    assert told == "argosy: stopped by SIGTERM during its start\n"
    assert outer.returncode == 143
