"""Pull: brings the model that a URI names into this machine's store, or finds it there.

Owns what programs that use models have in common: the store's directory, credentials, offline mode, and the lock that
keeps a model from being removed. Must not know how a model is fetched or what uses it. Environment: that of
`store_index.choose_root`, the credentials, and `OFFLINE_ENVS`, any of which forbids requests.

Machines without a network also serve complete models of Hugging Face's own cache, as they are:

    CACHE/models--ORG--NAME/refs/REVISION           the commit of a branch or a tag
    CACHE/models--ORG--NAME/snapshots/COMMIT/FILE   a link to ../../blobs/ETAG

Their content is not hashed: that library does so when it downloads. Invariant: what is served lies in the repository's
own folder, wherever links lead.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import structs

from argosy_fetcher.disk import IDLE_AFTER_S, MARGIN, FreeSpace
from argosy_fetcher.errors import ModelNotFound, ModelRemoved, Offline, UnsupportedModel
from argosy_fetcher.gguf_files import SUFFIX, choose_gguf
from argosy_fetcher.model_fetch import FetchedModel, fetch_configs, fetch_headers, fetch_model
from argosy_fetcher.progress import Progress
from argosy_fetcher.selection import (
    CONFIG,
    MAX_SMALL_FILE_BYTES,
    CheckConfig,
    is_pooling_folder,
    is_served_name,
    select,
)
from argosy_fetcher.source import RemoteFile, Snapshot
from argosy_fetcher.source_uri import SourceUri, gguf_of
from argosy_fetcher.sources.registry import is_true, load_credentials, name_in_store, open_source
from argosy_fetcher.store import ModelHold, Store, hold_model, make_room
from argosy_fetcher.store_index import StoredModel, choose_root
from argosy_fetcher.transfer import TransferSettings

OFFLINE_ENVS: Final = ("ARGOSY_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_MAX_REMOVALS: Final = 3
"""How often a model may be removed between its fetch and its use before that is an error."""
_WITH_COMMITS: Final = ("hf", "oci")
"""Schemes whose URIs can name any revision that a snapshot has."""
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class PulledModel(FetchedModel):
    """A model that is not removed before `close`, or the end of this process."""

    hold: ModelHold | None = None

    def close(self) -> None:
        if self.hold is not None:
            self.hold.close()


def pull_model(
    uri: SourceUri,
    *,
    progress: Progress,
    download_dir: str | None = None,
    check_config: CheckConfig | None = None,
    refresh: bool = False,
    has_weights: bool = True,
    make_room_after: float | None = None,
    min_free: FreeSpace = MARGIN,
    max_bytes: int | None = None,
    environment: Mapping[str, str] | None = None,
    cancelled: threading.Event | None = None,
    idle_after_s: float = IDLE_AFTER_S,
) -> PulledModel:
    """Return the model, fetched if the store does not have it. A model that it has costs no request.

    Args:
        download_dir: the store's directory; the environment's if left out.
        check_config: raises if a config.json is of a model that the caller does not serve.
        refresh: ask the source again which revision a branch, a tag or the source itself has.
        has_weights: False fetches config and tokenizer only, into a directory that is deleted when this process ends.
        make_room_after: if the disk is full, remove models that nobody has used for so many seconds; None: never.
        min_free: what a fetch leaves of the disk.
        max_bytes: most that a model may have that is fetched; None: no limit.
        environment: os.environ if left out.
        cancelled: ends a fetch when it is set. What has arrived is kept.
        idle_after_s: as in `fetch_model`.

    Raises:
        Cancelled: the event was set.
        FetchError: the model cannot be fetched; a subclass says why.
        TransientError: the source or the network does not answer; what has arrived is kept.
    """
    values = os.environ if environment is None else environment
    offline = is_offline(values)
    pull = _Pull(
        uri=uri,
        store=open_store(download_dir, values),
        progress=progress,
        check_config=check_config,
        refresh=refresh and not offline,
        offline=offline,
        make_room_after=make_room_after,
        min_free=min_free,
        max_bytes=max_bytes,
        environment=values,
        cancelled=cancelled,
        idle_after_s=idle_after_s,
    )
    for _ in range(_MAX_REMOVALS):
        found = None if pull.refresh else find_model(uri, download_dir=download_dir, environment=values)
        if found is not None:
            model: FetchedModel = pull.present(found)
        elif not has_weights and (configs := pull.fetch_configs()) is not None:
            return configs
        else:
            model = pull.fetch()
        try:
            held = PulledModel(model.path, model.source, model.revision, hold_model(model.path))
        except ModelRemoved:
            progress.note(f"{uri}: another process removed it from the store; fetching it again")
            continue
        if not offline:
            pull.store.choose(model.path)
        return held
    raise ModelRemoved(f"{uri}: other processes remove it from the store again and again; stop them")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pull:
    """One call of `pull_model`, whose arguments these are."""

    uri: SourceUri
    store: Store
    progress: Progress
    check_config: CheckConfig | None
    refresh: bool
    offline: bool
    make_room_after: float | None
    min_free: FreeSpace
    max_bytes: int | None
    environment: Mapping[str, str]
    cancelled: threading.Event | None
    idle_after_s: float

    def present(self, model: StoredModel) -> FetchedModel:
        """Report a model that is on this machine."""
        self.progress.resolved(model.source, model.revision)
        self.progress.end()
        return FetchedModel(model.path, model.source, model.revision)

    def fetch(self) -> FetchedModel:
        """Fetch a model, at the revision that it is pinned to if the source still has that."""
        uri, note = self.uri, self.progress.note
        name, requested = name_in_store(uri, self.environment)
        pinned = self.store.pinned_revision(name, requested)
        may_ask = not self.refresh and not self.offline and uri.scheme in _WITH_COMMITS
        if not may_ask or pinned in (None, requested):
            return self._fetch_at(uri)
        note(
            f"{uri}: fetching {pinned} again, to which it is pinned; "
            "`argosy models pull --refresh` takes what it is now"
        )
        try:
            return self._fetch_at(structs.replace(uri, revision=pinned))
        except ModelNotFound:
            note(f"{uri}: {pinned} is not there any more; taking what it is now")
        return self._fetch_at(uri)

    def _fetch_at(self, uri: SourceUri) -> FetchedModel:
        with closing(open_source(uri, load_credentials(self.environment))) as source:
            return fetch_model(
                source,
                self.store,
                progress=self.progress,
                check_config=self.check_config,
                refresh=self.refresh,
                offline=self.offline,
                requested=str(self.uri),
                settings=TransferSettings(
                    make_room=self._room_for(source.name),
                    room_of="" if self.make_room_after is None else str(self.store.root),
                    min_free=self.min_free,
                    max_bytes=self.max_bytes,
                ),
                cancelled=self.cancelled,
                idle_after_s=self.idle_after_s,
            )

    def _room_for(self, source: str) -> Callable[[int], None] | None:
        if self.make_room_after is None:
            return None
        return partial(
            make_room,
            self.store,
            source=source,
            min_age=self.make_room_after,
            note=self.progress.note,
            min_free=self.min_free,
        )

    def fetch_configs(self) -> PulledModel | None:
        """Fetch config and tokenizer; None if they are in an archive, or no request may be made."""
        if self.offline:
            return None
        path = Path(tempfile.mkdtemp(prefix="argosy-config-"))
        # Engines read it until then, such as at `wake_up`.
        atexit.register(shutil.rmtree, path, ignore_errors=True)
        with closing(open_source(self.uri, load_credentials(self.environment))) as source:
            snapshot = fetch_configs(source, path, check_config=self.check_config, note=self.progress.note)
        if snapshot is None:
            return None
        self.progress.resolved(snapshot.source, snapshot.revision)
        self.progress.end()
        return PulledModel(path, snapshot.source, snapshot.revision)


def find_model(
    uri: SourceUri, *, download_dir: str | None = None, environment: Mapping[str, str] | None = None
) -> StoredModel | None:
    """Return the model if the store has it; else, if no request may be made, that of Hugging Face's own cache. Makes
    no request. Where none may be made, the endpoint need not be known (`Store.find_offline`).

    Raises:
        FetchError: the URI is local, or the store or the credentials cannot be read.
    """
    values = os.environ if environment is None else environment
    store = open_store(download_dir, values)
    name, requested_revision = name_in_store(uri, values)
    find = store.find_offline if is_offline(values) else store.find
    found = find(name, requested_revision)
    if found is None and uri.scheme == "hf" and is_offline(values):
        from argosy_fetcher.sources.hub import hub_cache  # imports the hub's client

        cache = hub_cache(load_credentials(values))
        return find_cached_model(cache, uri.location, uri.revision, uri.quantization)
    return found


def pull_headers(
    uri: SourceUri,
    directory: Path,
    *,
    progress: Progress,
    check_config: CheckConfig | None = None,
    environment: Mapping[str, str] | None = None,
) -> Snapshot:
    """Fill an empty directory with a model's configs and the headers of its weights (`fetch_headers`).

    Raises:
        FetchError, TransientError: as `pull_model`.
    """
    values = os.environ if environment is None else environment
    if is_offline(values):
        raise Offline(
            f"{uri} is not in the store, and {', '.join(OFFLINE_ENVS[:-1])} or {OFFLINE_ENVS[-1]} forbids requests"
        )
    with closing(open_source(uri, load_credentials(values))) as source:
        snapshot = fetch_headers(source, directory, check_config=check_config, note=progress.note)
    progress.resolved(snapshot.source, snapshot.revision)
    return snapshot


def open_store(download_dir: str | None, environment: Mapping[str, str] | None = None) -> Store:
    """Return the store of this machine, which need not exist.

    Raises:
        FetchError: no directory is configured, and the user has no home directory.
    """
    return Store(choose_root(download_dir, os.environ if environment is None else environment))


def is_offline(environment: Mapping[str, str]) -> bool:
    """Whether the environment forbids requests."""
    return any(is_true(environment, name) for name in OFFLINE_ENVS)


def stored_gguf(uri: SourceUri, path: Path) -> Path:
    """Return the GGUF file that a URI is (`is_gguf`), or its first part, in a directory that `pull_model` returned.

    Raises:
        UnsupportedModel: it is not there any more.
    """
    names = [file.relative_to(path).as_posix() for file in path.rglob(f"*{SUFFIX}")]
    return path / choose_gguf(uri.name, gguf_of(uri.name), names)[0]


def find_cached_model(
    cache: Path, repository: str, revision: str, quantization: str = ""
) -> StoredModel | None:
    """Return a model of the cache if all that an engine needs of it is there.

    Args:
        repository: ORG/NAME.
        revision: a branch, a tag or a commit; `main` if empty.
        quantization: as in `SourceUri`.
    """
    from huggingface_hub import snapshot_download  # takes long to import

    source = SourceUri("hf", repository, quantization=quantization).name
    try:
        found = snapshot_download(
            repository, revision=revision or None, cache_dir=cache, local_files_only=True
        )
        directory = Path(found)
        commit = directory.name
        if not _COMMIT.fullmatch(commit):
            return None
        folder = directory.parents[1].resolve(strict=True)
        files = tuple(_served_files(folder, directory, is_gguf=bool(quantization)))
    except (OSError, RuntimeError, ValueError):  # not there, a loop of links, or no name of a repository
        return None

    def read_small(file: RemoteFile) -> bytes:
        if file.size > MAX_SMALL_FILE_BYTES:
            raise UnsupportedModel(f"{file.path} has {file.size} bytes")
        return (directory / file.path).read_bytes()

    try:
        selected = select(Snapshot(source, commit, files), read_small)
    except (UnsupportedModel, OSError):
        return None
    return StoredModel(
        source=source,
        revision=commit,
        path=directory,
        size=sum(file.size for file in (selected if quantization else files)),
        last_used_at=directory.stat().st_mtime,
    )


def _served_files(folder: Path, directory: Path, *, is_gguf: bool) -> Iterator[RemoteFile]:
    """Yield the served files, or the GGUF files, of a snapshot whose content is in the repository's folder."""
    if is_gguf:
        names = [path.relative_to(directory).as_posix() for path in directory.rglob(f"*{SUFFIX}")]
    else:
        names = [name for name in os.listdir(directory) if is_served_name(name)]
        names += [f"{name}/{CONFIG}" for name in os.listdir(directory) if is_pooling_folder(name)]
    for name in names:
        with suppress(OSError, RuntimeError):
            path = (directory / name).resolve(strict=True)
            found = path.stat()
            if path.is_relative_to(folder) and stat.S_ISREG(found.st_mode):
                yield RemoteFile(name, found.st_size)
