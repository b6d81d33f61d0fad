"""Store: models on this machine's disk, each complete or absent.

Owns what a fetch does to a store: the lock of a source, the directory in which a model gathers, its publication; the
marks by which processes hold and use a model; and removing models, so that nobody finds half of one. `store_index`
finds them. Must not know sources, transfers or what a model consists of.
Invariants: a directory with a revision's name is complete, because it is renamed to that name at the end, unless
another program has damaged it since; one process at a time writes below a source's directory; a model that a process
holds or fetches is not removed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Final

from argosy_fetcher.disk import (
    IDLE_AFTER_S,
    MARGIN,
    TEMPORARY_PREFIX,
    FreeSpace,
    HolderMark,
    Idle,
    SharedLock,
    exclusive_lock,
    format_bytes,
    free_bytes,
    fsync_directory,
    replace_file,
    try_exclusive_lock,
    watched,
)
from argosy_fetcher.errors import FetchError, ModelInUse, ModelRemoved
from argosy_fetcher.source import Snapshot, encode_snapshot
from argosy_fetcher.store_index import (
    CHOSEN,
    LAST_USE,
    LOCK,
    MANIFEST,
    MAX_REFUSAL_BYTES,
    PARTIAL_PREFIX,
    REFS,
    REFUSED,
    SNAPSHOT,
    TRASH_PREFIX,
    Manifest,
    StoredFile,
    StoredModel,
    StoreIndex,
    StoreUsage,
    names_in,
    read_manifest,
    read_refusal,
    read_snapshot_record,
    unshared_bytes,
    write_manifest,
    write_ref,
)
from argosy_protocol.reports import duration_text

_LEFTOVER_AGE: Final = 86400.0
"""Files of interrupted writes are deleted after a day, in case that locks have no effect on this file system."""
_REFUSAL_S: Final = 86400.0
_OWN_FILES: Final = (MANIFEST, LAST_USE, SNAPSHOT)
TOUCH_INTERVAL_S: Final = 3600.0
"""How wrong the last use of a killed process's model may be. `argosy models prune` counts in hours and days."""


@dataclass(frozen=True, slots=True)
class Pruned:
    removed: tuple[StoredModel, ...]
    in_use: tuple[StoredModel, ...]
    """What should have been removed as well."""
    freed_bytes: int
    """Less than the sizes add up to if other models, or Hugging Face's cache, have the same files."""


