"""Model fetch: brings a model from its source into the store, complete or not at all; or a part of it into a directory.

Owns the order of things: look into the store, resolve the revision, select, transfer, unpack, publish. Must not know
how any of them is done. `fetch_configs` leaves the weights out, for engines that make up their own; `fetch_headers`
takes of each weights file its header, for programs that compute a model's size. Both know no store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import msgspec

from argosy_fetcher.archives import UnpackedFile, Unpacker, model_folder, require_unpacker
from argosy_fetcher.disk import IDLE_AFTER_S, HolderMark, disk_errors, empty_directory, fsync_file
from argosy_fetcher.errors import FetchError, NoSpace, Offline, UnsupportedModel
from argosy_fetcher.gguf_files import CutOff, NotGguf, read_header
from argosy_fetcher.progress import ForwardedProgress, Progress
from argosy_fetcher.retry import Attempts, Outage, RetryPolicy, read_range, read_whole, retrying
from argosy_fetcher.selection import (
    MAX_SMALL_FILE_BYTES,
    MAX_TOKENIZER_BYTES,
    CheckConfig,
    is_served_name,
    select,
)
from argosy_fetcher.source import HEX_DIGITS, MAX_FILES, RemoteFile, Snapshot, Source
from argosy_fetcher.source_uri import gguf_of
from argosy_fetcher.store import Store
from argosy_fetcher.store_index import PACKED, UNPACKED, StoredFile, StoredModel, is_revision
from argosy_fetcher.transfer import TaskQueue, Transfer, TransferSettings
from argosy_protocol.reports import duration_text

MAX_VERSION_BYTES: Final = 2048
MAX_LISTED_PATH_BYTES: Final = 2048
"""Bound on names in a list of files. Those of files that are fetched have a smaller one, `source.MAX_PATH_BYTES`."""
_SILENT: Final = Progress()
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
    fetch = _Fetch(source, store, progress, check_config, settings, cancelled or threading.Event(), refresh)
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


@dataclass
class _Fetch:
    source: Source
    store: Store
    progress: Progress
    check_config: CheckConfig | None
    settings: TransferSettings
    cancelled: threading.Event
    refresh: bool

    def find(self) -> StoredModel | None:
        return self.store.find(self.source.name, self.source.requested_revision)

    def find_offline(self) -> StoredModel | None:
        return self.store.find_offline(self.source.name, self.source.requested_revision)

    def offline_error(self, model: str) -> Offline:
        requests_off = "and requests are off (ARGOSY_OFFLINE, HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE)"
        damaged = self.store.damaged_path(self.source.name, self.source.requested_revision)
        if damaged is None:
            return Offline(
                f"{model} is not in the model store {self.store.root}, {requests_off}; "
                "allow them once, or copy the store from a machine that has the model"
            )
        return Offline(
            f"{model} is damaged in the model store: files in {damaged} are missing or cut off, {requests_off}; "
            "allow them once to fetch it again; in a cluster delete the pod, and the next one fetches it"
        )

    def note_wait(self) -> None:
        self.progress.enter("waiting")
        self.progress.note(f"{self.source.name}: waiting for another process that fetches it")

    def note_idle_holder(self, idle_after_s: float, holder: str) -> None:
        """Tell that the process that this one waits for makes no progress, or, without a holder, that it does again."""
        if not holder:
            self.note_wait()
            return
        self.progress.enter("blocked")
        self.progress.note(
            f"{holder} holds the lock of {self.source.name} in the store, and has made no progress for "
            f"{duration_text(idle_after_s)}"
        )

    def present(self, model: StoredModel) -> FetchedModel:
        """Report a model that is in the store."""
        self.progress.resolved(model.source, model.revision)
        self.progress.begin(model.size, model.size)
        self.store.touch(model.path)
        self.progress.end()
        return FetchedModel(model.path, model.source, model.revision)

    def run(self, mark: HolderMark) -> FetchedModel:
        """Fetch, with the source's lock held."""
        self.progress = ForwardedProgress(
            self.progress, mark.progressed
        )  # shown to those who wait for the lock
        self.progress.enter("resolving")
        name, requested_revision = self.source.name, self.source.requested_revision
        snapshot = retrying(self._attempts("list of files"), self.source.snapshot)
        snapshot = checked_snapshot(snapshot, name)
        found = self.store.find(name, snapshot.revision)
        if found is not None:
            self.store.pin(name, requested_revision, snapshot.revision)
            return self.present(found)
        self.progress.resolved(name, snapshot.revision)
        files = self._gathered(snapshot)
        if files is None:
            is_packed = any(file.packing != "none" for file in snapshot.files)
            files = self._fetch_packed(snapshot) if is_packed else self._fetch_files(snapshot)
        path = self.store.publish(snapshot, files)
        self.store.pin(name, requested_revision, snapshot.revision)
        self.progress.end()
        return FetchedModel(path, name, snapshot.revision)

    def _gathered(self, snapshot: Snapshot) -> tuple[StoredFile, ...] | None:
        """Return the files of a snapshot that only has to be published."""
        files = self.store.gathered(snapshot)
        if files is not None:
            size = sum(file.size for file in files)
            self.progress.begin(size, size)
        return files

    def _fetch_files(self, snapshot: Snapshot) -> tuple[StoredFile, ...]:
        known: dict[str, bytes] = {}

        def read_small(file: RemoteFile) -> bytes:
            attempts = self._attempts(file.path)
            known[file.path] = read_whole(self.source, file, MAX_SMALL_FILE_BYTES, attempts)
            return known[file.path]

        files = select(snapshot, read_small, self.check_config)
        partial = self.store.open_partial(snapshot)
        targets = {partial / file.path: file for file in files}
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
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
        if not self.refresh and (refusal := self.store.refusal(snapshot)):
            raise UnsupportedModel(f"{refusal} (found within the last day; --refresh fetches it again)")
        partial = self.store.open_partial(snapshot)
        packed = partial / PACKED
        packed.mkdir(exist_ok=True)
        targets = {packed / f"{number:06}": file for number, file in enumerate(files)}
        self._transfer(targets, packed, {}, extra_bytes=sum(file.size for file in files))
        try:
            return self._unpack(snapshot, targets, partial)
        except (OSError, NoSpace):
            raise  # another attempt may succeed
        except FetchError as error:
            self.store.refuse(snapshot, str(error))  # else a pod would fetch it again and again
            raise
        except Exception:
            self.store.discard_partial(snapshot)  # of no use, and large
            raise

    def _unpack(
        self, snapshot: Snapshot, targets: dict[Path, RemoteFile], partial: Path
    ) -> tuple[StoredFile, ...]:
        self.progress.enter("unpacking")
        self.progress.note(f"{snapshot.source}: unpacking")
        unpacker = Unpacker(
            empty_directory(partial / UNPACKED),
            snapshot.source,
            self.settings.min_free,
            on_progress=lambda: self.progress.advance(0),
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
        selected = select(inner, _reader(members), self.check_config)
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
        Transfer(
            self.source,
            targets,
            directory,
            progress=self.progress,
            settings=self.settings,
            known=known,
            local_copy=self._local_copy,
            cancelled=self.cancelled,
        ).run(extra_bytes)

    def _local_copy(self, file: RemoteFile) -> Path | None:
        """Return a file of this machine that should have the same content: another revision's in the store, as
        revisions mostly differ in a few small files, or what the source finds."""
        if file.digest is not None:
            found = self.store.find_file(self.source.name, file.digest, file.size)
            if found is not None:
                return found
        asked = getattr(self.source, "local_copy", None)
        copy: Path | None = None if asked is None else asked(file)
        return copy

    def _attempts(self, what: str) -> Attempts:
        return Attempts(
            f"{self.source.name}: {what}", self.settings.retry, self.progress.note, self.cancelled
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


def fetch_configs(
    source: Source,
    directory: Path,
    *,
    check_config: CheckConfig | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Snapshot | None:
    """Fill an empty directory with a model's config and tokenizer, and return what the source holds.

    Args:
        check_config: raises if a config.json is of a model that the caller does not serve.
        note: takes a line about something that takes time.

    Returns:
        None if the source holds an archive or is a GGUF file, of which config and tokenizer cannot be read apart.

    Raises:
        UnsupportedModel: the model is not served.
        FetchError, TransientError: from the source.
    """

    def attempts(what: str) -> Attempts:
        return Attempts(f"{source.name}: {what}", RetryPolicy(), note)

    if gguf_of(source.name):
        return None
    snapshot = checked_snapshot(retrying(attempts("list of files"), source.snapshot), source.name)
    if any(file.packing != "none" for file in snapshot.files):
        return None
    contents: dict[str, bytes] = {}

    def read_small(file: RemoteFile) -> bytes:
        contents[file.path] = read_whole(source, file, MAX_SMALL_FILE_BYTES, attempts(file.path))
        return contents[file.path]

    files = select(snapshot, read_small, check_config, has_weights=False)
    with disk_errors(source.name, directory):
        for file in files:
            (directory / file.path).parent.mkdir(exist_ok=True)
            content = contents.get(file.path)
            if content is None:
                content = read_whole(source, file, MAX_TOKENIZER_BYTES, attempts(file.path))
            (directory / file.path).write_bytes(content)
    return snapshot


FIRST_BYTES: Final = 64 << 10
"""Read of each file at first: most headers fit, and more than one request costs more time than these bytes."""
FIRST_GGUF_BYTES: Final = 4 << 20
"""Read of a GGUF file at first, and then twice as much: its header has the vocabulary, of 2 to 12 MB."""
ROTATION: Final = "rope_freqs.weight"
"""The only tensor of a GGUF file of which the values are part of the config."""
_MAX_ROTATION_BYTES: Final = 1 << 20
MAX_HEADER_BYTES: Final = 100 << 20
"""The limit that the format defines."""
MAX_WEIGHT_FILES: Final = 2000
"""Several times the shards of the largest models."""
MAX_WEIGHT_BYTES: Final = 16 << 40
"""Of all files together: what one file may have on common file systems, even if it is a hole."""
MAX_STORED_BYTES: Final = 256 << 20
"""Of all headers together. Those of a model with 100,000 tensors have 15 MB."""
_MAX_READS_IN_FLIGHT: Final = 8
_CONFIGS: Final = ("config.json", "generation_config.json", "model.safetensors.index.json", "modules.json")


def fetch_headers(
    source: Source,
    directory: Path,
    *,
    check_config: CheckConfig | None = None,
    note: Callable[[str], None] = lambda text: None,
    retry: RetryPolicy | None = None,
) -> Snapshot:
    """Fill an empty directory with configs, the index and the headers of the weights, and return what the source holds.

    A safetensors file begins with the length of its header (8 bytes, little-endian) and the header. The rest of such a
    file is a hole, so its size is right and it takes no room. No byte of a weight is requested beyond the first
    `FIRST_BYTES` of a file, and what a hostile source can make of the directory is bounded, in files, in their sizes
    and in the bytes that are stored. Of a GGUF file, `FIRST_GGUF_BYTES` or twice the header is requested, and the few
    numbers that its config is computed from.

    Args:
        check_config: raises if a config.json is of a model that the caller does not serve.
        note: takes a line about something that takes time.

    Raises:
        UnsupportedModel: the model is not served, a header is malformed, the model is in an archive, or there are more
            files or bytes than any model has.
        FetchError: from the source, or the directory cannot be written.
        TransientError: nothing came from the source for too long.
    """
    reader = _HeaderReader(source, retry or RetryPolicy(), note)
    snapshot = checked_snapshot(retrying(reader.attempts(source.name), source.snapshot), source.name)
    if any(file.packing != "none" for file in snapshot.files):
        raise UnsupportedModel(
            f"{source.name} is an archive, whose headers cannot be read apart; "
            f"`argosy models pull {source.name}` fetches all of it"
        )
    read_small = cache(reader.read_small)
    files = select(snapshot, read_small, check_config)
    if gguf_of(source.name):
        _check_bounds(source.name, files)
        with disk_errors(source.name, directory):
            for file in files:
                reader.store_gguf_header(file, directory / file.path.rpartition("/")[2])
        return snapshot
    weights = [file for file in files if file.path.endswith(".safetensors")]
    _check_bounds(source.name, weights)
    with disk_errors(source.name, directory):
        for file in files:
            if file.path in _CONFIGS or "/" in file.path:  # only a small file is in a folder
                (directory / file.path).parent.mkdir(exist_ok=True)
                (directory / file.path).write_bytes(read_small(file))
        reader.queue.add(partial(reader.store_header, file, directory / file.path) for file in weights)
        reader.queue.run(_MAX_READS_IN_FLIGHT)
    return snapshot


def _check_bounds(source: str, weights: Sequence[RemoteFile]) -> None:
    size = sum(file.size for file in weights)
    if len(weights) > MAX_WEIGHT_FILES:
        raise UnsupportedModel(
            f"{source}: the weights are in {len(weights)} files; headers of at most {MAX_WEIGHT_FILES} are read"
        )
    if size > MAX_WEIGHT_BYTES:
        raise UnsupportedModel(
            f"{source}: the weights have {size} bytes; headers are read of at most {MAX_WEIGHT_BYTES}"
        )


class _HeaderReader:
    """Reads of one source, ended together."""

    def __init__(self, source: Source, retry: RetryPolicy, note: Callable[[str], None]) -> None:
        self.queue = TaskQueue()
        self._source = source
        self._retry = retry
        self._note = note
        self._outage = Outage()
        self._lock = threading.Lock()
        self._num_stored_bytes = 0

    def attempts(self, what: str) -> Attempts:
        return Attempts(what, self._retry, self._note, self.queue.cancelled, self._outage)

    def read_small(self, file: RemoteFile) -> bytes:
        attempts = self.attempts(f"{self._source.name}: {file.path}")
        return read_whole(self._source, file, MAX_SMALL_FILE_BYTES, attempts)

    def store_header(self, file: RemoteFile, path: Path) -> None:
        """Write a file's header, with a hole behind it."""
        header = self._read_header(file)
        if self.queue.cancelled.is_set():
            return
        with path.open("xb") as opened:
            opened.write(header)
            opened.truncate(file.size)

    def store_gguf_header(self, file: RemoteFile, path: Path) -> None:
        """Write the header of a GGUF file and the tensor that its rotation is computed from, with holes around."""
        refusal = UnsupportedModel(
            f"{self._source.name}: {file.path} is not a GGUF file of version 2 or 3, or its header has more than "
            f"{MAX_HEADER_BYTES} bytes; use another revision"
        )
        data, stop = b"", FIRST_GGUF_BYTES
        while True:
            data += self._read(file, len(data), min(stop, file.size))
            try:
                header = read_header(data)
                break
            except NotGguf:
                raise refusal from None
            except CutOff:
                if len(data) >= min(file.size, MAX_HEADER_BYTES):
                    raise refusal from None
                stop = min(2 * len(data), MAX_HEADER_BYTES)
        self._reserve(header.num_bytes)
        start, end = header.tensors.get(ROTATION, (0, 0))
        if end > file.size or end - start > _MAX_ROTATION_BYTES:
            raise refusal
        rotation = self._read(file, start, end) if end else b""
        with path.open("xb") as opened:
            opened.write(data[: header.num_bytes])
            opened.truncate(file.size)
            if end:
                opened.seek(start)
                opened.write(rotation)

    def _read_header(self, file: RemoteFile) -> bytes:
        """Return the bytes of a file up to the end of its header."""
        first = self._read(file, 0, min(FIRST_BYTES, file.size))
        length = int.from_bytes(first[:8], "little")
        if len(first) < 8 or length > MAX_HEADER_BYTES or 8 + length > file.size:
            raise UnsupportedModel(
                f"{self._source.name}: {file.path} is not a safetensors file; use another revision"
            )
        stop = 8 + length
        self._reserve(stop)
        return first[:stop] if stop <= len(first) else first + self._read(file, len(first), stop)

    def _reserve(self, num_bytes: int) -> None:
        """Count bytes that will be stored, before they are read."""
        with self._lock:
            self._num_stored_bytes += num_bytes
            if self._num_stored_bytes > MAX_STORED_BYTES:
                raise UnsupportedModel(
                    f"{self._source.name}: the headers of the weights have more than {MAX_STORED_BYTES} bytes together"
                )

    def _read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        attempts = self.attempts(f"{self._source.name}: {file.path}")
        return b"".join(bytes(view) for view in read_range(self._source, file, start, stop, attempts))
