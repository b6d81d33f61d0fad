"""A directory as a storage, perhaps on a volume that several routers mount (ReadWriteMany).

Invariants: a blob appears under its key whole or not at all: it is written beside, made durable (fsync), and linked or
renamed into place. `create` is a hard link, which exists once on any file system; `replace` and `delete` hold a lock
(flock, which the kernel releases when its holder dies) from reading the version to writing the next one. A volume whose
file system has no locks is refused at the start.

    ROOT/objects/KEY      the blobs
    ROOT/unfinished/NAME  blobs being written
    ROOT/locks/00..ff     empty files, locked by the hash of a key
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

from argosy_router.storage.blob_store import (
    CHUNK_BYTES,
    AlreadyExists,
    Blob,
    BlobEntry,
    Changed,
    StorageUnavailable,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
_MODE = 0o700
"""Prompts and answers are the owner's business alone."""


class DirectoryStore:
    """Keeps blobs in files."""

    def __init__(self, root: Path) -> None:
        """Make the folders, and check that the file system can be written and has locks and links.

        Raises:
            OSError: it cannot be used.
        """
        self._objects, self._unfinished, self._locks = (
            root / name for name in ("objects", "unfinished", "locks")
        )
        root.mkdir(mode=_MODE, parents=True, exist_ok=True)
        for folder in (self._objects, self._unfinished, self._locks):
            folder.mkdir(mode=_MODE, exist_ok=True)
        probe = self._unfinished / f"probe-{secrets.token_hex(8)}"
        try:
            with self._locked(str(probe)):
                probe.touch(0o600)
                os.link(probe, f"{probe}-link")
        finally:
            for path in (probe, Path(f"{probe}-link")):
                path.unlink(missing_ok=True)

    async def get(self, key: str) -> Blob | None:
        return await _in_thread(self._get, key)

    async def create(self, key: str, data: bytes) -> str:
        return await _in_thread(self._create, key, data)

    async def replace(self, key: str, data: bytes, version: str) -> str:
        return await _in_thread(self._replace, key, data, version)

    async def upload(self, key: str, chunks: AsyncIterable[bytes]) -> int:
        path = self._unfinished / secrets.token_hex(16)
        size = 0
        descriptor = await _in_thread(_open_new, path)
        try:
            async for chunk in chunks:
                await _in_thread(_write, descriptor, chunk)
                size += len(chunk)
            await _in_thread(self._finish, descriptor, path, key)
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)
        return size

    async def read(self, key: str) -> AsyncGenerator[bytes, None]:
        descriptor = await _in_thread(self._open, key)
        if descriptor is None:
            return
        try:
            while chunk := await _in_thread(os.read, descriptor, CHUNK_BYTES):
                yield chunk
        finally:
            os.close(descriptor)

    async def delete(self, key: str) -> bool:
        return await _in_thread(self._delete, key)

    async def entries(self, folder: str) -> list[BlobEntry]:
        return await _in_thread(self._entries, folder)

    async def remove_leftovers(self, older_than: float) -> None:
        await _in_thread(self._remove_leftovers, older_than)

    # in a thread

    def _path(self, key: str) -> Path:
        return self._objects / key

    def _get(self, key: str) -> Blob | None:
        try:
            data = self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        return Blob(data, _version(data))

    def _open(self, key: str) -> int | None:
        try:
            return os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None

    def _create(self, key: str, data: bytes) -> str:
        path = self._path(key)
        with self._written(data) as unfinished:
            _make_folder(path.parent)
            try:
                os.link(unfinished, path)
            except FileExistsError:
                raise AlreadyExists(key) from None
        _sync_folder(path.parent)
        return _version(data)

    def _replace(self, key: str, data: bytes, version: str) -> str:
        path = self._path(key)
        with self._written(data) as unfinished, self._locked(key):
            stored = self._get(key)
            if stored is None or stored.version != version:
                raise Changed(key)
            os.rename(unfinished, path)
        _sync_folder(path.parent)
        return _version(data)

    def _delete(self, key: str) -> bool:
        path = self._path(key)
        with self._locked(key):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return False
        _sync_folder(path.parent)
        return True

    def _finish(self, descriptor: int, unfinished: Path, key: str) -> None:
        path = self._path(key)
        _make_folder(path.parent)
        os.fsync(descriptor)
        with self._locked(key):
            os.rename(unfinished, path)
        _sync_folder(path.parent)

    def _entries(self, folder: str) -> list[BlobEntry]:
        return sorted(self._walk(self._path(folder)))

    def _walk(self, folder: Path) -> Iterator[BlobEntry]:
        try:
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(Path(entry.path))
                continue
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                status = entry.stat(follow_symlinks=False)
                key = os.path.relpath(entry.path, self._objects)
                yield BlobEntry(key, status.st_size, status.st_mtime)

    def _remove_leftovers(self, older_than: float) -> None:
        for entry in os.scandir(self._unfinished):
            with contextlib.suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_mtime < older_than:
                    os.unlink(entry.path)

    @contextlib.contextmanager
    def _written(self, data: bytes) -> Iterator[Path]:
        """Give a durable file with `data`, which is removed unless it is renamed."""
        path = self._unfinished / secrets.token_hex(16)
        descriptor = _open_new(path)
        try:
            _write(descriptor, data)
            os.fsync(descriptor)
            yield path
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Hold the lock of a key, against threads, processes and machines."""
        name = hashlib.blake2b(key.encode(), digest_size=1).hexdigest()
        descriptor = os.open(self._locks / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _open_new(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, durably."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=_MODE)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems sync folders by themselves
            raise
    finally:
        os.close(descriptor)


def _version(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


async def _in_thread(call: Callable[..., T], *arguments: object) -> T:
    """Run a call in a thread. A cancelled one is waited for all the same: it may use a file that is closed next."""
    work = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise
    except OSError as error:
        log.error("storage: %s", error)
        raise StorageUnavailable from error
