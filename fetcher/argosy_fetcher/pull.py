"""Pull: brings the model that a URI names into this machine's store, or finds it there.

Owns what programs that use models have in common: the store's directory, credentials, offline mode, and the lock that
keeps a model from being removed. Must not know how a model is fetched or what uses it. Environment: `store_layout`,
`credentials`, and `ARGOSY_OFFLINE` or `HF_HUB_OFFLINE`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from argosy_fetcher.credentials import load_credentials
from argosy_fetcher.errors import Offline
from argosy_fetcher.file_lock import SharedLock
from argosy_fetcher.header_fetch import fetch_headers
from argosy_fetcher.model_fetch import fetch_model
from argosy_fetcher.model_hold import hold_model
from argosy_fetcher.progress import Progress
from argosy_fetcher.selection import CheckConfig
from argosy_fetcher.snapshot import Snapshot
from argosy_fetcher.source_uri import SourceUri
from argosy_fetcher.sources.hub_endpoint import hub_source_name
from argosy_fetcher.sources.registry import open_source
from argosy_fetcher.store import Store, StoredModel
from argosy_fetcher.store_layout import choose_root

OFFLINE_ENVS: Final = ("ARGOSY_OFFLINE", "HF_HUB_OFFLINE")
_TRUE: Final = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A model in the store that is not removed before `close`, or the end of this process."""

    path: Path
    source: str
    revision: str
    lock: SharedLock | None

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()


def pull_model(
    uri: SourceUri,
    *,
    progress: Progress,
    download_dir: str | None = None,
    check_config: CheckConfig | None = None,
    refresh: bool = False,
    environment: Mapping[str, str] | None = None,
    cancelled: threading.Event | None = None,
) -> PulledModel:
    """Return the model, fetched if the store does not have it. A model that it has costs no request.

    Args:
        download_dir: the store's directory; the environment's if left out.
        check_config: raises if a config.json is of a model that the caller does not serve.
        refresh: ask the source again which revision a branch, a tag or the source itself has.
        environment: os.environ if left out.
        cancelled: ends a fetch when it is set. What has arrived is kept.

    Raises:
        Cancelled: the event was set.
        FetchError: the model cannot be fetched; a subclass says why.
        TransientError: the source or the network does not answer; what has arrived is kept.
    """
    values = os.environ if environment is None else environment
    store = open_store(download_dir, values)
    found = None if refresh or uri.scheme != "hf" else store.find(*name_in_store(uri, values))
    if found is not None:
        progress.resolved(found.source, found.revision)
        progress.end()
        return PulledModel(found.path, found.source, found.revision, hold_model(found.path))
    with closing(open_source(uri, load_credentials(values))) as source:
        fetched = fetch_model(
            source,
            store,
            progress=progress,
            check_config=check_config,
            refresh=refresh,
            offline=is_offline(values),
            requested=str(uri),
            cancelled=cancelled,
        )
    return PulledModel(fetched.path, fetched.source, fetched.revision, hold_model(fetched.path))


def find_model(
    uri: SourceUri, *, download_dir: str | None = None, environment: Mapping[str, str] | None = None
) -> StoredModel | None:
    """Return the model if the store has it. Makes no request.

    Raises:
        FetchError: the URI is local, or the store or the credentials cannot be read.
    """
    values = os.environ if environment is None else environment
    return open_store(download_dir, values).find(*name_in_store(uri, values))


def name_in_store(uri: SourceUri, environment: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return a source's canonical name and its requested revision, by which the store knows a model. Makes no request.

    Raises:
        FetchError: as `find_model`.
    """
    credentials = load_credentials(os.environ if environment is None else environment)
    if uri.scheme == "hf":  # without the source, whose client takes longer to import than a model to be found
        return hub_source_name(uri.location, credentials), uri.revision
    with closing(open_source(uri, credentials)) as source:
        return source.name, source.requested_revision


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
        raise Offline(f"{uri} is not in the store, and {' or '.join(OFFLINE_ENVS)} forbids requests")
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
