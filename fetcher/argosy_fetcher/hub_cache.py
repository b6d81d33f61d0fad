"""Hub cache: complete models in Hugging Face's own cache, which machines without a network serve as they are.

    CACHE/models--ORG--NAME/refs/REVISION           the commit of a branch or a tag
    CACHE/models--ORG--NAME/snapshots/COMMIT/FILE   a link to ../../blobs/ETAG

Owns which of its models is complete. Content is not hashed: that library does so when it
downloads. Invariant: what is served lies in the repository's own folder, wherever links lead.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from argosy_fetcher.errors import UnsupportedModel
from argosy_fetcher.selection import (
    CONFIG,
    MAX_SMALL_FILE_BYTES,
    is_pooling_folder,
    is_served_name,
    select,
)
from argosy_fetcher.snapshot import RemoteFile, Snapshot
from argosy_fetcher.store_index import StoredModel

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_MAX_REF_BYTES: Final = 128


def find_cached_model(cache: Path, repository: str, revision: str) -> StoredModel | None:
    """Return a model of the cache if all that an engine needs of it is there.

    Args:
        repository: ORG/NAME.
        revision: a branch, a tag or a commit; `main` if empty.
    """
    try:
        folder = (cache / f"models--{repository.replace('/', '--')}").resolve(strict=True)
        commit = _commit(folder, revision or "main")
        directory = folder / "snapshots" / commit
        files = tuple(_served_files(folder, directory))
    except (OSError, RuntimeError):  # a loop of links
        return None

    def read_small(file: RemoteFile) -> bytes:
        if file.size > MAX_SMALL_FILE_BYTES:
            raise UnsupportedModel(f"{file.path} has {file.size} bytes")
        return (directory / file.path).read_bytes()

    try:
        select(Snapshot(f"hf://{repository}", commit, files), read_small)
    except (UnsupportedModel, OSError):
        return None
    return StoredModel(
        source=f"hf://{repository}",
        revision=commit,
        path=directory,
        size=sum(file.size for file in files),
        last_used_at=directory.stat().st_mtime,
    )


def _commit(folder: Path, revision: str) -> str:
    """
    Raises:
        OSError: the cache does not know the revision.
    """
    if _COMMIT.fullmatch(revision):
        return revision
    with (folder / "refs" / revision).open("rb") as file:
        commit = file.read(_MAX_REF_BYTES).decode("ascii", "replace").strip()
    if not _COMMIT.fullmatch(commit):
        raise FileNotFoundError(folder / "refs" / revision)
    return commit


def _served_files(folder: Path, directory: Path) -> Iterator[RemoteFile]:
    """Yield the served files of a snapshot whose content is in the repository's folder."""
    names = os.listdir(directory)
    folders = [f"{name}/{CONFIG}" for name in names if is_pooling_folder(name)]
    for name in [*filter(is_served_name, names), *folders]:
        with suppress(OSError, RuntimeError):
            path = (directory / name).resolve(strict=True)
            found = path.stat()
            if path.is_relative_to(folder) and stat.S_ISREG(found.st_mode):
                yield RemoteFile(name, found.st_size)
