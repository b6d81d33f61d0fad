"""A directory as a storage, perhaps on a volume that several processes mount (ReadWriteMany).

Invariants: a blob appears under its key whole or not at all: it is written beside, made durable (fsync), and linked or
renamed into place. `create` is a hard link, which exists once on any file system; `replace` and `delete` hold a lock
(flock, which the kernel releases when its holder dies) from reading the version to writing the next one. A volume whose
file system has no locks is refused at the start. No call of the file system is made in the event loop.

    ROOT/objects/KEY      the blobs
    ROOT/unfinished/NAME  blobs being written
    ROOT/locks/00..ff     empty files, locked by the hash of a key
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from argosy_batch.storage.blob_store import CHUNK_BYTES, AlreadyExists, Blob, BlobEntry, Changed
from argosy_batch.storage.storage_threads import DEADLINE_S, StorageThreads
from argosy_protocol.errors import StorageUnavailable

T = TypeVar("T")
_ATTEMPTS = 10
_MODE = 0o700
"""Prompts and answers are the owner's business alone."""


class DirectoryStore:
    """Keeps blobs in files."""

    def __init__(self, root: Path, *, deadline_s: float = DEADLINE_S) -> None:
        """Make the folders, and check that the file system can be written and has locks and links.

        Args:
            deadline_s: time for each call of the file system.

        Raises:
            OSError: it cannot be used.
        """
        self._threads = StorageThreads(deadline_s)
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
        return await self._threads.run(partial(self._get, key))

    async def create(self, key: str, data: bytes) -> str:
        return await self._threads.run(partial(self._create, key, data))

    async def replace(self, key: str, data: bytes, version: str) -> str:
        return await self._threads.run(partial(self._replace, key, data, version))

    async def upload(self, key: str, chunks: AsyncIterable[bytes]) -> int:
        path = self._unfinished / secrets.token_hex(16)
        size = 0
        file = _OpenFile(self._threads, partial(_open_new, path), path)
        try:
            await file.opened()
            async for chunk in chunks:
                await file.run(partial(write_to, data=chunk))
                size += len(chunk)
            await file.run(partial(self._finish, unfinished=path, key=key))
        finally:
            closing = file.close()
            if closing is not None and not file.is_late:
                with contextlib.suppress(StorageUnavailable):
                    await self._threads.result(closing)
        return size

    async def read(self, key: str) -> AsyncGenerator[bytes, None]:
        file = _OpenFile(self._threads, partial(self._open, key))
        try:
            if await file.opened():
                while chunk := await file.run(_read):
                    yield chunk
        finally:
            file.close()

    async def delete(self, key: str) -> bool:
        return await self._threads.run(partial(self._delete, key))

    async def entries(self, folder: str) -> list[BlobEntry]:
        found: list[BlobEntry] = []
        folders = [self._path(folder)]
        while folders:  # one call for each, because all of them may take longer than one call may
            entries, inner = await self._threads.run(partial(self._scan, folders.pop()))
            found += entries
            folders += inner
        return sorted(found)

    async def time(self) -> float:
        return await self._threads.run(self._time)

    async def remove_leftovers(self, older_than: float) -> None:
        await self._threads.run(partial(self._remove_leftovers, older_than))
        folders = [self._objects]
        while folders:  # as in `entries`
            folders += await self._threads.run(partial(self._remove_empty, folders.pop(), older_than))

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

    def _time(self) -> float:
        path = self._unfinished / secrets.token_hex(16)
        descriptor = _open_new(path)
        try:
            write_to(descriptor, b"0")  # the time of a write is the file server's
            return os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)

    def _create(self, key: str, data: bytes) -> str:
        path = self._path(key)
        with self._written(data) as unfinished:
            try:
                _in_folder(path.parent, lambda: os.link(unfinished, path))
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
        os.fsync(descriptor)
        with self._locked(key):
            _in_folder(path.parent, lambda: os.rename(unfinished, path))
        _sync_folder(path.parent)

    def _scan(self, folder: Path) -> tuple[list[BlobEntry], list[Path]]:
        """Return a folder's files, and the folders in it."""
        files: list[BlobEntry] = []
        folders: list[Path] = []
        prefix = os.path.relpath(folder, self._objects)  # once: it takes as long as looking at a file
        try:
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return files, folders
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
                continue
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                status = entry.stat(follow_symlinks=False)
                files.append(BlobEntry(f"{prefix}/{entry.name}", status.st_size, status.st_mtime))
        return files, folders

    def _remove_leftovers(self, older_than: float) -> None:
        for entry in os.scandir(self._unfinished):
            with contextlib.suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_mtime < older_than:
                    os.unlink(entry.path)

    def _remove_empty(self, folder: Path, older_than: float) -> list[Path]:
        """Remove the empty folders in a folder; return the others. Each batch leaves one."""
        others: list[Path] = []
        with contextlib.suppress(FileNotFoundError):
            for entry in list(os.scandir(folder)):
                if not entry.is_dir(follow_symlinks=False):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    is_old = entry.stat(follow_symlinks=False).st_mtime < older_than
                    if not (is_old and _remove_folder(entry.path)):
                        others.append(Path(entry.path))
        return others

    @contextlib.contextmanager
    def _written(self, data: bytes) -> Iterator[Path]:
        """Give a durable file with `data`, which is removed unless it is renamed."""
        path = self._unfinished / secrets.token_hex(16)
        descriptor = _open_new(path)
        try:
            write_to(descriptor, data)
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


