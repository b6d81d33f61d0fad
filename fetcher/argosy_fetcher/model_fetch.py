"""Model fetch: brings a model from its source into the store, complete or not at all.

Owns the order of things: look into the store, resolve the revision, select, transfer, unpack, publish. Must not know
how any of them is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from argosy_fetcher.archive_members import require_unpacker
from argosy_fetcher.digests import HEX_DIGITS
from argosy_fetcher.disk import disk_errors, empty_directory, fsync_file
from argosy_fetcher.errors import FetchError, NoSpace, Offline, UnsupportedModel
from argosy_fetcher.lock_holder import IDLE_AFTER_S, HolderMark
from argosy_fetcher.marked_progress import MarkedProgress
from argosy_fetcher.progress import Progress, Silent
from argosy_fetcher.progress_display import duration_text
from argosy_fetcher.range_reader import read_whole
from argosy_fetcher.retry import Attempts, retrying
from argosy_fetcher.selection import MAX_SMALL_FILE_BYTES, CheckConfig, is_served_name, select
from argosy_fetcher.sibling_revisions import SiblingRevisions
from argosy_fetcher.snapshot import MAX_FILES, RemoteFile, Snapshot
from argosy_fetcher.sources.source import Source
from argosy_fetcher.store import Store
from argosy_fetcher.store_index import StoredModel
from argosy_fetcher.store_layout import PACKED, UNPACKED, StoredFile, is_revision
from argosy_fetcher.transfer import TransferSettings, transfer
from argosy_fetcher.unpacking import UnpackedFile, Unpacker, model_folder

MAX_VERSION_BYTES: Final = 2048
MAX_LISTED_PATH_BYTES: Final = 2048
"""Bound on names in a list of files. Those of files that are fetched have a smaller one, `snapshot.MAX_PATH_BYTES`."""
_SILENT: Final = Silent()
_DEFAULTS: Final = TransferSettings()


@dataclass(frozen=True, slots=True)
class FetchedModel:
    path: Path
    """A directory in Hugging Face's layout. `Store.hold` keeps it from being removed."""
    source: str
    """Canonical URI without the revision."""
    revision: str
    """The immutable revision that was found."""


def fetch_model(
    source: Source,
    store: Store,
    *,
    progress: Progress = _SILENT,
    check_config: CheckConfig | None = None,
    refresh: bool = False,
    offline: bool = False,
    requested: str = "",
    settings: TransferSettings = _DEFAULTS,
    cancelled: threading.Event | None = None,
    idle_after_s: float = IDLE_AFTER_S,
) -> FetchedModel:
    """Return a model from the store, after fetching what is missing.

    Args:
        check_config: called with the content of config.json before any weight is fetched; raises if the model is not
            served. What it raises is passed on.
        refresh: resolve the requested revision again, although it is pinned.
        offline: make no request; takes precedence over `refresh`.
        requested: the model as the user wrote it, for messages.
        cancelled: ends the fetch when it is set. What has arrived is kept.
        idle_after_s: how long a process that fetches the model may make no progress before that is told to `progress`
            while this one waits for it.

    Raises:
        Cancelled: the event was set.
        FetchError: the most specific class that applies.
        TransientError: nothing came from the source for too long. What has arrived is kept.
    """
    fetch = _Fetch(source, store, progress, check_config, settings, cancelled, refresh)
    if offline:
        if (found := fetch.find_offline()) is not None:
            return fetch.present(found)
        raise fetch.offline_error(requested or source.name)
    if not refresh and (found := fetch.find()) is not None:
        return fetch.present(found)
    on_idle = partial(fetch.note_idle_holder, idle_after_s)
    with (
        disk_errors(source.name, store.root),
        store.lock(source.name, fetch.note_wait, on_idle=on_idle, idle_after_s=idle_after_s) as mark,
    ):
        if not refresh and (found := fetch.find()) is not None:  # another process has just fetched it
            return fetch.present(found)
        return fetch.run(mark)


