"""A child's log: rotation and tail."""

from __future__ import annotations

import stat
from pathlib import Path

from argosy.local.child_process import LogFile, tail


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
