"""The interface of a storage: bytes under a key, with create, compare-and-swap, listing, and streamed bodies.

Must not know: what is stored. Keys are made by the router alone: folders and a name, separated by slashes, each of
letters, digits, `.`, `-` and `_`.

    BlobStoreError
    ├── AlreadyExists       `create`: the key has a blob
    ├── Changed             `replace`: the blob is another version by now, or gone
    └── StorageUnavailable  503  the disk or bucket failed; a retry can help (an ApiError)
        └── StorageFull     507  the disk has no room, until someone makes some
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from typing import NamedTuple, Protocol

from argosy_protocol.errors import Unavailable

CHUNK_BYTES = 256 * 1024
"""Size of the pieces in which contents are read."""


class BlobStoreError(Exception):
    """A write was refused because of what is stored."""


class AlreadyExists(BlobStoreError):
    """The key has a blob already."""


class Changed(BlobStoreError):
    """The blob is not the version that was to be replaced."""


class StorageUnavailable(Unavailable):
    """The storage cannot be read or written now; the log has the cause."""

    default_code = "storage_unavailable"

    def __init__(self, reason: str = "") -> None:
        """`reason` is for clients: it must name no path."""
        because = f": {reason}" if reason else ""
        super().__init__(
            f"the router's storage (--storage) does not answer{because}; retry later", retry_after_s=1.0
        )


class StorageFull(StorageUnavailable):
    """The disk has no room; nothing was stored."""

    http_status = 507
    default_code = "storage_full"

    def __init__(self) -> None:
        Unavailable.__init__(
            self,
            "the router's storage (--storage) is full, and nothing was stored; delete files, or retry later",
            retry_after_s=10.0,
        )


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

    async def remove_leftovers(self, older_than: float) -> None:
        """Remove what writes that a crash ended have left, if older than a time (seconds since the epoch)."""
        ...
