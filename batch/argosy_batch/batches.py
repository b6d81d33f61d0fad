"""Batches in the storage: their documents, their leases (which process runs a batch), and /v1/batches (create, list,
retrieve, cancel).

Owns: updates of documents, in which no process's change is lost; taking, renewing and releasing leases; what a client
may ask of a batch. Must not know: connections, how a batch is run.
Invariants: a lease has one holder at a time, by compare-and-swap in the storage. A process takes one from another only
after it has seen it unchanged for the lease's duration by its own clock, so clocks need not agree; a holder that could
not renew for nearly so long considers it lost. Each `term` of a lease is another number, higher than those before.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from argosy_batch.files_api import FilesApi, in_order, limit_of, page_of
from argosy_batch.object_store import AlreadyExists, BlobStore, Changed, ObjectStore, Quarantine
from argosy_protocol import batch_program
from argosy_protocol.batch_program import ENDED, BatchObject, Page, StoredBatch, no_such_batch
from argosy_protocol.errors import BadRequest, StorageUnavailable

_ATTEMPTS: Final = 20
"""Two processes and a client change a batch at a time."""


class BatchRecords:
    """The batches of all keys."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def now(self) -> int:
        """Seconds since the epoch."""
        return int(self._store.now())

    async def create(self, owner: str, stored: StoredBatch) -> None:
        await self._store.create(batch_program.BATCHES, owner, stored.batch.id, msgspec.json.encode(stored))

    async def read(self, owner: str, batch_id: str) -> StoredBatch | None:
        """Return a batch; None if the owner has none of this id."""
        found = await self._store.read_as(batch_program.BATCHES, owner, batch_id, batch_program.decode_stored)
        return None if found is None else found[0]

    async def ids(self, owner: str) -> list[str]:
        """Return the ids of an owner's batches, oldest first."""
        return await self._store.ids(batch_program.BATCHES, owner)

    async def update(
        self, owner: str, batch_id: str, change: Callable[[StoredBatch], StoredBatch | None]
    ) -> StoredBatch | None:
        """Change a batch; return it as it is then, or None if there is none. `change`: returns the changed batch, or
        None to leave it; called again if another change came first."""
        for _ in range(_ATTEMPTS):
            found = await self._store.read_as(
                batch_program.BATCHES, owner, batch_id, batch_program.decode_stored
            )
            if found is None:
                return None
            stored, version = found
            changed = change(stored)
            if changed is None:
                return stored
            try:
                await self._store.replace(
                    batch_program.BATCHES, owner, batch_id, msgspec.json.encode(changed), version
                )
            except Changed:
                continue
            return changed
        raise StorageUnavailable


def with_batch(stored: StoredBatch, **fields: object) -> StoredBatch:
    """Return a document with other values of its batch's fields."""
    batch: BatchObject = msgspec.structs.replace(stored.batch, **fields)
    return msgspec.structs.replace(stored, batch=batch)


RENEWALS: Final = 6
"""Renewals in the duration of a lease. Four may fail; then its holder stops before another process may take over."""
_FOLDER: Final = "leases"


class LeaseLost(Exception):
    """Another process may run the batch by now."""


class _Lease(Struct, frozen=True, kw_only=True):
    holder: Annotated[str, Meta(max_length=64)] = ""
    """The process that holds it; empty if none does."""
    renewals: Annotated[int, Meta(ge=0)] = 0
    """Increases with every change."""


_decode: Final = msgspec.json.Decoder(_Lease).decode


class HeldLease:
    """A lease that this process holds, or has lost."""

    def __init__(self, owner: str, batch_id: str, term: int, version: str, renewed: float) -> None:
        self.owner = owner
        self.batch_id = batch_id
        self.term = term
        """Higher than that of any holder before."""
        self.renewals = term
        self.version = version
        self.renewed = renewed
        """When it was last renewed, by this process's clock."""
        self.is_lost = False


