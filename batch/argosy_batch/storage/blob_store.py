"""The interface of a storage: bytes under a key, with create, compare-and-swap, listing, and streamed bodies.

Must not know: what is stored. Keys are made by this program alone: folders and a name, separated by slashes, each of
letters, digits, `.`, `-` and `_`.

    BlobStoreError
    ├── AlreadyExists       `create`: the key has a blob
    └── Changed             `replace`: the blob is another version by now, or gone

Where the disk or bucket fails, StorageUnavailable is raised (`argosy_protocol.errors`), and StorageFull while there is
no room.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from typing import NamedTuple, Protocol

CHUNK_BYTES = 256 * 1024
"""Size of the pieces in which contents are read."""


class BlobStoreError(Exception):
    """A write was refused because of what is stored."""


class AlreadyExists(BlobStoreError):
    """The key has a blob already."""


class Changed(BlobStoreError):
    """The blob is not the version that was to be replaced."""


class Blob(NamedTuple):
    """A small blob as it was read."""

    data: bytes
    version: str
    """Changes with the data; opaque."""


class BlobEntry(NamedTuple):
    """A blob in a listing."""

    key: str
    size: int
    """Bytes."""
    modified: float
    """Seconds since the epoch, by the storage's clock."""


class BlobStore(Protocol):
    """A storage. All methods raise StorageUnavailable where the disk or bucket fails."""

    async def get(self, key: str) -> Blob | None:
        """Return a whole blob; None if there is none. For small ones."""
        ...

    async def create(self, key: str, data: bytes) -> str:
        """Write a blob that must not exist; return its version.

        Raises:
            AlreadyExists: it does; nothing was written.
        """
        ...

    async def replace(self, key: str, data: bytes, version: str) -> str:
        """Write a blob in place of the version that was read; return the new version.

        Raises:
            Changed: it is another version by now, or gone; nothing was written.
        """
        ...

    async def upload(self, key: str, chunks: AsyncIterable[bytes]) -> int:
        """Write a large blob from its pieces, in place of any other; return its size. If `chunks` raises, nothing is
        written and the exception goes on."""
        ...

    def read(self, key: str) -> AsyncGenerator[bytes, None]:
        """Yield a large blob in pieces of about `CHUNK_BYTES`; nothing if there is none."""
        ...

    async def delete(self, key: str) -> bool:
        """Delete a blob; return whether there was one, as far as the storage tells."""
        ...

    async def entries(self, folder: str) -> list[BlobEntry]:
        """Return all blobs below a folder, ordered by key."""
        ...

    async def time(self) -> float:
        """Return the storage's own time, in seconds since the epoch, as it is told of blobs (`BlobEntry.modified`)."""
        ...

    async def remove_leftovers(self, older_than: float) -> None:
        """Remove what writes that a crash ended have left, if older than a time (seconds since the epoch)."""
        ...
