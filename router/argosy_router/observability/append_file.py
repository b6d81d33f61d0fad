"""Append-only file of whole lines.

Owns: one open file. Must not know: what the lines contain.
Invariants: readers of the file see no partial line once `append` has returned or raised, nor after a crash once the
file has been opened again; only one process writes a file at a time. The methods block: call them in a thread.
"""

# Not compiled: waits for the disk, in a thread.

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

_TAIL_BYTES = 1 << 20
"""A torn line is searched for in this many bytes at the end; lines take a few kilobytes."""


class AppendFile:
    """Opens `path`, and truncates a line that a crash left unfinished.

    Raises:
        BlockingIOError: another process is writing this file.
        OSError: it cannot be opened or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.size = self._repaired_size()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _repaired_size(self) -> int:
        size = os.fstat(self._descriptor).st_size
        tail = os.pread(self._descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        torn = len(tail) - (tail.rfind(b"\n") + 1)
        if torn:
            os.ftruncate(self._descriptor, size - torn)
        return size - torn

    def append(self, lines: bytes) -> None:
        """Write whole lines and sync them to disk, or none of them.

        Raises:
            OSError: nothing was added; the same lines may be appended again.
        """
        assert lines.endswith(b"\n")
        written = 0
        try:
            while written < len(lines):
                written += os.write(self._descriptor, lines[written:])
            os.fsync(self._descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self.size)
            raise
        self.size += written

    def close(self) -> None:
        os.close(self._descriptor)


async def flush_until_cancelled(flush: Callable[[], Awaitable[None]], period_s: float) -> None:
    """Call `flush` periodically until cancelled, then once more. Calls never overlap, and none is interrupted."""
    flushing: asyncio.Future[None] | None = None
    try:
        while True:
            await asyncio.sleep(period_s)
            flushing = asyncio.ensure_future(flush())
            await asyncio.shield(flushing)
    finally:
        if flushing is not None:
            await flushing
        await flush()