class Store(StoreIndex):
    """A directory of models. It need not exist, and may be read-only for all but fetching and removing."""

    def hold(self, path: Path) -> SharedLock:
        """Mark a model as in use, until the result is closed or the process ends, and note the time.

        Raises:
            ModelRemoved: it is not in the store any more.
            FetchError: it cannot be locked.
        """
        try:
            lock = SharedLock(path / LAST_USE)
        except FileNotFoundError as error:
            raise ModelRemoved(
                f"the model in {path} was removed from the store; start again to fetch it"
            ) from error
        except OSError as error:
            raise FetchError(f"the model in {path} cannot be locked: {error.strerror or error}") from error
        self.touch(path)
        return lock

    def touch(self, path: Path) -> None:
        """Note that a model is used now, unless the store is read-only."""
        now = self._now()
        with suppress(OSError):
            os.utime(path / LAST_USE, (now, now))

    def touch_held(self, now: float, min_age: float) -> None:
        """Note the use of all models that processes hold and that were not used within `min_age` seconds: a process
        whose store is read-only cannot do that itself."""
        for model in self.list():
            lock = model.path / LAST_USE
            if now - model.last_used_at >= min_age:
                with suppress(OSError), try_exclusive_lock(lock) as is_locked:
                    if not is_locked:
                        os.utime(lock, (now, now))

    def choose(self, path: Path) -> None:
        """Note that a model is what a program means that knows its endpoint, unless the store is read-only. Its last
        use would not tell that: other programs that hold another endpoint's model renew theirs."""
        now = self._now()
        with suppress(OSError):
            if (path / LAST_USE).exists():
                (path / CHOSEN).touch()
                os.utime(path / CHOSEN, (now, now))

    @contextmanager
    def lock(
        self,
        source: str,
        on_wait: Callable[[], None],
        *,
        on_idle: Idle = lambda holder: None,
        idle_after_s: float = IDLE_AFTER_S,
    ) -> Iterator[HolderMark]:
        """Be the only process that fetches from a source. Yields what tells others that this one makes progress.

        Args:
            on_wait: called once if another process holds the lock.
            on_idle: called, from another thread, while that process makes no progress for `idle_after_s`.

        Raises:
            OSError: the store cannot be written.
        """
        path = self._directory(source) / LOCK
        with exclusive_lock(path, on_wait, lambda: watched(path, on_idle, idle_after_s)) as descriptor:
            fsync_directory(self.root)
            yield HolderMark(descriptor)

    def open_partial(self, snapshot: Snapshot) -> Path:
        """Return the directory in which a snapshot's files gather, with what an earlier attempt has left if the
        snapshot is still the same. Called with the source's lock held."""
        path = self._partial(snapshot)
        record = encode_snapshot(snapshot)
        if path.exists() and read_snapshot_record(path) != record:
            discard(path)
        path.mkdir(exist_ok=True)
        if read_snapshot_record(path) != record:
            replace_file(path / SNAPSHOT, record)
        return path

    def discard_partial(self, snapshot: Snapshot) -> None:
        """Delete what was fetched of a snapshot. Called with the source's lock held."""
        discard(self._partial(snapshot))

    def refuse(self, snapshot: Snapshot, reason: str) -> None:
        """Delete what was fetched of a snapshot, and remember why it is not served. Called with the lock held."""
        path = self._partial(snapshot)
        _keep_only(path, {SNAPSHOT})
        data = reason.encode(errors="replace")[:MAX_REFUSAL_BYTES]
        replace_file(path / REFUSED, data)

    def refusal(self, snapshot: Snapshot) -> str:
        """Return why a snapshot was refused within a day; empty if it was not. Another version of this program may
        serve it, and therefore a refusal ends. Called with the lock held."""
        path = self._partial(snapshot)
        if read_snapshot_record(path) != encode_snapshot(snapshot):
            return ""
        try:
            age = time.time() - (path / REFUSED).stat().st_mtime
        except FileNotFoundError:
            return ""
        if age > _REFUSAL_S:
            (path / REFUSED).unlink(missing_ok=True)
            return ""
        return read_refusal(path)

    def gathered(self, snapshot: Snapshot) -> tuple[StoredFile, ...] | None:
        """Return the files of a snapshot if they are all there, because a process ended while it published them.
        Called with the source's lock held."""
        partial = self._partial(snapshot)
        if read_snapshot_record(partial) != encode_snapshot(snapshot):
            return None
        manifest = read_manifest(partial, snapshot.revision)
        return None if manifest is None else manifest.files

    def publish(self, snapshot: Snapshot, files: tuple[StoredFile, ...]) -> Path:
        """Make a snapshot's files a complete model, in one step. They are on disk already. Called with the lock held.

        The manifest comes first and the snapshot's record goes last, so that `gathered` finds the files after a crash.

        Args:
            files: all of the model; other files in the partial directory are deleted.

        Raises:
            ModelInUse: a process uses a damaged directory in its place.
        """
        directory = self._directory(snapshot.source)
        partial, target = self._partial(snapshot), directory / snapshot.revision
        fsync_directory(partial)
        fetched_at = datetime.fromtimestamp(self._now(), UTC)
        write_manifest(partial, Manifest(snapshot.source, snapshot.revision, files, fetched_at))
        (partial / LAST_USE).touch()
        self.touch(partial)
        _keep_only(partial, {*_OWN_FILES, *(file.path.partition("/")[0] for file in files)})
        for folder in {parent for file in files for parent in PurePosixPath(file.path).parents}:
            fsync_directory(partial / folder)
        if self._load(directory, snapshot.revision, {}, snapshot.source) is not None:
            discard(partial)  # locks have no effect here, and another machine was faster
            return target
        discard_unused(target, target / LAST_USE, f"{snapshot.source} is damaged, and")
        partial.rename(target)
        fsync_directory(directory)
        (target / SNAPSHOT).unlink(missing_ok=True)
        return target

    def pin(self, source: str, requested_revision: str, revision: str) -> None:
        """Remember which revision a requested one was found to be. Called with the lock held."""
        write_ref(self._directory(source), source, requested_revision, revision)

    def remove(self, model: StoredModel) -> None:
        """Remove a model, complete or not.

        Raises:
            ModelInUse: a process holds or fetches it.
            FetchError: it cannot be removed.
        """
        is_partial = model.path.name.startswith(PARTIAL_PREFIX)
        lock = (model.path.parent / LOCK) if is_partial else (model.path / LAST_USE)
        use = "fetches" if is_partial else "uses"
        try:
            discard_unused(model.path, lock, f"{model.source} at {model.revision}:", use)
            self._sweep(model.path.parent)
        except OSError as error:
            raise FetchError(
                f"cannot remove {model.path}: {error.strerror or error}; check the directory's owner and permissions"
            ) from error

    def prune(self, max_bytes: int | None = None, max_age: float | None = None) -> Pruned:
        """Remove what was not used for `max_age` seconds, then what was used longest ago until the store has at most
        `max_bytes`. Interrupted fetches and damaged models count as models that were used when they last received
        something.

        Raises:
            FetchError: something cannot be removed.
        """
        models = sorted(
            (*self.list(), *self.list_partial(), *self.list_damaged()), key=lambda model: model.last_used_at
        )
        usage, now = StoreUsage(model.path for model in models), self._now()
        removed: list[StoredModel] = []
        in_use: list[StoredModel] = []
        freed_bytes = 0
        for model in models:
            is_old = max_age is not None and now - model.last_used_at > max_age
            is_too_much = max_bytes is not None and usage.total > max_bytes
            if not (is_old or is_too_much):
                continue
            unshared = unshared_bytes(model.path)
            try:
                self.remove(model)
            except ModelInUse:
                in_use.append(model)
            else:
                removed.append(model)
                freed_bytes += unshared
                usage.remove(model.path)
        for directory in self._source_directories():
            self._sweep(directory)
        return Pruned(tuple(removed), tuple(in_use), freed_bytes)

    def _sweep(self, directory: Path) -> None:
        """Delete what interrupted removals and writes have left, and a source's directory without a model."""
        names = names_in(directory)
        for name in names:
            if name.startswith(TRASH_PREFIX):
                shutil.rmtree(directory / name, ignore_errors=True)
        has_leftovers = any(name.startswith(TEMPORARY_PREFIX) for name in names)
        if not has_leftovers and set(names_in(directory)) - {LOCK, REFS}:
            return
        with suppress(OSError), try_exclusive_lock(directory / LOCK) as is_locked:
            if not is_locked:
                return
            for name in names_in(directory):
                path = directory / name
                is_old = self._now() - path.lstat().st_mtime > _LEFTOVER_AGE
                if name.startswith(TEMPORARY_PREFIX) and is_old:
                    path.unlink()
            if set(names_in(directory)) <= {LOCK, REFS}:
                (directory / REFS).unlink(missing_ok=True)
                (directory / LOCK).unlink()
                directory.rmdir()

    def _partial(self, snapshot: Snapshot) -> Path:
        return self._directory(snapshot.source) / f"{PARTIAL_PREFIX}{snapshot.revision}"


