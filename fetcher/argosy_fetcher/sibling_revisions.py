"""Sibling revisions: files that other revisions of a model in the store have already.

Revisions mostly differ in a few small files. Must not know how a file is taken over, or checked (`partial_file`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from argosy_fetcher.snapshot import RemoteFile, Snapshot
from argosy_fetcher.sources.source import Chunk, Source
from argosy_fetcher.store import Store


class SiblingRevisions:
    """A source whose files are first looked for in the store, then where the source itself looks on this machine."""

    def __init__(self, source: Source, store: Store) -> None:
        self._source = source
        self._store = store

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def requested_revision(self) -> str:
        return self._source.requested_revision

    def snapshot(self) -> Snapshot:
        return self._source.snapshot()

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[Chunk]:
        return self._source.read(file, start, stop)

    def close(self) -> None:
        self._source.close()

    def can_read_ranges(self, file: RemoteFile) -> bool:
        asked = getattr(self._source, "can_read_ranges", None)
        return asked is None or bool(asked(file))

    def local_copy(self, file: RemoteFile) -> Path | None:
        """Return a file that should have the same content; the caller checks its hash."""
        if file.digest is not None:
            found = self._store.find_file(self.name, file.digest, file.size)
            if found is not None:
                return found
        asked = getattr(self._source, "local_copy", None)
        copy: Path | None = None if asked is None else asked(file)
        return copy
