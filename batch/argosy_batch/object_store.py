"""Objects of owners: a JSON document under a kind, an owner and an id, perhaps with a content of any size; and the
interface of what they are kept in (`BlobStore`), a directory or a bucket that several processes may share.

Owns: where an object is kept, quotas and how much each owner keeps, the end of an object's time to live, and what
cannot be read, put aside. Must not know: what kinds mean, who an owner is, HTTP.
Invariants: an object is found with its owner's name only; an expired object is not found, swept or not; an id that is
not one of `batch_program` finds nothing, so no request can name a path. Writes are atomic, and survive a crash once
they return; two processes on one storage see each other's objects.

    owners/OWNER/KIND/ID.json     the document
    owners/OWNER/KIND/ID.content  the content
    leases/..., work/...          what processes keep about an object with its id in the key, which ends with it
    quarantine/NAME               a copy of what cannot be read; NAME is its key with underscores for slashes

An owner is `owner_of` the name of the key's account: never the key, and the same in all processes. Keys are made by
this program alone: folders and a name, separated by slashes, each of letters, digits, `.`, `-` and `_`.

    BlobStoreError
    ├── AlreadyExists       `create`: the key has a blob
    └── Changed             `replace`: the blob is another version by now, or gone

Where the disk or bucket fails, StorageUnavailable is raised (`argosy_protocol.errors`), and StorageFull while there is
no room.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from argosy_protocol import batch_program
from argosy_protocol.errors import Forbidden, StorageUnavailable

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


T = TypeVar("T")


class SharedCalls(Generic[T]):
    """Calls that many wait for at once, such as listings of one owner's objects. While a call for a key runs, all
    further callers wait for one more, which follows it.

    Invariant: the call whose result a caller gets has begun after the caller asked, so it sees what the caller has
    done.
    """

    def __init__(self, call: Callable[[str], Awaitable[T]]) -> None:
        """`call` gets the key."""
        self._call = call
        self._running: dict[str, asyncio.Task[T]] = {}
        self._next: dict[str, asyncio.Task[T]] = {}
        """Calls that have not begun."""

    async def run(self, key: str) -> T:
        """Return what the key's next call returns, or raise what it raises. The call goes on without its callers."""
        task = self._next.get(key)
        if task is None:
            task = asyncio.create_task(self._after(self._running.get(key), key), name=f"shared call {key}")
            task.add_done_callback(_retrieve)
            self._next[key] = task
        return await asyncio.shield(task)

    async def _after(self, running: asyncio.Task[T] | None, key: str) -> T:
        try:
            if running is not None:
                await asyncio.wait([running])
        finally:
            task = self._next.pop(key)
        self._running[key] = task
        try:
            return await self._call(key)
        finally:
            del self._running[key]


def _retrieve(task: asyncio.Task[T]) -> None:
    """Take a failure whose callers are all gone."""
    if not task.cancelled():
        task.exception()


log = logging.getLogger(__name__)

FOLDER: Final = "quarantine"


class Quarantine:
    """Takes what cannot be read, so that one such object stops nothing, and somebody can look at it."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self.num_taken = 0

    async def take(self, key: str, data: bytes, why: Exception) -> None:
        """Keep a copy of an object. What it is replaced by, or that it is deleted, is the caller's business."""
        name = f"{FOLDER}/{key.replace('/', '_')}"
        self.num_taken += 1
        log.error("storage: %s cannot be read (%s); a copy is kept as %s", key, str(why)[:200], name)
        with contextlib.suppress(AlreadyExists):
            await self._blobs.create(name, data)


LISTING_MAX_AGE_S = 60.0


@dataclass(frozen=True, slots=True)
class Quota:
    """What one owner may keep."""

    max_bytes: int
    max_objects: int


class QuotaExceeded(Forbidden):
    """The owner keeps as much as it may."""

    default_code = "storage_quota_exceeded"


@dataclass(slots=True)
class _Usage:
    bytes: int = 0
    objects: int = 0
    listed: float = -math.inf


_NOTHING = _Usage()


