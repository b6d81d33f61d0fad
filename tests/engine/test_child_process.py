"""Waiting for child processes is bounded in time."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from argosy_engine import osproc
from argosy_engine.osproc import end_child

SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


class Unkillable(subprocess.Popen[bytes]):
    """A child whose SIGKILL has no effect yet, as in an uninterruptible system call."""

    def kill(self) -> None: ...


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(osproc, "KILL_TIMEOUT_S", 0.01)


def test_a_child_that_exits_is_not_killed(caplog: pytest.LogCaptureFixture) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "pass"]) as process:
        assert end_child(process, "the child", 60.0)
    assert process.returncode == 0
    assert not caplog.records


def test_a_child_that_does_not_exit_is_killed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(osproc, "KILL_TIMEOUT_S", 60.0)
    with subprocess.Popen(SLEEPS) as process:
        assert end_child(process, "the child", 0.01)
    assert process.returncode == -signal.SIGKILL
    (record,) = caplog.records
    assert f"the child, process {process.pid}, has not exited within" in record.getMessage()


def test_a_killed_child_that_does_not_end_is_left_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    with Unkillable(SLEEPS) as process:
        try:
            assert not end_child(process, "the child", 0.01)
            assert process.poll() is None
        finally:
            process.send_signal(signal.SIGKILL)
    assert (
        f"the child, process {process.pid}, has not ended 0.01 s after SIGKILL"
        in caplog.records[-1].getMessage()
    )
