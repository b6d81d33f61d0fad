"""Runs commands, prints progress and polls; most modules of the package use it.

`ClusterError` is the one error of this package: its text says what failed and, where known, the remedy.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

SEARCH_PATH = os.pathsep.join(
    [
        os.environ.get("PATH", ""),
        "/usr/local/sbin",
        "/usr/local/bin",
        "/usr/sbin",
        "/usr/bin",
        "/sbin",
        "/bin",
    ]
)
"""A root shell opened by `su` often lacks the sbin folders, where iptables and ip live."""

CONTAINED = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
"""Before a command: its mounts and its processes end with it, also when it is killed."""

_started = time.monotonic()


class ClusterError(RuntimeError):
    """The cluster could not be brought to the asked state."""


def say(text: str) -> None:
    """One plain line of progress, with the seconds since the start."""
    print(f"[{time.monotonic() - _started:6.1f}s] {text}", file=sys.stderr, flush=True)


def find(command: str) -> str | None:
    """The path of a command, sbin folders included."""
    return shutil.which(command, path=SEARCH_PATH)


def run(
    *argv: str | Path,
    stdin: str | bytes | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
    timeout: float | None = 120,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its output as text; `env` is added to ours.

    Raises ClusterError when it can not be started, exceeds `timeout`, or (with `check`) exits non-zero.
    """
    command = [str(word) for word in argv]
    if isinstance(stdin, str):
        stdin = stdin.encode()
    try:
        done = subprocess.run(
            command,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            cwd=cwd,
            env={**os.environ, "PATH": SEARCH_PATH, **(env or {})},
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as error:
        raise ClusterError(f"{command[0]}: not found ({error})") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"no end after {timeout:.0f} s: {shlex.join(command)}") from None
    result = subprocess.CompletedProcess(
        command, done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    )
    if check and result.returncode:
        raise ClusterError(failure_text(command, result.returncode, result.stderr or result.stdout))
    return result


def pipe(producer: Sequence[str | Path], consumer: Sequence[str | Path], timeout: float = 600) -> None:
    """`producer | consumer`; raises ClusterError when either fails."""
    env = {**os.environ, "PATH": SEARCH_PATH}
    first = [str(word) for word in producer]
    second = [str(word) for word in consumer]
    with subprocess.Popen(first, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as source:
        try:
            sink = subprocess.run(
                second, stdin=source.stdout, capture_output=True, env=env, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            source.kill()
            raise ClusterError(f"no end after {timeout:.0f} s: {shlex.join(second)}") from None
        assert source.stdout
        assert source.stderr
        source.stdout.close()
        source_errors = source.stderr.read().decode(errors="replace")
    if source.returncode:
        raise ClusterError(failure_text(first, source.returncode, source_errors))
    if sink.returncode:
        raise ClusterError(failure_text(second, sink.returncode, sink.stderr.decode(errors="replace")))


def failure_text(command: Sequence[str], code: int, output: str, lines: int = 30) -> str:
    tail = "\n".join(output.strip().splitlines()[-lines:])
    return f"exit status {code}: {shlex.join(command)}\n{tail}"


def poll(what: str, probe: Callable[[], T | None], timeout: float, interval: float = 0.1) -> T:
    """Call `probe` until it returns something truthy; raises ClusterError with `what` and the last error."""
    deadline = time.monotonic() + timeout
    last: ClusterError | None = None
    while True:
        try:
            if answer := probe():
                return answer
        except ClusterError as error:
            last = error
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not within {timeout:.0f} s" + (f"; last: {last}" if last else ""))
        time.sleep(interval)


STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_cleanly() -> None:
    """Make every usual request to stop a KeyboardInterrupt, so that `finally` runs. Python does so for SIGINT alone,
    and not even for that in a background job of a script."""
    for number in STOPPING:
        signal.signal(number, signal.default_int_handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore further requests to stop while a clean-up of seconds runs."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def mount_points(mountinfo: str | None = None) -> set[Path]:
    """Where anything is mounted, by /proc/self/mountinfo. `os.path.ismount` misses folders that are bound within
    one file system."""
    text = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
    return {Path(line.split()[4].replace("\\040", " ")) for line in text.splitlines()}


def remove_tree(path: Path) -> None:
    """Delete a folder, refusing when anything is mounted below it: its files may be someone else's."""
    real = path.resolve()
    for mount_point in mount_points():
        if mount_point == real or real in mount_point.parents:
            raise ClusterError(f"{mount_point} is mounted: not deleting {path}")
    if path.exists():
        shutil.rmtree(path)