class OwnerUsage:
    """Counts what owners keep: from a listing now and then, and from what this process writes in between. Times are a
    monotonic clock's.

    Invariants: what is being written counts from its reservation on; what is written while a listing is made counts
    beside what the listing finds. Another process's writes count at the next listing, so several processes together may
    exceed a quota by what an owner writes within `LISTING_MAX_AGE_S`.
    """

    def __init__(
        self, quota: Quota, measure: Callable[[str], Awaitable[tuple[int, int]]], now: Callable[[], float]
    ) -> None:
        """`measure(owner)` returns the bytes and the number of an owner's stored objects."""
        self._quota = quota
        self._measure = measure
        self._now = now
        self._usage: dict[str, _Usage] = {}
        self._reserved: dict[str, _Usage] = {}
        """What each owner is writing."""
        self._listings: dict[str, _Usage] = {}
        """What has been written since the owner's listing began that is being made."""
        self._refreshes = SharedCalls(self._list)

    async def refresh(self, owner: str) -> None:
        """Make sure that an owner's usage is known and not out of date."""
        usage = self._usage.get(owner)
        if usage is not None and self._now() - usage.listed <= LISTING_MAX_AGE_S:
            return
        await self._refreshes.run(owner)

    async def _list(self, owner: str) -> None:
        meanwhile = self._listings[owner] = _Usage()
        try:
            size, objects = await self._measure(owner)
        finally:
            del self._listings[owner]
        self._usage[owner] = _Usage(size + meanwhile.bytes, objects + meanwhile.objects, self._now())

    def bytes_of(self, owner: str) -> int:
        """Return how many bytes the owner keeps. Right after `refresh`."""
        return self._usage.get(owner, _NOTHING).bytes

    def check_objects(self, owner: str, more: int = 1) -> None:
        """Raise QuotaExceeded if the owner may not make `more` objects. Right after `refresh`."""
        if (
            self._usage[owner].objects + self._reserved.get(owner, _NOTHING).objects + more
            > self._quota.max_objects
        ):
            raise QuotaExceeded(
                f"this key's stored files, batches and responses reached the limit of {self._quota.max_objects} "
                "(--storage-max-objects); delete some"
            )

    def reserve(self, owner: str, size: int, objects: int = 0) -> None:
        """Reserve bytes and objects that are about to be written. Right after `refresh`.

        Raises:
            QuotaExceeded: the owner would keep more than it may; nothing was reserved.
        """
        usage, reserved = self._usage[owner], self._reserved.get(owner, _NOTHING)
        if objects:
            self.check_objects(owner, objects)
        if usage.bytes + reserved.bytes + size > self._quota.max_bytes:
            raise QuotaExceeded(
                f"this key's stored files, batches and responses would exceed the limit of {self._quota.max_bytes} "
                "bytes (--storage-max-bytes); delete some"
            )
        self._reserved[owner] = _Usage(reserved.bytes + size, reserved.objects + objects)

    def release(self, owner: str, size: int, objects: int = 0) -> None:
        """End a reservation: what it was for has been written, or not."""
        reserved = self._reserved[owner]
        reserved.bytes -= size
        reserved.objects -= objects
        if not (reserved.bytes or reserved.objects):
            del self._reserved[owner]

    def written(self, owner: str, size: int, objects: int) -> None:
        """Count what has been written."""
        for count in (self._listings.get(owner), self._usage.get(owner)):
            if count is not None:
                count.bytes += size
                count.objects += objects

    def outdate(self, owner: str) -> None:
        """Have the next `refresh` list what the owner keeps, because some of it was deleted."""
        usage = self._usage.get(owner)
        if usage is not None:
            usage.listed = -math.inf

    def forget_idle(self) -> None:
        """Forget owners that have written nothing of late."""
        now = self._now()
        self._usage = {
            owner: usage
            for owner, usage in self._usage.items()
            if owner in self._reserved or now - usage.listed <= LISTING_MAX_AGE_S
        }


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
        """Return an id for an object that is made now (see `batch_program.new_id`)."""
        return batch_program.new_id(prefix, self.now(), min(ttl_s, MAX_TTL_S))

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
        return sorted(filter(self._is_alive, ids), key=batch_program.place_of)

    async def kept_bytes(self, owner: str) -> int:
        """Return how many bytes an owner keeps, as far as this process knows."""
        await self._usage.refresh(owner)
        return self._usage.bytes_of(owner)

    # contents

    async def upload(
        self, kind: str, owner: str, object_id: str, chunks: AsyncIterable[bytes], *, is_counted: bool = True
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
            if is_lost or not batch_program.is_id(object_id) or _has_expired(object_id, now):
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
        return batch_program.is_id(object_id) and batch_program.expires_at(object_id) > self.now()

    async def _measure(self, owner: str) -> tuple[int, int]:
        entries = await self.blobs.entries(f"owners/{owner}")
        return sum(entry.size for entry in entries), sum(entry.key.endswith(".json") for entry in entries)


def _has_expired(text: str, now: float) -> bool:
    return batch_program.is_id(text) and batch_program.expires_at(text) <= now


def _document_key(kind: str, owner: str, object_id: str) -> str:
    assert batch_program.is_id(object_id)
    return f"owners/{owner}/{kind}/{object_id}.json"


def _content_key(kind: str, owner: str, object_id: str) -> str:
    assert batch_program.is_id(object_id)
    return f"owners/{owner}/{kind}/{object_id}.content"
