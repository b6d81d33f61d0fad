"""Processes we own: started with a record, killed only by that record.

A record holds the pid and its start time (field 22 of /proc/PID/stat): together they name one process for as
long as the machine is up, so that a recycled pid is never killed. `kill -9` is the ordinary end here: nothing
of a test cluster is worth an orderly shutdown, and an API server that lost its etcd hangs on SIGTERM.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cluster.settings import Settings
from cluster.shell import SEARCH_PATH, ClusterError, poll


def start(
    settings: Settings, name: str, argv: Sequence[str | Path], env: dict[str, str] | None = None
) -> int:
    """Start a daemon in its own session, its output in `logs/NAME.log`; returns its pid."""
    settings.logs.mkdir(parents=True, exist_ok=True)
    settings.pids.mkdir(parents=True, exist_ok=True)
    with open(settings.logs / f"{name}.log", "ab") as log:
        process = subprocess.Popen(
            [str(word) for word in argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": SEARCH_PATH, **(env or {})},
            cwd="/",
            start_new_session=True,
        )
    process.returncode = 0  # it outlives us on purpose: no ResourceWarning when the object goes
    record(settings, name, process.pid)
    return process.pid


def record(settings: Settings, name: str, pid: int) -> None:
    start_time = _start_time(pid)
    if start_time is None:
        raise ClusterError(f"{name} ended at once; see {settings.logs / f'{name}.log'}")
    (settings.pids / name).write_text(f"{pid} {start_time}\n")


def alive(settings: Settings, name: str) -> int | None:
    """The pid of a daemon of ours that still runs."""
    try:
        pid, start_time = (settings.pids / name).read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    return int(pid) if _start_time(int(pid)) == start_time else None


def require(settings: Settings, name: str) -> None:
    """Raises ClusterError with the end of its log when a daemon has died."""
    if alive(settings, name) is None:
        raise ClusterError(f"{name} is not running; the end of its log:\n{log_tail(settings, name)}")


def names(settings: Settings) -> list[str]:
    """Every recorded daemon, running or not."""
    return sorted(path.name for path in settings.pids.iterdir()) if settings.pids.is_dir() else []


def kill(settings: Settings, name: str) -> bool:
    """SIGKILL a daemon of ours, wait until it is gone, forget it; False when it was not running."""
    pid = alive(settings, name)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        poll(
            f"the end of {name} (pid {pid})", lambda: alive(settings, name) is None, timeout=60, interval=0.01
        )
    (settings.pids / name).unlink(missing_ok=True)
    return pid is not None


def log_tail(settings: Settings, name: str, lines: int = 15) -> str:
    path = settings.logs / f"{name}.log"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else "(no log)"


def _start_time(pid: int) -> str | None:
    """Clock ticks since boot at which `pid` started; None when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the command's name may hold spaces and brackets
    return None if fields[0] in "ZX" else fields[19]
