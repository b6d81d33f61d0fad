"""A directory as a storage, perhaps on a volume that several processes mount (ReadWriteMany).

Invariants: a blob appears under its key whole or not at all: it is written beside, made durable (fsync), and linked or
renamed into place. `create` is a hard link, which exists once on any file system; `replace` and `delete` hold a lock
(flock, which the kernel releases when its holder dies) from reading the version to writing the next one. A volume whose
file system has no locks is refused at the start. No call of the file system is made in the event loop: threads of the
storage's own make them, because a call may hang, such as on a network volume whose server is gone.

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
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Condition, Thread
from typing import Any, Final, TypeVar

from argosy_batch.object_store import CHUNK_BYTES, AlreadyExists, Blob, BlobEntry, Changed
from argosy_protocol.errors import StorageFull, StorageUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
NUM_THREADS: Final = 8
DEADLINE_S: Final = 30.0
"""Time for one call, with its wait for a thread. A call reads or writes one small file, a piece of a large one, or one
folder's listing."""


class StorageThreads:
    """Runs calls in threads of its own, which are started when needed and end with the process.

    Invariants: a call that hangs holds up nothing but its own thread: neither the event loop, nor the default executor,
    nor the end of the process. While all threads hang, calls are refused at once. A call that is refused or given up
    before a thread has begun it is not kept, nor are its data.
    """

    def __init__(self, deadline_s: float = DEADLINE_S, num_threads: int = NUM_THREADS) -> None:
        self._deadline_s = deadline_s
        self._num_threads = num_threads
        self._calls: OrderedDict[Future[Any], Callable[[], Any]] = OrderedDict()
        """Calls that no thread has begun, oldest first."""
        self._threads: list[Thread] = []
        self._changed = Condition()
        """Guards the calls and the threads; notified of each new call."""
        self._late: set[Future[Any]] = set()
        """Calls that a thread is still in after their deadline."""

    def submit(self, call: Callable[[], T], *, is_required: bool = False) -> Future[T]:
        """Run a call in a thread some time. May be called from any thread. `is_required`: run it however late;
        otherwise it is cancelled at once while all threads hang."""
        work: Future[T] = Future()
        if self._all_hang and not is_required:
            work.cancel()
            return work
        with self._changed:
            self._calls[work] = call
            self._changed.notify()
            if len(self._threads) < self._num_threads:
                # A daemon, because one that hangs must not hold up the exit.
                self._threads.append(Thread(target=self._run, name="storage", daemon=True))
                self._threads[-1].start()
        return work

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call in a thread, and return what it returns.

        Raises:
            StorageUnavailable: it failed with an OSError, or took too long; the log has the cause.
        """
        return await self.result(self.submit(call))

    async def result(self, work: Future[T]) -> T:
        """Wait for a call of `submit`, up to the deadline; a cancelled wait also gives it that time to end.

        Raises:
            StorageUnavailable: see `run`. A call that no thread has begun will not be run any more.
        """
        if work.cancelled() or (self._all_hang and self._cancel(work)):
            raise StorageUnavailable(self._reason())
        waited = asyncio.wrap_future(work)
        try:
            done, _ = await asyncio.wait([waited], timeout=self._deadline_s)
        except asyncio.CancelledError:
            await asyncio.wait([waited], timeout=self._deadline_s)
            if not waited.done():
                self._give_up(work, waited)
            raise
        if not done:
            self._give_up(work, waited)
            log.error("storage: %s", self._reason())
            raise StorageUnavailable(self._reason())
        try:
            return waited.result()
        except OSError as error:
            log.error("storage: %s", error)
            if error.errno in _FULL:
                raise StorageFull from error
            raise StorageUnavailable from error

    @property
    def _all_hang(self) -> bool:
        return len(self._late) >= self._num_threads

    def _cancel(self, work: Future[Any]) -> bool:
        """Cancel and forget a call, unless a thread has begun it."""
        if not work.cancel():
            return False
        with self._changed:
            self._calls.pop(work, None)
        return True

    def _give_up(self, work: Future[Any], waited: asyncio.Future[Any]) -> None:
        waited.cancel()
        if not self._cancel(work):
            self._late.add(work)
            work.add_done_callback(self._late.discard)

    def _reason(self) -> str:
        return f"a call has not ended in {self._deadline_s:g} s, as on a volume whose server is gone"

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._calls:
                    self._changed.wait()
                work, call = self._calls.popitem(last=False)
            if not work.set_running_or_notify_cancel():
                continue
            try:
                work.set_result(call())
            except BaseException as error:
                work.set_exception(error)
            del work, call  # what they refer to must not stay until the next call


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
