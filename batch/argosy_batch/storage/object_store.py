"""Objects of owners: a JSON document under a kind, an owner and an id, perhaps with a content of any size.

Owns: where an object is kept, quotas, and the end of its time to live.
Must not know: what kinds mean, who an owner is, HTTP.
Invariants: an object is found with its owner's name only; an expired object is not found, swept or not; an id that is
not one of `object_ids` finds nothing, so no request can name a path.

    owners/OWNER/KIND/ID.json     the document
    owners/OWNER/KIND/ID.content  the content
    leases/..., work/...          what processes keep about an object with its id in the key, which ends with it

An owner is `owner_of` the name of the key's account: never the key, and the same in all processes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Final, NamedTuple, TypeVar

import msgspec

from argosy_batch.storage.blob_store import BlobStore
from argosy_batch.storage.owner_usage import OwnerUsage, Quota
from argosy_batch.storage.quarantine import FOLDER, Quarantine
from argosy_batch.storage.shared_calls import SharedCalls
from argosy_protocol import object_ids
from argosy_protocol.errors import StorageUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_TTL_S: Final = 10 * 365 * 86400.0
SWEEP_S: Final = 600.0
"""Time between sweeps of one process; expired objects are not found meanwhile."""
SWEPT_AT_ONCE: Final = 500
"""Objects that are looked at before other work of the event loop has its turn: a millisecond."""
QUARANTINED_S: Final = 30 * 86400.0
"""How long what could not be read is kept."""
LEFTOVER_S: Final = 86400.0
"""No upload takes a day."""


class Document(NamedTuple):
    """A JSON document as it was read."""

    data: bytes
    version: str
    """For `replace`."""


class StoredTotal(NamedTuple):
    """What the last sweep found, of all owners together."""

    bytes: int
    objects: int


def owner_of(account_name: str) -> str:
    """Return the owner that stands for an account, by its name (`Account.name`)."""
    return hashlib.blake2b(
        account_name.encode("utf-8", "surrogatepass"), digest_size=16, person=b"argosy-owner/1"
    ).hexdigest()


class ObjectStore:
    """The objects of one storage."""

    def __init__(
        self,
        blobs: BlobStore,
        quota: Quota,
        *,
        now: Callable[[], float] = time.time,
        storage_now: Callable[[], Awaitable[float]] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` is in seconds since the epoch, as is `storage_now`, by the storage's clock."""
        self.blobs = blobs
        """For what belongs to no owner, such as leases."""
        self.now = now
        self._storage_now = storage_now or blobs.time
        self.quarantine = Quarantine(blobs)
        self._usage = OwnerUsage(quota, self._measure, monotonic)
        self._listings = SharedCalls(self._list)
        self.total = StoredTotal(0, 0)
        self.max_bytes = quota.max_bytes
        """What one owner may keep."""

    async def has_come(self, moment: float) -> bool:
        """Whether a moment has come by our clock and by the storage's: ours alone may be ahead."""
        return self.now() >= moment and await self._storage_now() >= moment

    def new_id(self, prefix: str, ttl_s: float) -> str:
        """Return an id for an object that is made now (see `object_ids.new_id`)."""
        return object_ids.new_id(prefix, self.now(), min(ttl_s, MAX_TTL_S))

    # documents

    async def create(
        self, kind: str, owner: str, object_id: str, document: bytes, *, is_counted: bool = True
    ) -> str:
        """Store a new document; return its version.

        Args:
            object_id: of `new_id`.
            is_counted: whether the owner's quota can refuse it.

        Raises:
            QuotaExceeded: the owner has too many objects or bytes.
            AlreadyExists: the id is taken.
            StorageUnavailable: the storage failed, as for all methods.
        """
        size = len(document)
        await self._usage.refresh(owner)
        if is_counted:
            self._usage.reserve(owner, size, 1)
        try:
            version = await self.blobs.create(_document_key(kind, owner, object_id), document)
            self._usage.written(owner, size, 1)
        finally:
            if is_counted:
                self._usage.release(owner, size, 1)
        return version

    async def read(self, kind: str, owner: str, object_id: str) -> Document | None:
        """Return a document; None if the owner has none of this id, or it has expired."""
        if not self._is_alive(object_id):
            return None
        blob = await self.blobs.get(_document_key(kind, owner, object_id))
        return None if blob is None else Document(blob.data, blob.version)

    async def read_as(
        self, kind: str, owner: str, object_id: str, decode: Callable[[bytes], T]
    ) -> tuple[T, str] | None:
        """Return what a document says, and its version; None if the owner has none of this id. One that cannot be
        decoded goes to the quarantine, and counts as none."""
        document = await self.read(kind, owner, object_id)
        if document is None:
            return None
        try:
            return decode(document.data), document.version
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            key = _document_key(kind, owner, object_id)
            await self.quarantine.take(key, document.data, error)
            await self.blobs.delete(key)
            self._usage.outdate(owner)
            return None

    async def replace(self, kind: str, owner: str, object_id: str, document: bytes, version: str) -> str:
        """Store a document in place of the version that was read; return the new version.

        Raises:
            Changed: it is another version by now, or was deleted.
        """
        return await self.blobs.replace(_document_key(kind, owner, object_id), document, version)

    async def delete(self, kind: str, owner: str, object_id: str) -> bool:
        """Delete a document and its content; return whether the owner had it."""
        document = await self.read(kind, owner, object_id)
        if document is None:
            return False
        # The document goes first: a content without one is found by nobody, and swept.
        was_there = await self.blobs.delete(_document_key(kind, owner, object_id))
        await self.blobs.delete(_content_key(kind, owner, object_id))
        self._usage.outdate(owner)
        return was_there

    async def ids(self, kind: str, owner: str) -> list[str]:
        """Return the ids of all objects of a kind that an owner has, oldest first."""
        return (await self._listings.run(f"owners/{owner}/{kind}")).copy()

    async def _list(self, folder: str) -> list[str]:
        entries = await self.blobs.entries(folder)
        names = [entry.key.rpartition("/")[2] for entry in entries]
        ids = [name.removesuffix(".json") for name in names if name.endswith(".json")]
        return sorted(filter(self._is_alive, ids), key=object_ids.place_of)

    async def kept_bytes(self, owner: str) -> int:
        """Return how many bytes an owner keeps, as far as this process knows."""
        await self._usage.refresh(owner)
        return self._usage.bytes_of(owner)

    # contents

    async def upload(
        self,
        kind: str,
        owner: str,
        object_id: str,
        chunks: AsyncIterable[bytes],
        *,
        is_counted: bool = True,
    ) -> int:
        """Store a content from its pieces, before its document; return its size. If `chunks` raises, nothing is
        stored, and the exception goes on.

        Raises:
            QuotaExceeded: the owner has too many objects, or would have too many bytes.
        """
        await self._usage.refresh(owner)
        if not is_counted:
            size = await self.blobs.upload(_content_key(kind, owner, object_id), chunks)
            self._usage.written(owner, size, 0)
            return size
        self._usage.check_objects(owner)
        reserved = 0

        async def within_quota() -> AsyncIterator[bytes]:
            nonlocal reserved
            async for chunk in chunks:
                await self._usage.refresh(owner)
                self._usage.reserve(owner, len(chunk))
                reserved += len(chunk)
                yield chunk

        try:
            size = await self.blobs.upload(_content_key(kind, owner, object_id), within_quota())
            self._usage.written(owner, size, 0)
        finally:
            if reserved:
                self._usage.release(owner, reserved)
        return size

    def content(self, kind: str, owner: str, object_id: str) -> AsyncGenerator[bytes, None]:
        """Yield a content in pieces; nothing if there is none. The caller has read the document."""
        return self.blobs.read(_content_key(kind, owner, object_id))

    async def delete_content(self, kind: str, owner: str, object_id: str) -> None:
        """Delete a content whose document was not stored."""
        await self.blobs.delete(_content_key(kind, owner, object_id))
        self._usage.outdate(owner)

    # expiry

    async def sweep(self) -> set[str]:
        """Delete the objects that have expired, and what crashes have left; update `total`. Return the keys of the
        documents that were found, without their ending."""
        # Our clock may be ahead, and have everybody's objects deleted.
        now = min(self.now(), await self._storage_now())
        self._usage.forget_idle()
        size = objects = 0
        for entry in [*await self.blobs.entries("leases"), *await self.blobs.entries("work")]:
            if any(_has_expired(part, now) for part in entry.key.removesuffix(".json").split("/")):
                await self.blobs.delete(entry.key)
        for entry in await self.blobs.entries(FOLDER):
            if entry.modified < now - QUARANTINED_S:
                await self.blobs.delete(entry.key)
        entries = await self.blobs.entries("owners")
        documents: set[str] = set()
        for start in range(0, len(entries), SWEPT_AT_ONCE):
            documents.update(
                entry.key.removesuffix(".json")
                for entry in entries[start : start + SWEPT_AT_ONCE]
                if entry.key.endswith(".json")
            )
            await asyncio.sleep(0)
        for number, entry in enumerate(entries):
            if number % SWEPT_AT_ONCE == 0:
                await asyncio.sleep(0)
            stem, _, ending = entry.key.rpartition(".")
            object_id = stem.rpartition("/")[2]
            is_lost = ending == "content" and stem not in documents and entry.modified < now - LEFTOVER_S
            if is_lost or not object_ids.is_id(object_id) or _has_expired(object_id, now):
                await self.blobs.delete(entry.key)
                continue
            size += entry.size
            objects += ending == "json"
        self.total = StoredTotal(size, objects)
        await self.blobs.remove_leftovers(now - LEFTOVER_S)
        return documents

    async def sweep_for_ever(self, then: Callable[[set[str]], Awaitable[None]]) -> None:
        """Sweep now and then until cancelled; `then` is called with what each sweep returned."""
        while True:
            try:
                await then(await self.sweep())
            except StorageUnavailable:
                log.warning("the storage could not be swept; it will be tried again")
            except Exception:  # one object must not keep the others from being swept
                log.exception("the storage could not be swept; it will be tried again")
            await asyncio.sleep(SWEEP_S)

    def _is_alive(self, object_id: str) -> bool:
        return object_ids.is_id(object_id) and object_ids.expires_at(object_id) > self.now()

    async def _measure(self, owner: str) -> tuple[int, int]:
        entries = await self.blobs.entries(f"owners/{owner}")
        return sum(entry.size for entry in entries), sum(entry.key.endswith(".json") for entry in entries)


def _has_expired(text: str, now: float) -> bool:
    return object_ids.is_id(text) and object_ids.expires_at(text) <= now


def _document_key(kind: str, owner: str, object_id: str) -> str:
    assert object_ids.is_id(object_id)
    return f"owners/{owner}/{kind}/{object_id}.json"


def _content_key(kind: str, owner: str, object_id: str) -> str:
    assert object_ids.is_id(object_id)
    return f"owners/{owner}/{kind}/{object_id}.content"