def discard_unused(path: Path, lock: Path, what: str, use: str = "uses") -> None:
    """Delete a directory unless a process holds its lock. Without a lock file nothing can hold it.

    Raises:
        ModelInUse: a process does.
    """
    with try_exclusive_lock(lock) as is_locked:
        if not is_locked and lock.exists():
            raise ModelInUse(f"{what} a running process {use} it; stop that process first")
        discard(path)


def discard(path: Path) -> None:
    """Delete a directory so that no one finds half of it."""
    trash = path.with_name(f"{TRASH_PREFIX}{secrets.token_hex(8)}")
    try:
        path.rename(trash)
    except FileNotFoundError:
        return
    shutil.rmtree(trash, ignore_errors=True)


def _keep_only(directory: Path, names: set[str]) -> None:
    """Delete everything else in a directory but the store's own files that a complete model keeps."""
    for name in set(names_in(directory)) - names:
        path = directory / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def make_room(
    store: Store,
    num_bytes: int,
    *,
    source: str,
    min_age: float,
    note: Callable[[str], None],
    min_free: FreeSpace = MARGIN,
    now: Callable[[], float] = time.time,
    free: Callable[[], int | None] | None = None,
) -> None:
    """Remove what was used longest ago, until the store's disk has room for more bytes or nothing else may go.

    A model that a process holds, or that was used a moment ago, stays; if all the others together would not make enough
    room, none is removed.

    Args:
        source: what is about to be fetched; other revisions of it may share files with it, and stay.
        min_age: seconds for which a model must not have been used. An engine that is about to start holds its model
            a few seconds after it was fetched.
        note: is told of each model that is removed.
        min_free: what must be left of the disk then.
        now: seconds since the epoch.
        free: the disk's free bytes; None if they are not known.
    """
    free = free or (lambda: free_bytes(store.root))
    store.touch_held(now(), min_age)
    unused = [
        model
        for model in (*store.list(), *store.list_partial())
        if model.source != source and now() - model.last_used_at >= min_age
    ]
    found = free()
    wanted = num_bytes + min_free.of(os.statvfs(store.root))
    if found is None or found >= wanted or found + sum(model.size for model in unused) < wanted:
        return
    for model in sorted(unused, key=lambda model: model.last_used_at):
        try:
            store.remove(model)
        except FetchError:
            continue  # it is in use
        unused_for = duration_text(max(0.0, now() - model.last_used_at))
        note(f"removed {model.source} ({format_bytes(model.size)}, unused for {unused_for}) to make room")
        found = free()
        if found is None or found >= wanted:
            return