class _Fetch:
    def __init__(
        self,
        source: Source,
        store: Store,
        progress: Progress,
        check_config: CheckConfig | None,
        settings: TransferSettings,
        cancelled: threading.Event | None,
        refresh: bool,
    ) -> None:
        self._source = SiblingRevisions(source, store)
        self._store = store
        self._progress = progress
        self._check_config = check_config
        self._settings = settings
        self._refresh = refresh
        self._cancelled = cancelled or threading.Event()

    def find(self) -> StoredModel | None:
        return self._store.find(self._source.name, self._source.requested_revision)

    def find_offline(self) -> StoredModel | None:
        return self._store.find_offline(self._source.name, self._source.requested_revision)

    def offline_error(self, model: str) -> Offline:
        requests_off = "and requests are off (ARGOSY_OFFLINE, HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE)"
        damaged = self._store.damaged_path(self._source.name, self._source.requested_revision)
        if damaged is None:
            return Offline(
                f"{model} is not in the model store {self._store.root}, {requests_off}; "
                "allow them once, or copy the store from a machine that has the model"
            )
        return Offline(
            f"{model} is damaged in the model store: files in {damaged} are missing or cut off, {requests_off}; "
            "allow them once to fetch it again; in a cluster delete the pod, and the next one fetches it"
        )

    def note_wait(self) -> None:
        self._progress.enter("waiting")
        self._progress.note(f"{self._source.name}: waiting for another process that fetches it")

    def note_idle_holder(self, idle_after_s: float, holder: str) -> None:
        """Tell that the process that this one waits for makes no progress, or, without a holder, that it does again."""
        if not holder:
            self.note_wait()
            return
        self._progress.enter("blocked")
        self._progress.note(
            f"{holder} holds the lock of {self._source.name} in the store, and has made no progress for "
            f"{duration_text(idle_after_s)}"
        )

    def present(self, model: StoredModel) -> FetchedModel:
        """Report a model that is in the store."""
        self._progress.resolved(model.source, model.revision)
        self._progress.begin(model.size, model.size)
        self._store.touch(model.path)
        self._progress.end()
        return FetchedModel(model.path, model.source, model.revision)

    def run(self, mark: HolderMark) -> FetchedModel:
        """Fetch, with the source's lock held."""
        self._progress = MarkedProgress(self._progress, mark)
        self._progress.enter("resolving")
        name, requested_revision = self._source.name, self._source.requested_revision
        snapshot = retrying(self._attempts("list of files"), self._source.snapshot)
        snapshot = checked_snapshot(snapshot, name)
        found = self._store.find(name, snapshot.revision)
        if found is not None:
            self._store.pin(name, requested_revision, snapshot.revision)
            return self.present(found)
        self._progress.resolved(name, snapshot.revision)
        files = self._gathered(snapshot)
        if files is None:
            is_packed = any(file.packing != "none" for file in snapshot.files)
            files = self._fetch_packed(snapshot) if is_packed else self._fetch_files(snapshot)
        path = self._store.publish(snapshot, files)
        self._store.pin(name, requested_revision, snapshot.revision)
        self._progress.end()
        return FetchedModel(path, name, snapshot.revision)

    def _gathered(self, snapshot: Snapshot) -> tuple[StoredFile, ...] | None:
        """Return the files of a snapshot that only has to be published."""
        files = self._store.gathered(snapshot)
        if files is not None:
            size = sum(file.size for file in files)
            self._progress.begin(size, size)
        return files

    def _fetch_files(self, snapshot: Snapshot) -> tuple[StoredFile, ...]:
        known: dict[str, bytes] = {}

        def read_small(file: RemoteFile) -> bytes:
            attempts = self._attempts(file.path)
            known[file.path] = read_whole(self._source, file, MAX_SMALL_FILE_BYTES, attempts)
            return known[file.path]

        files = select(snapshot, read_small, self._check_config)
        partial = self._store.open_partial(snapshot)
        targets = {partial / file.path: file for file in files}
        for target in targets:
            target.parent.mkdir(exist_ok=True)
        self._transfer(targets, partial, known)
        return tuple(StoredFile(file.path, file.size, file.digest) for file in files)

    def _fetch_packed(self, snapshot: Snapshot) -> tuple[StoredFile, ...]:
        """Fetch archives, and what lies beside them, and take out of them what is served."""
        files = [
            file
            for file in snapshot.files
            if file.packing != "none" or is_served_name(file.path.rpartition("/")[2])
        ]
        for file in files:
            require_unpacker(file.packing)
        if not self._refresh and (refusal := self._store.refusal(snapshot)):
            raise UnsupportedModel(f"{refusal} (found within the last day; --refresh fetches it again)")
        partial = self._store.open_partial(snapshot)
        packed = partial / PACKED
        packed.mkdir(exist_ok=True)
        targets = {packed / f"{number:06}": file for number, file in enumerate(files)}
        self._transfer(targets, packed, {}, extra_bytes=sum(file.size for file in files))
        try:
            return self._unpack(snapshot, targets, partial)
        except (OSError, NoSpace):
            raise  # another attempt may succeed
        except FetchError as error:
            self._store.refuse(snapshot, str(error))  # else a pod would fetch it again and again
            raise
        except Exception:
            self._store.discard_partial(snapshot)  # of no use, and large
            raise

    def _unpack(
        self, snapshot: Snapshot, targets: dict[Path, RemoteFile], partial: Path
    ) -> tuple[StoredFile, ...]:
        self._progress.enter("unpacking")
        self._progress.note(f"{snapshot.source}: unpacking")
        unpacker = Unpacker(
            empty_directory(partial / UNPACKED),
            snapshot.source,
            self._settings.min_free,
            on_progress=lambda: self._progress.advance(0),
        )
        for path, file in targets.items():
            if file.packing == "none":
                unpacker.add_file(file.path, path, file.size)
            else:
                unpacker.add_archive(file.path, path, file.packing, file.folders)
        preferred = dict.fromkeys(folder for file in snapshot.files for folder in file.folders)
        folder = model_folder(unpacker.files, snapshot.source, tuple(preferred))
        members = {
            path.removeprefix(folder): found
            for path, found in unpacker.files.items()
            if path.startswith(folder)
        }
        inner = Snapshot(
            source=snapshot.source,
            revision=snapshot.revision,
            files=tuple(RemoteFile(path, found.size) for path, found in members.items()),
        )
        selected = select(inner, _reader(members), self._check_config)
        for file in selected:
            fsync_file(members[file.path].path)
            (partial / file.path).parent.mkdir(exist_ok=True)
            members[file.path].path.replace(partial / file.path)
        return tuple(StoredFile(file.path, file.size) for file in selected)

    def _transfer(
        self,
        targets: dict[Path, RemoteFile],
        directory: Path,
        known: dict[str, bytes],
        extra_bytes: int = 0,
    ) -> None:
        transfer(
            self._source,
            targets,
            directory,
            progress=self._progress,
            settings=self._settings,
            known=known,
            extra_bytes=extra_bytes,
            cancelled=self._cancelled,
        )

    def _attempts(self, what: str) -> Attempts:
        return Attempts(
            f"{self._source.name}: {what}", self._settings.retry, self._progress.note, self._cancelled
        )


