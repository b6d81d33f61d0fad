"""Pull: brings the model that a URI names into this machine's store, or finds it there.

Owns what programs that use models have in common: the store's directory, credentials, offline mode, and the lock that
keeps a model from being removed. Must not know how a model is fetched or what uses it. Environment: `store_layout`,
`credentials`, and `OFFLINE_ENVS`, any of which forbids requests.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import structs

from argosy_fetcher.config_fetch import fetch_configs
from argosy_fetcher.credentials import load_credentials
from argosy_fetcher.disk import FreeSpace
from argosy_fetcher.errors import InvalidSource, ModelNotFound, ModelRemoved, Offline
from argosy_fetcher.header_fetch import fetch_headers
from argosy_fetcher.hub_cache import find_cached_model
from argosy_fetcher.lock_holder import IDLE_AFTER_S
from argosy_fetcher.model_fetch import fetch_model
from argosy_fetcher.model_hold import ModelHold, hold_model
from argosy_fetcher.progress import Progress
from argosy_fetcher.room import make_room
from argosy_fetcher.selection import CheckConfig
from argosy_fetcher.snapshot import Snapshot
from argosy_fetcher.source_uri import SourceUri
from argosy_fetcher.sources.bucket_endpoint import bucket_name
from argosy_fetcher.sources.hub_endpoint import hub_source_name
from argosy_fetcher.sources.oci_reference import parse_reference
from argosy_fetcher.sources.registry import open_source
from argosy_fetcher.store import Store
from argosy_fetcher.store_index import StoredModel
from argosy_fetcher.store_layout import choose_root
from argosy_fetcher.transfer import TransferSettings

OFFLINE_ENVS: Final = ("ARGOSY_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_MAX_REMOVALS: Final = 3
"""How often a model may be removed between its fetch and its use before that is an error."""
_MARGIN: Final = FreeSpace()
_WITH_COMMITS: Final = ("hf", "oci")
"""Schemes whose URIs can name any revision that a snapshot has."""


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A model that is not removed before `close`, or the end of this process."""

    path: Path
    source: str
    revision: str
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
    min_free: FreeSpace = _MARGIN,
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
            model = pull.present(found)
        elif not has_weights and (configs := pull.fetch_configs()) is not None:
            return configs
        else:
            model = pull.fetch()
        try:
            held = replace(model, hold=hold_model(model.path))
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

    def present(self, model: StoredModel) -> PulledModel:
        """Report a model that is on this machine."""
        self.progress.resolved(model.source, model.revision)
        self.progress.end()
        return PulledModel(model.path, model.source, model.revision)

    def fetch(self) -> PulledModel:
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

    def _fetch_at(self, uri: SourceUri) -> PulledModel:
        with closing(open_source(uri, load_credentials(self.environment))) as source:
            found = fetch_model(
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
        return PulledModel(found.path, found.source, found.revision)

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
        from argosy_fetcher.sources.hub_environment import hub_cache  # imports the hub's client

        return find_cached_model(hub_cache(load_credentials(values)), uri.location, uri.revision)
    return found


def name_in_store(uri: SourceUri, environment: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return a source's canonical name and its requested revision, by which the store knows a model. Makes no request,
    and imports no client: that takes longer than to find a model, and a stored one needs none.

    Raises:
        FetchError: as `find_model`.
    """
    if uri.scheme == "hf":
        credentials = load_credentials(os.environ if environment is None else environment)
        return hub_source_name(uri.location, credentials), uri.revision
    if uri.scheme in ("https", "http"):
        return uri.name, uri.revision.removeprefix("sha256:")
    if uri.scheme == "oci":
        reference = parse_reference(uri)
        return reference.name, reference.requested_revision
    if uri.scheme in ("s3", "gs"):
        return bucket_name(uri, load_credentials(os.environ if environment is None else environment)), ""
    raise InvalidSource(f"{uri} is not fetched: it names a place on this machine or in the cluster")


def pull_headers(
    uri: SourceUri,
    directory: Path,
    *,
    progress: Progress,
    check_config: CheckConfig | None = None,
    environment: Mapping[str, str] | None = None,
) -> Snapshot:
    """Fill an empty directory with a model's configs and the headers of its weights (`header_fetch`).

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
    return any(environment.get(name, "").lower() in _TRUE for name in OFFLINE_ENVS)
