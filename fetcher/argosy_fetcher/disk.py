"""Disk: space, errors and durability of what the fetcher writes."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
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


_MARGIN: Final = FreeSpace()


def free_bytes(directory: Path) -> int | None:
    """Return how much may still be written to the disk of a directory; None if its file system does not tell."""
    found = os.statvfs(directory)
    is_known = found.f_blocks > 0  # some network file systems report nothing
    return found.f_bavail * found.f_frsize if is_known else None


def require_space(
    directory: Path, num_bytes: int, model: str, min_free: FreeSpace = _MARGIN, tried: str = ""
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


def fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(path: Path) -> None:
    """Make renames in a directory durable, on file systems that can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise
    finally:
        os.close(descriptor)
