"""Store: models on this machine's disk, each complete or absent.

Owns directories, locks, publication, listing and removal. Must not know sources, transfers or what a model consists of.
Invariants: a directory with a revision's name is complete, because it is renamed to that name at the end, unless
another program has damaged it since; one process at a time writes below a source's directory; a model that a process
holds is not removed; what cannot be read is not taken for damaged.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from argosy_fetcher import store_layout
from argosy_fetcher.disk import TEMPORARY_PREFIX, fsync_directory, replace_file
from argosy_fetcher.errors import FetchError, ModelInUse, ModelRemoved
from argosy_fetcher.file_lock import SharedLock, exclusive_lock, try_exclusive_lock
from argosy_fetcher.lock_holder import IDLE_AFTER_S, HolderMark, Idle, watched
from argosy_fetcher.snapshot import Digest, Snapshot, encode_snapshot
from argosy_fetcher.store_layout import Manifest, StoredFile
from argosy_fetcher.store_usage import StoreUsage, files_below, stored_bytes, unshared_bytes

_LEFTOVER_AGE: Final = 86400.0
"""Files of interrupted writes are deleted after a day, in case that locks have no effect on this file system."""
_REFUSAL_S: Final = 86400.0
_OWN_FILES: Final = (store_layout.MANIFEST, store_layout.LAST_USE, store_layout.SNAPSHOT)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in the store."""

    source: str
    revision: str
    path: Path
    size: int
    """Bytes of its files, or of what has arrived if it is incomplete."""
    last_used_at: float
    """Seconds since the epoch."""
    requested_revisions: tuple[str, ...] = ()
    """What is pinned to this revision; an empty string stands for a source without a revision."""


@dataclass(frozen=True, slots=True)
class Pruned:
    removed: tuple[StoredModel, ...]
    in_use: tuple[StoredModel, ...]
    """What should have been removed as well."""
    freed_bytes: int
    """Less than the sizes add up to if other models, or Hugging Face's cache, have the same files."""


