"""Leases: which process runs a batch.

Owns: taking, renewing and releasing them. Must not know: what a batch is.
Invariants: a lease has one holder at a time, by compare-and-swap in the storage. A process takes one from another only
after it has seen it unchanged for the lease's duration by its own clock, so clocks need not agree; a holder that could
not renew for nearly so long considers it lost. Each `term` of a lease is another number, higher than those before.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from argosy_batch.storage.blob_store import BlobStore, Changed
from argosy_batch.storage.quarantine import Quarantine
from argosy_protocol import object_ids

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
            if len(names) == 2 and object_ids.is_id(batch_id := names[1].removesuffix(".json")):
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
