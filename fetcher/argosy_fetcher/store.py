"""Store: models on this machine's disk, each complete or absent.

Owns what a fetch does to a store: the lock of a source, the directory in which a model gathers, its publication; and
the marks by which processes hold and use a model. `store_index` finds models, `store_pruning` removes them. Must not
know sources, transfers or what a model consists of.
Invariants: a directory with a revision's name is complete, because it is renamed to that name at the end, unless
another program has damaged it since; one process at a time writes below a source's directory.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from argosy_fetcher import store_layout
from argosy_fetcher.disk import fsync_directory, replace_file
from argosy_fetcher.errors import FetchError, ModelRemoved
from argosy_fetcher.file_lock import SharedLock, exclusive_lock, try_exclusive_lock
from argosy_fetcher.lock_holder import IDLE_AFTER_S, HolderMark, Idle, watched
from argosy_fetcher.snapshot import Snapshot, encode_snapshot
from argosy_fetcher.store_index import names_in
from argosy_fetcher.store_layout import Manifest, StoredFile
from argosy_fetcher.store_pruning import PrunableStore, discard, discard_unused

_REFUSAL_S: Final = 86400.0
_OWN_FILES: Final = (store_layout.MANIFEST, store_layout.LAST_USE, store_layout.SNAPSHOT)


class Store(PrunableStore):
    """A directory of models. It need not exist, and may be read-only for all but fetching and removing."""

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

    def choose(self, path: Path) -> None:
        """Note that a model is what a program means that knows its endpoint, unless the store is read-only. Its last
        use would not tell that: other programs that hold another endpoint's model renew theirs."""
        now = self._now()
        with suppress(OSError):
            if (path / store_layout.LAST_USE).exists():
                (path / store_layout.CHOSEN).touch()
                os.utime(path / store_layout.CHOSEN, (now, now))

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
        with exclusive_lock(path, on_wait, lambda: watched(path, on_idle, idle_after_s)) as descriptor:
            fsync_directory(self.root)
            yield HolderMark(descriptor)

    def open_partial(self, snapshot: Snapshot) -> Path:
        """Return the directory in which a snapshot's files gather, with what an earlier attempt has left if the
        snapshot is still the same. Called with the source's lock held."""
        path = self._partial(snapshot)
        record = encode_snapshot(snapshot)
        if path.exists() and store_layout.read_snapshot_record(path) != record:
            discard(path)
        path.mkdir(exist_ok=True)
        if store_layout.read_snapshot_record(path) != record:
            replace_file(path / store_layout.SNAPSHOT, record)
        return path

    def discard_partial(self, snapshot: Snapshot) -> None:
        """Delete what was fetched of a snapshot. Called with the source's lock held."""
        discard(self._partial(snapshot))

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
        _keep_only(partial, {*_OWN_FILES, *(file.path.partition("/")[0] for file in files)})
        for folder in {(partial / file.path).parent for file in files} | {partial}:
            fsync_directory(folder)
        if self._load(directory, snapshot.revision, {}, snapshot.source) is not None:
            discard(partial)  # locks have no effect here, and another machine was faster
            return target
        discard_unused(target, target / store_layout.LAST_USE, f"{snapshot.source} is damaged, and")
        partial.rename(target)
        fsync_directory(directory)
        (target / store_layout.SNAPSHOT).unlink(missing_ok=True)
        return target

    def pin(self, source: str, requested_revision: str, revision: str) -> None:
        """Remember which revision a requested one was found to be. Called with the lock held."""
        store_layout.write_ref(self._directory(source), source, requested_revision, revision)

    def _partial(self, snapshot: Snapshot) -> Path:
        return self._directory(snapshot.source) / f"{store_layout.PARTIAL_PREFIX}{snapshot.revision}"


def _keep_only(directory: Path, names: set[str]) -> None:
    """Delete everything else in a directory but the store's own files that a complete model keeps."""
    for name in set(names_in(directory)) - names:
        path = directory / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
