"""File locks between processes, by flock: exclusive ones with waiting, and shared ones that mark a use.

Invariant: an exclusive lock is on a regular file, and no link is followed to it, because its holder writes to it, and
others can write to the directory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Final

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