def _reader(files: dict[str, UnpackedFile]) -> Callable[[RemoteFile], bytes]:
    def read_small(file: RemoteFile) -> bytes:
        if file.size > MAX_SMALL_FILE_BYTES:
            raise UnsupportedModel(
                f"{file.path} has {file.size} bytes; more than {MAX_SMALL_FILE_BYTES} are not read"
            )
        return files[file.path].path.read_bytes()

    return read_small


def checked_snapshot(snapshot: Snapshot, source: str) -> Snapshot:
    """Return a snapshot as a source gave it, with its files in a fixed order, if it keeps its own bounds.

    Raises:
        FetchError: it does not: the source is faulty, or hostile.
    """
    try:
        plain: Any = msgspec.to_builtins(snapshot)
        snapshot = msgspec.convert(plain, Snapshot)
        reason = _fault(snapshot, source)
    except (msgspec.MsgspecError, UnicodeError) as error:
        reason = str(error)
    if reason is not None:
        raise FetchError(f"{source}: the source sent an invalid list of files: {reason}")
    files = sorted(snapshot.files, key=lambda file: file.path) if _is_unordered(snapshot) else snapshot.files
    return Snapshot(snapshot.source, snapshot.revision, tuple(files))


def _is_unordered(snapshot: Snapshot) -> bool:
    """Whether the order of files has no meaning. Layers of an image have an order."""
    return all(file.packing == "none" for file in snapshot.files)


def _fault(snapshot: Snapshot, source: str) -> str | None:
    if snapshot.source != source:
        return "it is that of another source"
    if not is_revision(snapshot.revision):  # the type's pattern lets a line break at the end pass
        return "its revision is not a name"
    if len(snapshot.files) > MAX_FILES:
        return f"it has more than {MAX_FILES} files"
    if len({file.path for file in snapshot.files}) < len(snapshot.files):
        return "it names a file twice"
    for file in snapshot.files:
        if file.digest is not None and len(file.digest.hex) != HEX_DIGITS[file.digest.algorithm]:
            return f"the digest of {file.path[:200]!r} has the wrong length"
        if len(file.version.encode()) > MAX_VERSION_BYTES:
            return f"the version of {file.path[:200]!r} is too long"
        if len(file.path.encode()) > MAX_LISTED_PATH_BYTES:
            return "a name is too long"
    return None