class ModelHold:
    """A model in use, until it is closed or this process ends. A thread notes the use from time to time."""

    def __init__(self, store: Store, path: Path, lock: SharedLock, touch_interval_s: float) -> None:
        self._store = store
        self._path = path
        self._lock = lock
        self._closed = threading.Event()
        threading.Thread(
            target=self._keep_touching, args=(touch_interval_s,), name="model in use", daemon=True
        ).start()

    def close(self) -> None:
        """Note the use for the last time, and let go."""
        if not self._closed.is_set():
            self._closed.set()
            self._store.touch(self._path)
            self._lock.close()

    def __enter__(self) -> ModelHold:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _keep_touching(self, interval_s: float) -> None:
        while not self._closed.wait(interval_s):
            self._store.touch(self._path)


def hold_model(
    path: Path,
    *,
    touch_interval_s: float = TOUCH_INTERVAL_S,
    now: Callable[[], float] = time.time,
) -> ModelHold | None:
    """Mark a model as used now, and as in use until the result is closed or this process ends.

    Args:
        now: seconds since the epoch.

    Returns:
        None if nothing can be held: the directory is of no store, or on a file system without locks. It is read all the
        same.

    Raises:
        ModelRemoved: the directory does not exist any more.
    """
    if not (path / LAST_USE).is_file():
        if path.is_dir():
            return None
        raise ModelRemoved(f"the model in {path} was removed; start again to fetch it")
    store = Store(path.parent.parent, now=now)
    try:
        lock = store.hold(path)
    except ModelRemoved:
        raise
    except FetchError:
        return None  # for example on a network file system without locks
    return ModelHold(store, path, lock, touch_interval_s)