class _OpenFile:
    """A file that is open in threads. Its calls run one after another, also when the wait for one was given up."""

    def __init__(
        self, threads: StorageThreads, open_file: Callable[[], int | None], unlinked: Path | None = None
    ) -> None:
        """
        Args:
            open_file: returns the descriptor; None if there is no such file.
            unlinked: removed at the end, if it still exists.
        """
        self._threads = threads
        self._unlinked = unlinked
        self._descriptor: int | None = None
        self._last: Future[Any] = threads.submit(partial(self._open, open_file))

    async def opened(self) -> bool:
        """Wait until the file is open; return whether there is one.

        Raises:
            StorageUnavailable: see `StorageThreads.run`; likewise below.
        """
        await self._threads.result(self._last)
        return self._descriptor is not None

    async def run(self, call: Callable[[int], T]) -> T:
        """Run a call with the descriptor. The file must be open, and the call before this one have ended."""
        descriptor = self._descriptor
        assert descriptor is not None
        work = self._threads.submit(lambda: call(descriptor))
        self._last = work
        return await self._threads.result(work)

    @property
    def is_late(self) -> bool:
        """Whether the last call goes on although the wait for it was given up."""
        return not self._last.done()

    def close(self) -> Future[None] | None:
        """Close the file once its last call has ended, however late.

        Returns:
            The closing; None if its opening was refused, or given up before it began.
        """
        if self._descriptor is None and self._last.cancelled():
            return None
        closed: Future[None] = Future()
        closed.set_running_or_notify_cancel()

        def close() -> None:
            try:
                self._close()
            except OSError as error:
                closed.set_exception(error)
            else:
                closed.set_result(None)

        self._last.add_done_callback(lambda _: self._threads.submit(close, is_required=True))
        return closed

    def _open(self, open_file: Callable[[], int | None]) -> None:
        self._descriptor = open_file()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        if self._unlinked is not None:
            self._unlinked.unlink(missing_ok=True)


def _open_new(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def write_to(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _read(descriptor: int) -> bytes:
    return os.read(descriptor, CHUNK_BYTES)


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, durably."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=_MODE)
    _sync_folder(folder.parent)


def _in_folder(folder: Path, enter: Callable[[], None]) -> None:
    """Make a folder, and enter a name in it; again if the folder was removed in between, because it was empty."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            _make_folder(folder)
            enter()
            return
    raise FileNotFoundError(errno.ENOENT, "the folder is removed again and again", str(folder))


def _remove_folder(path: str) -> bool:
    """Remove a folder if it is empty; return whether it was."""
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


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
