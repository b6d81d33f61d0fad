"""Sources of the hub look-alike's models, as tests of the fetcher use them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from argosy_fetcher.source import RemoteFile, Snapshot
from argosy_fetcher.source_uri import SourceUri
from argosy_fetcher.sources.hub import HubSource
from hub_server import HubServer

MODEL = "org/model"


def hub_source(hub: HubServer, name: str = MODEL, revision: str = "", **credentials: str) -> HubSource:
    """Make a source that reads nothing of this machine's own logins and caches. It is closed with the hub."""
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": "/nonexistent", **credentials}
    source = HubSource(SourceUri("hf", name, revision), settings)
    hub.clients.callback(source.close)
    return source


def file_of(snapshot: Snapshot, path: str) -> RemoteFile:
    file = snapshot.file(path)
    assert file is not None, f"{path} is not in {[file.path for file in snapshot.files]}"
    return file


def read(source: HubSource, file: RemoteFile, start: int = 0, stop: int | None = None) -> bytes:
    return b"".join(bytes(chunk) for chunk in source.read(file, start, file.size if stop is None else stop))


def download(source: HubSource, files: Iterable[RemoteFile], folder: Path) -> None:
    """Write files to a directory, in two ranges each, and check them."""
    for file in files:
        half = file.size // 2
        content = read(source, file, 0, half) + read(source, file, half)
        assert matches(file, content), file.path
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def matches(file: RemoteFile, content: bytes) -> bool:
    assert file.digest is not None
    if file.digest.algorithm == "git-sha1":
        content = b"blob %d\0" % len(content) + content
    name = file.digest.algorithm.removeprefix("git-")
    return hashlib.new(name, content).hexdigest() == file.digest.hex
