"""A child process: its log, and its place among the system's processes."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from pathlib import Path

import pytest

from argosy.local.child_process import LogFile, Process
from argosy.local.control import tail


def test_a_log_never_takes_more_than_twice_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    log = LogFile(path, limit=100)
    for number in range(50):
        log.write(b"%08d\n" % number)
    log.close()
    kept = (tmp_path / "a.log.1").read_bytes() + path.read_bytes()
    assert len(kept) <= 200
    assert kept.splitlines()[-1] == b"00000049"
    assert path.stat().st_size <= 100
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_tail_gives_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("".join(f"line {number}\n" for number in range(1000)))
    assert tail(path, 2) == "line 998\nline 999"
    assert tail(tmp_path / "none.log", 2) == ""


async def test_a_child_has_a_process_group_but_no_session_of_its_own(tmp_path: Path) -> None:
    """A signal from the terminal must not reach it, and it must share the session's CPU time with the others."""
    show = "import os; print(os.getpgid(0) == os.getpid(), os.getsid(0))"
    path = tmp_path / "log"
    process = await Process.start([sys.executable, "-c", show], dict(os.environ), path)
    await process.ended.wait()
    assert path.read_text().splitlines()[0] == f"True {os.getsid(0)}"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux chooses by oom_score_adj")
async def test_when_memory_runs_out_a_child_that_loads_is_killed_before_others(tmp_path: Path) -> None:
    own = oom_score_adj(os.getpid())
    script = (
        "import subprocess, sys; "
        "child = subprocess.Popen(['sleep', '1000']); "
        "print(child.pid, flush=True); "
        "child.wait()"
    )
    path = tmp_path / "log"
    process = await Process.start(
        [sys.executable, "-c", script], dict(os.environ), path, more_oom_score_adj=300
    )
    try:
        while not (lines := path.read_text().splitlines()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        pids = [process.pid, int(lines[0])]
        assert [oom_score_adj(pid) for pid in pids] == [min(1000, own + 300)] * 2
        process.reset_oom_score_adj()
        assert [oom_score_adj(pid) for pid in pids] == [own] * 2, "those that it has started as well"
    finally:
        await process.stop(0.0)


def oom_score_adj(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())
