"""Lock holder: who holds a lock file, and whether that process still makes progress.

Owns what the file says besides its lock: its content names the holder, and its time changes while the holder makes
progress. Must not know what is done under the lock. Invariant: no two clocks are compared, because machines share
locks: whoever waits measures on its own clock since when the time has not changed. Whoever can write to the store can
write the name, so that one of another form is not passed on, and none is more than what a process calls itself.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

MARK_INTERVAL_S: Final = 10.0
"""Seconds between two marks of progress. Each is a write to the file system of the store."""
LOOK_INTERVAL_S: Final = 15.0
IDLE_AFTER_S: Final = 600.0
"""A holder may go this long without progress. A source that sends nothing is given up after half of it."""
_MAX_NAME_BYTES: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9.-]{1,63} \(process [0-9]{1,10}\)")
_STOP_S: Final = 5.0
"""How long the end of a wait is held up by a file system that does not answer."""

Idle = Callable[[str], None]
"""Called with the name of a holder that has made no progress for too long, and with an empty one when it makes progress
again."""


class HolderMark:
    """The holder's side. Used by the process that has the lock; from several threads.

    Args:
        descriptor: of the locked file, open for writing. It is the caller's to close, after the last use of this.
    """

    def __init__(self, descriptor: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._descriptor = descriptor
        self._clock = clock
        self._marked_at = clock()
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()[:63])
        name = f"{host} (process {os.getpid()})\n".encode()
        # In place, since the file is what is locked. Its name helps people only, so that failures do not matter.
        with suppress(OSError):
            os.ftruncate(descriptor, os.pwrite(descriptor, name, 0))
            os.utime(descriptor)

    def progressed(self) -> None:
        """Mark the lock file, unless that was done lately."""
        now = self._clock()
        if now - self._marked_at >= MARK_INTERVAL_S:
            self._marked_at = now
            with suppress(OSError):
                os.utime(self._descriptor)


class HolderWatch:
    """The side of a process that waits for the lock.

    Args:
        path: the lock file.
        on_idle: called when the holder has made no progress for `idle_after_s`, and when it makes progress again.
        now: seconds from any start, as `look` is given them.
    """

    def __init__(self, path: Path, on_idle: Idle, idle_after_s: float, now: float) -> None:
        self._path = path
        self._on_idle = on_idle
        self._idle_after_s = idle_after_s
        self._since = now
        self._seen = self._time()
        self._is_idle = False

    def look(self, now: float) -> None:
        """Look at the holder's mark."""
        seen = self._time()
        if seen != self._seen:
            self._seen, self._since = seen, now
        is_idle = now - self._since >= self._idle_after_s
        if is_idle != self._is_idle:
            self._is_idle = is_idle
            self._on_idle(self._holder() if is_idle else "")

    def _time(self) -> int:
        try:
            return self._path.lstat().st_mtime_ns
        except OSError:
            return 0

    def _holder(self) -> str:
        name = b""
        with suppress(OSError):
            name = _read_regular(self._path, _MAX_NAME_BYTES)
        text = name.decode(errors="replace").removesuffix("\n")
        return f"a process that calls itself {text}" if _NAME.fullmatch(text) else "an unknown process"


def _read_regular(path: Path, num_bytes: int) -> bytes:
    """The start of a regular file; nothing of anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(descriptor, num_bytes) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    finally:
        os.close(descriptor)


@contextmanager
def watched(path: Path, on_idle: Idle, idle_after_s: float) -> Iterator[None]:
    """Watch a lock's holder in another thread, while the caller waits for the lock."""
    watch = HolderWatch(path, on_idle, idle_after_s, time.monotonic())
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(min(LOOK_INTERVAL_S, idle_after_s)):
            watch.look(time.monotonic())

    thread = threading.Thread(target=look, name="lock's holder", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_STOP_S)  # a last message must not come after the wait
