"""Disk: space, errors and durability of what the fetcher writes, and locks between processes.

An exclusive lock (by flock) is on a regular file, and no link is followed to it, because its holder writes to it, and
others can write to the directory. The file's content names the holder, and its time changes while the holder makes
progress. No two clocks are compared, because machines share locks: whoever waits measures on its own clock since when
the time has not changed. Whoever can write to the store can write the name, so that one of another form is not passed
on, and none is more than what a process calls itself.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from argosy_fetcher.errors import FetchError, NoSpace

MARGIN_BYTES: Final = 64 << 20
"""Room that a fetch leaves on the disk, for journals, manifests and whoever else writes."""
TEMPORARY_PREFIX: Final = ".argosy-new-"
"""Of files that `replace_file` writes; one is left behind if the process is killed meanwhile."""
OTHER_DIRECTORY: Final = "choose another directory with --download-dir or ARGOSY_MODELS_DIR"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSED: Final = frozenset({errno.EACCES, errno.EPERM})
_NO_FSYNC: Final = frozenset({errno.EINVAL, errno.ENOTSUP})


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """Room that must stay free on a disk: bytes, or a share of the disk."""

    num_bytes: int = MARGIN_BYTES
    percent: float | None = None
    max_bytes: int | None = None
    """Bound of the share."""

    def of(self, disk: os.statvfs_result) -> int:
        """Return the bytes that must stay free, at least `MARGIN_BYTES`."""
        if self.percent is None:
            return max(self.num_bytes, MARGIN_BYTES)
        share = int(disk.f_blocks * disk.f_frsize * self.percent / 100)
        return max(share if self.max_bytes is None else min(share, self.max_bytes), MARGIN_BYTES)


MARGIN: Final = FreeSpace()


def free_bytes(directory: Path) -> int | None:
    """Return how much may still be written to the disk of a directory; None if its file system does not tell."""
    found = os.statvfs(directory)
    is_known = found.f_blocks > 0  # some network file systems report nothing
    return found.f_bavail * found.f_frsize if is_known else None


def require_space(
    directory: Path, num_bytes: int, model: str, min_free: FreeSpace = MARGIN, tried: str = ""
) -> None:
    """Check that the disk of a directory has room for more bytes.

    Args:
        min_free: what must be left then.
        tried: what was done for more room, for the message.

    Raises:
        NoSpace: it has not.
    """
    free = free_bytes(directory)
    reserved = min_free.of(os.statvfs(directory))
    if num_bytes and free is not None and free < num_bytes + reserved:
        raise NoSpace(
            f"{model}: {format_bytes(num_bytes)} more must be stored, and the disk of {directory} has "
            f"{format_bytes(free)} free, of which {format_bytes(reserved)} must stay free; {tried}"
            f"make room (argosy models prune), or {OTHER_DIRECTORY}"
        )


@contextmanager
def disk_errors(model: str, directory: Path) -> Iterator[None]:
    """Turn errors of the file system into errors that name the model and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise NoSpace(
                f"{model}: the disk of {directory} is full; make room (argosy models prune), or {OTHER_DIRECTORY}. "
                "What has arrived is kept"
            ) from error
        where = error.filename or directory
        who = f" (for user {os.geteuid()}, group {os.getegid()})" if error.errno in _REFUSED else ""
        raise FetchError(
            f"{model}: cannot use {where}: {error.strerror or error}{who}; {OTHER_DIRECTORY}"
        ) from error


def format_bytes(num_bytes: int) -> str:
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.1f} GiB"
    return f"{num_bytes / (1 << 20):.1f} MiB"


def replace_file(path: Path, data: bytes) -> None:
    """Write a file atomically and durably: readers see the old content or the new, after a power failure too."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def empty_directory(path: Path) -> Path:
    """Return a directory after making it, or deleting what is in it."""
    if path.exists():
        shutil.rmtree(path)
    path.mkdir()
    return path


def fsync_file(path: Path, flags: int = os.O_NOFOLLOW) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(path: Path) -> None:
    """Make renames in a directory durable, on file systems that can."""
    try:
        fsync_file(path, os.O_DIRECTORY)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise


_MAX_MISSING: Final = 100


@contextmanager
def exclusive_lock(
    path: Path,
    on_wait: Callable[[], None],
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[int]:
    """Hold a lock file exclusively, creating it and its directory. Yields its descriptor, open for reading and writing.

    Args:
        on_wait: called once if another process, or another thread, holds it.
        waiting: makes a context that lasts as long as the wait for it.

    Raises:
        OSError: it cannot be created, or is something else than a regular file.
    """
    descriptor = _acquire(path, on_wait, waiting)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _acquire(
    path: Path, on_wait: Callable[[], None], waiting: Callable[[], AbstractContextManager[object]]
) -> int:
    num_missing = 0
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = _open_regular(path, os.O_CREAT)
        except FileNotFoundError:  # the directory was removed in between, or cannot be made at all
            num_missing += 1
            if num_missing > _MAX_MISSING:
                raise
            continue
        try:
            if not _try_lock(descriptor, fcntl.LOCK_EX):
                on_wait()
                with waiting():
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the file was removed by the process that held it


def _open_regular(path: Path, flags: int = 0) -> int:
    """Open a regular file for reading and writing.

    Raises:
        OSError: it cannot be opened, or is something else, such as a symbolic link.
    """
    flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_regular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    return descriptor


def _not_regular(path: Path) -> OSError:
    return OSError(errno.EINVAL, "the lock is not a regular file; remove it", str(path))


@contextmanager
def try_exclusive_lock(path: Path) -> Iterator[bool]:
    """Hold an existing lock file exclusively, or yield False if another holds it or it does not exist.

    Raises:
        OSError: it cannot be opened, or is something else than a regular file.
    """
    try:
        descriptor = _open_regular(path)
    except FileNotFoundError:
        yield False
        return
    try:
        yield _try_lock(descriptor, fcntl.LOCK_EX) and _is_at(descriptor, path)
    finally:
        os.close(descriptor)


class SharedLock:
    """A shared lock on an existing file, held until it is closed, or the process ends. Read-only files suffice.

    Raises (from the constructor):
        FileNotFoundError: the file does not exist, or is being removed.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not (_try_lock(self._descriptor, fcntl.LOCK_SH) and _is_at(self._descriptor, path)):
                raise FileNotFoundError(f"{path} is being removed")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> SharedLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


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