class BatchLeases:
    """The leases of all batches, as one process sees them."""

    def __init__(
        self,
        blobs: BlobStore,
        quarantine: Quarantine,
        duration_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.renew_s = duration_s / RENEWALS
        """How often a lease must be renewed."""
        self._duration_s = duration_s
        self.blobs = blobs
        self._quarantine = quarantine
        self._now = now
        self._holder = secrets.token_hex(16)
        self._terms: dict[str, int] = {}
        """Of each batch with a lease, the term that this process took last."""
        self._seen: dict[str, tuple[str, float]] = {}
        """Of each lease that another process holds, its version and when this process first saw it."""

    async def create(self, owner: str, batch_id: str) -> None:
        """Make the lease of a new batch, which nobody holds."""
        await self.blobs.create(_key(owner, batch_id), msgspec.json.encode(_Lease()))

    async def exists(self, owner: str, batch_id: str) -> bool:
        return await self.blobs.get(_key(owner, batch_id)) is not None

    async def remove(self, owner: str, batch_id: str) -> None:
        """Remove the lease of a batch that has ended."""
        self._seen.pop(batch_id, None)
        await self.blobs.delete(_key(owner, batch_id))

    async def batches(self) -> list[tuple[str, str]]:
        """Return owner and id of every batch with a lease, oldest first."""
        found = []
        for entry in await self.blobs.entries(_FOLDER):
            _, *names = entry.key.split("/")
            if len(names) == 2 and batch_program.is_id(batch_id := names[1].removesuffix(".json")):
                found.append((names[0], batch_id))
        ids = {batch_id for _, batch_id in found}
        self._terms = {batch_id: term for batch_id, term in self._terms.items() if batch_id in ids}
        self._seen = {batch_id: seen for batch_id, seen in self._seen.items() if batch_id in ids}
        return sorted(found, key=lambda each: each[1])

    async def take(self, owner: str, batch_id: str) -> HeldLease | None:
        """Take a lease that nobody holds, or whose holder has not renewed it; None if it cannot be taken."""
        blob = await self.blobs.get(_key(owner, batch_id))
        if blob is None:
            return None
        now = self._now()
        try:
            lease = _decode(blob.data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            await self._quarantine.take(_key(owner, batch_id), blob.data, error)
            lease = _Lease(renewals=int(time.time()))  # more than any lease has had, so that its term is new
        if lease.holder and lease.holder != self._holder:  # our own is of a take whose answer was lost
            version, since = self._seen.get(batch_id, ("", 0.0))
            if version != blob.version:
                self._seen[batch_id] = (blob.version, now)
                return None
            if now - since < self._duration_s:
                return None
        term = lease.renewals + 1
        taken = _Lease(holder=self._holder, renewals=term)
        try:
            version = await self.blobs.replace(
                _key(owner, batch_id), msgspec.json.encode(taken), blob.version
            )
        except Changed:
            return None
        self._seen.pop(batch_id, None)
        self._terms[batch_id] = term
        return HeldLease(owner, batch_id, term, version, now)

    async def renew(self, held: HeldLease) -> None:
        """Renew a lease; afterwards `is_lost` tells whether another process has it.

        Raises:
            StorageUnavailable: it may still be held.
        """
        await self._change(held, self._holder)

    async def release(self, held: HeldLease) -> None:
        """Let any router take a lease at once."""
        if not held.is_lost:
            await self._change(held, "")
        held.is_lost = True

    async def _change(self, held: HeldLease, holder: str) -> None:
        asked = self._now()
        lease, key = _Lease(holder=holder, renewals=held.renewals + 1), _key(held.owner, held.batch_id)
        try:
            held.version = await self.blobs.replace(key, msgspec.json.encode(lease), held.version)
        except Changed:
            # A change before this one may have been made although its answer was lost.
            version = await self._own_version(key, held)
            if version is None:
                held.is_lost = True
                return
            try:
                held.version = await self.blobs.replace(key, msgspec.json.encode(lease), version)
            except Changed:
                held.is_lost = True
                return
        held.renewals += 1
        held.renewed = asked

    async def _own_version(self, key: str, held: HeldLease) -> str | None:
        """The version of a lease as it is stored, if that is this process's, of this term; None otherwise."""
        blob = await self.blobs.get(key)
        if blob is None:
            return None
        try:
            lease = _decode(blob.data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        if self._terms.get(held.batch_id, held.term) != held.term:  # this process has taken it again since
            return None
        is_own = lease.holder == self._holder and held.term <= lease.renewals <= held.renewals + 1
        return blob.version if is_own else None

    async def confirm(self, held: HeldLease) -> None:
        """Ask the storage whether a lease is held still, which a clock that stood still does not tell.

        Raises:
            LeaseLost: another process may have it.
        """
        if await self._own_version(_key(held.owner, held.batch_id), held) is None:
            held.is_lost = True
        if not self.is_held(held):
            raise LeaseLost

    def is_held(self, held: HeldLease) -> bool:
        """Whether no other process can have the lease yet."""
        return not held.is_lost and self._now() - held.renewed < self._duration_s - self.renew_s


def _key(owner: str, batch_id: str) -> str:
    return f"{_FOLDER}/{owner}/{batch_id}.json"


log = logging.getLogger(__name__)

_DEFAULT_LIMIT: Final = 20


class BatchesApi:
    """The batches of all keys."""

    def __init__(
        self,
        store: ObjectStore,
        files: FilesApi,
        records: BatchRecords,
        leases: BatchLeases,
        *,
        ttl_s: float,
        on_created: Callable[[], None],
    ) -> None:
        """
        Args:
            ttl_s: how long batches live, and the files of their results.
            on_created: called when there is a batch to run.
        """
        self._store = store
        self._files = files
        self._records = records
        self._leases = leases
        self._ttl_s = ttl_s
        self._on_created = on_created
        self._ended: set[str] = set()
        """Stored batches that were seen to have ended, whose documents a sweep need not read again."""

    async def create(self, owner: str, account: str, body: bytes) -> BatchObject:
        """Make a batch of `account`.

        Raises:
            BadRequest: the request is not as documented, or names a file that the owner does not have.
        """
        create = batch_program.decode_create(body)
        file = await self._files.find(owner, create.input_file_id)
        if file is None or file.purpose != "batch":
            raise BadRequest(
                f"there is no file {create.input_file_id!r} with purpose batch; upload it to /v1/files first",
                param="input_file_id",
            )
        batch_id = self._store.new_id(
            batch_program.BATCH_ID_PREFIX, max(self._ttl_s, 2 * batch_program.WINDOW_S)
        )
        stored = batch_program.new_batch(batch_id, create, account, self._ttl_s)
        # A lease without a batch is removed by whoever finds it; a batch without a lease would never run.
        await self._leases.create(owner, batch_id)
        try:
            await self._records.create(owner, stored)
        except StorageUnavailable:
            raise  # the batch may have been stored all the same
        except Exception:
            await self._leases.remove(owner, batch_id)
            raise
        with contextlib.suppress(StorageUnavailable):  # then the next sweep does it
            await self._lease_again(owner, batch_id)
        self._on_created()
        return stored.batch

    async def lease_again(self, documents: Iterable[str]) -> None:
        """Make the leases of batches that have not ended and have none, so that they end; `documents`: where the
        documents of the storage are, as `ObjectStore.sweep` found them."""
        stored = set()
        for document in documents:
            parts = document.split("/")
            if len(parts) == 4 and parts[2] == batch_program.BATCHES:
                stored.add((parts[1], parts[3]))
        self._ended &= {batch_id for _, batch_id in stored}
        leased = set(await self._leases.batches())
        for owner, batch_id in stored - leased:
            if batch_id not in self._ended and await self._lease_again(owner, batch_id):
                log.warning("batch %s had no lease, and has one again", batch_id)
                self._on_created()

    async def _lease_again(self, owner: str, batch_id: str) -> bool:
        """Make the lease of a batch that has not ended, if it is gone; return whether it was."""
        if await self._leases.exists(owner, batch_id):
            return False
        stored = await self._records.read(owner, batch_id)
        if stored is None:
            return False
        if stored.batch.status in ENDED:
            self._ended.add(batch_id)
            return False
        with contextlib.suppress(AlreadyExists):
            await self._leases.create(owner, batch_id)
            return True
        return False

    async def get(self, owner: str, batch_id: str) -> BatchObject:
        """Raises NotFound if the owner has no such batch, as `cancel`."""
        stored = await self._records.read(owner, batch_id)
        if stored is None:
            raise no_such_batch(batch_id)
        return stored.batch

    async def cancel(self, owner: str, batch_id: str) -> BatchObject:
        """Ask for a batch to be cancelled; the program that runs it does so."""

        def cancelling(stored: StoredBatch) -> StoredBatch | None:
            status = stored.batch.status
            if status in ("cancelling", "cancelled"):
                return None
            if status not in ("validating", "in_progress"):
                raise BadRequest(f"a batch with status {status!r} cannot be cancelled")
            return with_batch(stored, status="cancelling", cancelling_at=self._records.now())

        stored = await self._records.update(owner, batch_id, cancelling)
        if stored is None:
            raise no_such_batch(batch_id)
        self._on_created()
        return stored.batch

    async def list(self, owner: str, query: Mapping[str, str]) -> Page[BatchObject]:
        """Return a page of the owner's batches, the newest first."""
        limit = limit_of(query, _DEFAULT_LIMIT, batch_program.MAX_LISTED_BATCHES)
        asked = {"after": query.get("after", "")}
        ids = in_order(await self._records.ids(owner), asked, batch_program.BATCH_ID_PREFIX)

        async def read(batch_id: str) -> BatchObject | None:
            stored = await self._records.read(owner, batch_id)
            return None if stored is None else stored.batch

        return await page_of(ids, limit, read)
