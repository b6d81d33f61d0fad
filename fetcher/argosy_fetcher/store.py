"""Store: models on this machine's disk, each complete or absent.

Owns directories, locks, publication, listing and removal. Must not know sources, transfers or what a model consists of.
Invariants: a directory with a revision's name is complete, because it is renamed to that name at the end; one process
at a time writes below a source's directory; a model that a process holds is not removed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from argosy_fetcher import store_layout
from argosy_fetcher.disk import fsync_directory, replace_file
from argosy_fetcher.errors import FetchError, ModelInUse
from argosy_fetcher.file_lock import SharedLock, exclusive_lock, try_exclusive_lock
from argosy_fetcher.snapshot import Snapshot, encode_snapshot
from argosy_fetcher.store_layout import Manifest, StoredFile


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
        """
        directory = self.root / store_layout.source_directory(source)
        refs = store_layout.read_refs(directory)
        return self._load(directory, refs.get(requested_revision, requested_revision), refs, source)

    def list(self) -> tuple[StoredModel, ...]:
        """Return the complete models, by source and revision."""
        found = []
        for directory in self._source_directories():
            refs = store_layout.read_refs(directory)
            models = (self._load(directory, name, refs) for name in _names(directory))
            found += [model for model in models if model is not None]
        return tuple(sorted(found, key=lambda model: (model.source, model.revision)))

    def list_partial(self) -> tuple[StoredModel, ...]:
        """Return the models whose fetch is under way or was interrupted."""
        found: list[StoredModel] = []
        for directory in self._source_directories():
            for name in _names(directory):
                if name.startswith(store_layout.PARTIAL_PREFIX):
                    found += _load_partial(directory / name)
        return tuple(sorted(found, key=lambda model: (model.source, model.revision)))

    def hold(self, path: Path) -> SharedLock:
        """Mark a model as in use, until the result is closed or the process ends, and note the time.

        Raises:
            FetchError: it is not in the store any more.
        """
        try:
            lock = SharedLock(path / store_layout.LAST_USE)
        except OSError as error:
            raise FetchError(
                f"the model in {path} was removed from the store or cannot be read: {error.strerror or error}; "
                "start again to fetch it"
            ) from error
        self.touch(path)
        return lock

    def touch(self, path: Path) -> None:
        """Note that a model is used now, unless the store is read-only."""
        now = self._now()
        with suppress(OSError):
            os.utime(path / store_layout.LAST_USE, (now, now))

    @contextmanager
    def lock(self, source: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Be the only process that fetches from a source.

        Raises:
            OSError: the store cannot be written.
        """
        with exclusive_lock(self._directory(source) / store_layout.LOCK, on_wait):
            yield

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

    def publish(self, snapshot: Snapshot, files: tuple[StoredFile, ...]) -> Path:
        """Make a snapshot's files a complete model, in one step. They are on disk already. Called with the lock held.

        Args:
            files: all of the model; other files in the partial directory are deleted.
        """
        directory = self._directory(snapshot.source)
        partial, target = self._partial(snapshot), directory / snapshot.revision
        _keep_only(partial, {file.path for file in files})
        fetched_at = datetime.fromtimestamp(self._now(), UTC)
        store_layout.write_manifest(partial, Manifest(snapshot.source, snapshot.revision, files, fetched_at))
        (partial / store_layout.LAST_USE).touch()
        self.touch(partial)
        fsync_directory(partial)
        if target.exists():  # damaged, or it would have been found
            _discard(target)
        partial.rename(target)
        fsync_directory(directory)
        return target

    def pin(self, source: str, requested_revision: str, revision: str) -> None:
        """Remember which revision a requested one was found to be. Called with the lock held."""
        store_layout.write_ref(self._directory(source), requested_revision, revision)

    def remove(self, model: StoredModel) -> None:
        """Remove a model, complete or not.

        Raises:
            ModelInUse: a process holds or fetches it.
            FetchError: it cannot be removed.
        """
        is_partial = model.path.name.startswith(store_layout.PARTIAL_PREFIX)
        lock = (model.path.parent / store_layout.LOCK) if is_partial else (model.path / store_layout.LAST_USE)
        try:
            with try_exclusive_lock(lock) as is_locked:
                if not is_locked and model.path.exists():
                    use = "fetches" if is_partial else "uses"
                    raise ModelInUse(
                        f"{model.source} at {model.revision}: a running process {use} it; stop that process first"
                    )
                _discard(model.path)
            self._sweep(model.path.parent)
        except OSError as error:
            raise FetchError(
                f"cannot remove {model.path}: {error.strerror or error}; check the directory's owner and permissions"
            ) from error

    def prune(self, max_bytes: int | None = None, max_age: float | None = None) -> Pruned:
        """Remove what was not used for `max_age` seconds, then what was used longest ago until the store has at most
        `max_bytes`. Interrupted fetches count as models that were used when they last received something.

        Raises:
            FetchError: something cannot be removed.
        """
        models = sorted((*self.list(), *self.list_partial()), key=lambda model: model.last_used_at)
        total, now = sum(model.size for model in models), self._now()
        removed: list[StoredModel] = []
        in_use: list[StoredModel] = []
        for model in models:
            is_old = max_age is not None and now - model.last_used_at > max_age
            is_too_much = max_bytes is not None and total > max_bytes
            if not (is_old or is_too_much):
                continue
            try:
                self.remove(model)
            except ModelInUse:
                in_use.append(model)
            else:
                removed.append(model)
                total -= model.size
        for directory in self._source_directories():
            self._sweep(directory)
        return Pruned(tuple(removed), tuple(in_use))

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
        except OSError:
            return None
        return StoredModel(
            source=manifest.source,
            revision=revision,
            path=path,
            size=sum(file.size for file in manifest.files),
            last_used_at=last_used_at,
            requested_revisions=tuple(wanted for wanted, found in refs.items() if found == revision),
        )

    def _sweep(self, directory: Path) -> None:
        """Delete what interrupted removals have left, and a source's directory in which no model is left."""
        for name in _names(directory):
            if name.startswith(store_layout.TRASH_PREFIX):
                shutil.rmtree(directory / name, ignore_errors=True)
        rest = set(_names(directory)) - {store_layout.LOCK, store_layout.REFS}
        if rest:
            return
        with suppress(OSError), try_exclusive_lock(directory / store_layout.LOCK) as is_locked:
            if is_locked and set(_names(directory)) <= {store_layout.LOCK, store_layout.REFS}:
                (directory / store_layout.REFS).unlink(missing_ok=True)
                (directory / store_layout.LOCK).unlink()
                directory.rmdir()


def _load_partial(path: Path) -> tuple[StoredModel, ...]:
    """Return an interrupted model, or nothing if it has just been published or removed."""
    found = []
    try:
        began_at = path.stat().st_mtime
        for file in _files_below(path):
            with contextlib.suppress(FileNotFoundError):  # it has just got its final name
                found.append(file.stat(follow_symlinks=False))
    except OSError:
        return ()
    return (
        StoredModel(
            source=store_layout.source_of_partial(path) or path.parent.name,
            revision=path.name.removeprefix(store_layout.PARTIAL_PREFIX),
            path=path,
            size=sum(file.st_blocks * 512 for file in found),
            last_used_at=max([began_at, *(file.st_mtime for file in found)]),
        ),
    )


def _files_below(path: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(Path(entry.path))
            else:
                yield entry


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