class Store:
    """A directory of models. It need not exist, and may be read-only for all but fetching and removing.

    Args:
        root: the directory, as `store_layout.choose_root` finds it.
        now: seconds since the epoch.
    """

    def __init__(self, root: Path, *, now: Callable[[], float] = time.time) -> None:
        self.root = root
        self._now = now

    def find(self, source: str, requested_revision: str) -> StoredModel | None:
        """Return a complete model without any request, if the revision was pinned or is itself immutable.

        Args:
            source: canonical name, as `Source.name`.
            requested_revision: as `Source.requested_revision`; empty if none.

        Raises:
            FetchError: the store cannot be read.
        """
        directory = self._directory(source)
        with _readable(directory):
            refs = store_layout.read_refs(directory)
            pinned = store_layout.pinned_revision(refs, source, requested_revision)
            return self._load(directory, pinned or requested_revision, refs, source)

    def pinned_revision(self, source: str, requested_revision: str) -> str | None:
        """Return what a requested revision was pinned to, whether the store still has it or not.

        Raises:
            FetchError: the store cannot be read.
        """
        directory = self._directory(source)
        with _readable(directory):
            refs = store_layout.read_refs(directory)
        return store_layout.pinned_revision(refs, source, requested_revision)

    def find_file(self, source: str, digest: Digest, size: int) -> Path | None:
        """Return a file of a source's complete models that should have this content. The caller checks it."""
        directory = self._directory(source)
        for name in _names(directory):
            with suppress(OSError):
                model = self._load(directory, name, {}, source)
                manifest = None if model is None else store_layout.read_damaged_manifest(model.path)
                for file in () if manifest is None else manifest.files:
                    if (file.digest, file.size) == (digest, size):
                        return directory / name / file.path
        return None

    def list(self) -> tuple[StoredModel, ...]:
        """Return the complete models, by source and revision, without those that cannot be read."""
        found: list[StoredModel] = []
        for directory in self._source_directories():
            refs: dict[str, str] = {}
            with suppress(OSError):
                refs = store_layout.read_refs(directory)
            for name in _names(directory):
                with suppress(OSError):
                    if (model := self._load(directory, name, refs)) is not None:
                        found.append(model)
        return _sorted(found)

    def list_partial(self) -> tuple[StoredModel, ...]:
        """Return the models whose fetch is under way or was interrupted."""
        found = []
        for directory in self._source_directories():
            for name in _names(directory):
                if name.startswith(store_layout.PARTIAL_PREFIX):
                    source = None
                    with suppress(OSError):
                        source = store_layout.source_of_partial(directory / name)
                    found.append(_incomplete(directory / name, source))
        return _sorted(model for model in found if model is not None)

    def list_damaged(self) -> tuple[StoredModel, ...]:
        """Return the models of which another program has removed or changed files. The next fetch replaces them."""
        found = []
        for directory in self._source_directories():
            for name in _names(directory):
                with suppress(OSError):
                    if self._is_damaged(directory, name):
                        manifest = store_layout.read_damaged_manifest(directory / name)
                        source = None if manifest is None else manifest.source
                        found.append(_incomplete(directory / name, source))
        return _sorted(model for model in found if model is not None)

    def hold(self, path: Path) -> SharedLock:
        """Mark a model as in use, until the result is closed or the process ends, and note the time.

        Raises:
            ModelRemoved: it is not in the store any more.
            FetchError: it cannot be locked.
        """
        try:
            lock = SharedLock(path / store_layout.LAST_USE)
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
            os.utime(path / store_layout.LAST_USE, (now, now))

    def touch_held(self, now: float, min_age: float) -> None:
        """Note the use of all models that processes hold and that were not used within `min_age` seconds: a process
        whose store is read-only cannot do that itself."""
        for model in self.list():
            lock = model.path / store_layout.LAST_USE
            if now - model.last_used_at >= min_age:
                with suppress(OSError), try_exclusive_lock(lock) as is_locked:
                    if not is_locked:
                        os.utime(lock, (now, now))

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
        path = self._directory(source) / store_layout.LOCK
        with exclusive_lock(path, on_wait, lambda: watched(path, on_idle, idle_after_s)):
            fsync_directory(self.root)
            yield HolderMark(path)

    def open_partial(self, snapshot: Snapshot) -> Path:
        """Return the directory in which a snapshot's files gather, with what an earlier attempt has left if the
        snapshot is still the same. Called with the source's lock held."""
        path = self._partial(snapshot)
        record = encode_snapshot(snapshot)
        if path.exists() and store_layout.read_snapshot_record(path) != record:
            _discard(path)
        path.mkdir(exist_ok=True)
        if store_layout.read_snapshot_record(path) != record:
            replace_file(path / store_layout.SNAPSHOT, record)
        return path

    def discard_partial(self, snapshot: Snapshot) -> None:
        """Delete what was fetched of a snapshot. Called with the source's lock held."""
        _discard(self._partial(snapshot))

    def refuse(self, snapshot: Snapshot, reason: str) -> None:
        """Delete what was fetched of a snapshot, and remember why it is not served. Called with the lock held."""
        path = self._partial(snapshot)
        _keep_only(path, {store_layout.SNAPSHOT})
        data = reason.encode(errors="replace")[: store_layout.MAX_REFUSAL_BYTES]
        replace_file(path / store_layout.REFUSED, data)

    def refusal(self, snapshot: Snapshot) -> str:
        """Return why a snapshot was refused within a day; empty if it was not. Another version of this program may
        serve it, and therefore a refusal ends. Called with the lock held."""
        path = self._partial(snapshot)
        if store_layout.read_snapshot_record(path) != encode_snapshot(snapshot):
            return ""
        try:
            age = time.time() - (path / store_layout.REFUSED).stat().st_mtime
        except FileNotFoundError:
            return ""
        if age > _REFUSAL_S:
            (path / store_layout.REFUSED).unlink(missing_ok=True)
            return ""
        return store_layout.read_refusal(path)

    def gathered(self, snapshot: Snapshot) -> tuple[StoredFile, ...] | None:
        """Return the files of a snapshot if they are all there, because a process ended while it published them.
        Called with the source's lock held."""
        partial = self._partial(snapshot)
        if store_layout.read_snapshot_record(partial) != encode_snapshot(snapshot):
            return None
        manifest = store_layout.read_manifest(partial, snapshot.revision)
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
        store_layout.write_manifest(partial, Manifest(snapshot.source, snapshot.revision, files, fetched_at))
        (partial / store_layout.LAST_USE).touch()
        self.touch(partial)
        _keep_only(partial, {*_OWN_FILES, *(file.path for file in files)})
        fsync_directory(partial)
        if self._load(directory, snapshot.revision, {}, snapshot.source) is not None:
            _discard(partial)  # locks have no effect here, and another machine was faster
            return target
        self._discard_unused(target, target / store_layout.LAST_USE, f"{snapshot.source} is damaged, and")
        partial.rename(target)
        fsync_directory(directory)
        (target / store_layout.SNAPSHOT).unlink(missing_ok=True)
        return target

    def pin(self, source: str, requested_revision: str, revision: str) -> None:
        """Remember which revision a requested one was found to be. Called with the lock held."""
        store_layout.write_ref(self._directory(source), source, requested_revision, revision)

    def remove(self, model: StoredModel) -> None:
        """Remove a model, complete or not.

        Raises:
            ModelInUse: a process holds or fetches it.
            FetchError: it cannot be removed.
        """
        is_partial = model.path.name.startswith(store_layout.PARTIAL_PREFIX)
        lock = (model.path.parent / store_layout.LOCK) if is_partial else (model.path / store_layout.LAST_USE)
        use = "fetches" if is_partial else "uses"
        try:
            self._discard_unused(model.path, lock, f"{model.source} at {model.revision}:", use)
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

    def find_offline(self, source: str, requested_revision: str) -> StoredModel | None:
        """Return a complete model for a program that may make no request, and may therefore not know the endpoint that
        the model was fetched from, such as a pod's engine, which has no credentials.

        An endpoint in the name wins if the store has its model. Otherwise all endpoints count, the default one
        included: whoever fetches knows which one is meant, and what was `choose`n last is taken.

        Args:
            source: canonical name, with the endpoint if one is configured.

        Raises:
            FetchError: the store cannot be read.
        """
        found = self.find(source, requested_revision)
        name, _, endpoint = source.partition(store_layout.ENDPOINT)
        if found is not None and endpoint:
            return found
        return self.find_at_any_endpoint(name, requested_revision) or found

    def find_at_any_endpoint(self, source: str, requested_revision: str) -> StoredModel | None:
        """Return the model of a source at any endpoint: of those that differ in nothing else, the one that was chosen
        last, or was used last if none was chosen.

        Args:
            source: canonical name without an endpoint.
        """
        wanted = store_layout.equal_revisions(source, requested_revision)
        found = [
            model
            for model in self.list()
            if model.source.partition(store_layout.ENDPOINT)[0] == source
            and not wanted.isdisjoint((model.revision, *model.requested_revisions))
        ]
        return max(found, key=lambda model: (_chosen_at(model.path), model.last_used_at), default=None)

    def choose(self, path: Path) -> None:
        """Note that a model is what a program means that knows its endpoint, unless the store is read-only. Its last
        use would not tell that: other programs that hold another endpoint's model renew theirs."""
        now = self._now()
        with suppress(OSError):
            if (path / store_layout.LAST_USE).exists():
                (path / store_layout.CHOSEN).touch()
                os.utime(path / store_layout.CHOSEN, (now, now))

    def damaged_path(self, source: str, requested_revision: str) -> Path | None:
        """Return the directory of a model that `find` would find if it were complete."""
        revision = self.pinned_revision(source, requested_revision) or requested_revision
        path = self._directory(source) / revision
        return path if store_layout.is_revision(revision) and path.is_dir() else None

    def _directory(self, source: str) -> Path:
        return self.root / store_layout.source_directory(source)

    def _partial(self, snapshot: Snapshot) -> Path:
        return self._directory(snapshot.source) / f"{store_layout.PARTIAL_PREFIX}{snapshot.revision}"

    def _source_directories(self) -> Iterator[Path]:
        for name in _names(self.root):
            if store_layout.is_source_directory(name) and not (self.root / name).is_symlink():
                yield self.root / name

    def _load(
        self, directory: Path, revision: str, refs: dict[str, str], source: str | None = None
    ) -> StoredModel | None:
        """Return a complete model; None if there is none, or it is that of another source."""
        path = directory / revision
        if not store_layout.is_revision(revision) or path.is_symlink():
            return None
        manifest = store_layout.read_manifest(path)
        if manifest is None or (source is not None and manifest.source != source):
            return None
        try:
            last_used_at = (path / store_layout.LAST_USE).stat().st_mtime
        except FileNotFoundError:
            return None
        return StoredModel(
            source=manifest.source,
            revision=revision,
            path=path,
            size=sum(file.size for file in manifest.files),
            last_used_at=last_used_at,
            requested_revisions=tuple(wanted for wanted, found in refs.items() if found == revision),
        )

    def _is_damaged(self, directory: Path, name: str) -> bool:
        path = directory / name
        if not store_layout.is_revision(name) or path.is_symlink():
            return False
        is_ours = any((path / own).exists() for own in (store_layout.MANIFEST, store_layout.LAST_USE))
        return is_ours and self._load(directory, name, {}) is None

    def _discard_unused(self, path: Path, lock: Path, what: str, use: str = "uses") -> None:
        """Delete a directory unless a process holds its lock. Without a lock file nothing can hold it.

        Raises:
            ModelInUse: a process does.
        """
        with try_exclusive_lock(lock) as is_locked:
            if not is_locked and lock.exists():
                raise ModelInUse(f"{what} a running process {use} it; stop that process first")
            _discard(path)

    def _sweep(self, directory: Path) -> None:
        """Delete what interrupted removals and writes have left, and a source's directory without a model."""
        names = _names(directory)
        for name in names:
            if name.startswith(store_layout.TRASH_PREFIX):
                shutil.rmtree(directory / name, ignore_errors=True)
        has_leftovers = any(name.startswith(TEMPORARY_PREFIX) for name in names)
        if not has_leftovers and set(_names(directory)) - {store_layout.LOCK, store_layout.REFS}:
            return
        with suppress(OSError), try_exclusive_lock(directory / store_layout.LOCK) as is_locked:
            if not is_locked:
                return
            for name in _names(directory):
                path = directory / name
                is_old = self._now() - path.lstat().st_mtime > _LEFTOVER_AGE
                if name.startswith(TEMPORARY_PREFIX) and is_old:
                    path.unlink()
            if set(_names(directory)) <= {store_layout.LOCK, store_layout.REFS}:
                (directory / store_layout.REFS).unlink(missing_ok=True)
                (directory / store_layout.LOCK).unlink()
                directory.rmdir()


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FetchError(
            f"the store cannot be read: {error.filename or directory}: {error.strerror or error}; check its owner and "
            "permissions, and its disk"
        ) from error


