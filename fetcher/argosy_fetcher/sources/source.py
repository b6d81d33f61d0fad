"""Source: the interface between the fetcher and a place where models are kept.

A source knows addresses, credentials and protocols. It must not know the store, the selection of files, retries or
progress. To add one, write a module with a class of this shape and name it in `registry`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeAlias

from argosy_fetcher.snapshot import RemoteFile, Snapshot

Chunk: TypeAlias = bytes | memoryview


class Source(Protocol):
    """One model at one place. `read` is called from several threads at once."""

    @property
    def name(self) -> str:
        """Canonical URI without revision and credentials; the store's directory is derived from it."""
        ...

    @property
    def requested_revision(self) -> str:
        """The revision that the user asked for, such as a branch, a tag or a commit; empty if none."""
        ...

    def snapshot(self) -> Snapshot:
        """Resolve the revision and list the files. Not thread-safe; called before `read`.

        Raises:
            FetchError: the most specific class that applies.
            TransientError: another attempt may succeed.
        """
        ...

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[Chunk]:
        """Yield the bytes [start, stop) of a file in order, in chunks of any size.

        The iterator may end early or raise; the caller then continues from what it has received. It must not yield
        anything else than these bytes: a source that cannot read ranges yields nothing before `start`.

        Raises:
            SourceChanged: the content is not that of the snapshot any more.
            FetchError, TransientError: as `snapshot`.
        """
        ...

    def close(self) -> None: ...