def _chosen_at(path: Path) -> float:
    try:
        return (path / store_layout.CHOSEN).stat().st_mtime
    except OSError:
        return 0.0


def _incomplete(path: Path, source: str | None) -> StoredModel | None:
    """Return a model that is interrupted or damaged; None if it has just been published or removed."""
    try:
        began_at = path.stat().st_mtime
    except OSError:
        return None
    found = tuple(files_below(path))
    return StoredModel(
        source=source or path.parent.name,
        revision=path.name.removeprefix(store_layout.PARTIAL_PREFIX),
        path=path,
        size=sum(stored_bytes(file, status) for file, status in found),
        last_used_at=max([began_at, *(status.st_mtime for _, status in found)]),
    )


def _sorted(models: Iterable[StoredModel]) -> tuple[StoredModel, ...]:
    return tuple(sorted(models, key=lambda model: (model.source, model.revision)))


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _keep_only(directory: Path, names: set[str]) -> None:
    """Delete everything else in a directory but the store's own files that a complete model keeps."""
    for name in set(_names(directory)) - names:
        path = directory / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _discard(path: Path) -> None:
    """Delete a directory so that no one finds half of it."""
    trash = path.with_name(f"{store_layout.TRASH_PREFIX}{secrets.token_hex(8)}")
    try:
        path.rename(trash)
    except FileNotFoundError:
        return
    shutil.rmtree(trash, ignore_errors=True)
