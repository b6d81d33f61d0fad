"""Leases: which router runs a batch.

Owns: taking, renewing and releasing them. Must not know: what a batch is.
Invariants: a lease has one holder at a time, by compare-and-swap in the storage. A router takes one from another only
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

from argosy_router.storage.blob_store import BlobStore, Changed

RENEWALS: Final = 6
"""Renewals in the duration of a lease. Four may fail; then its holder stops before another router may take over."""
_FOLDER: Final = "leases"


class LeaseLost(Exception):
    """Another router may run the batch by now."""


class _Lease(Struct, frozen=True, kw_only=True):
    holder: Annotated[str, Meta(max_length=64)] = ""
    """The router that holds it; empty if none does."""
    renewals: Annotated[int, Meta(ge=0)] = 0
    """Increases with every change."""


class HeldLease:
    """A lease that this router holds, or has lost."""

    def __init__(self, owner: str, batch_id: str, term: int, version: str, renewed: float) -> None:
        self.owner = owner
        self.batch_id = batch_id
        self.term = term
        """Higher than that of any holder before."""
        self.renewals = term
        self.version = version
        self.renewed = renewed
        """When it was last renewed, by this router's clock."""
        self.is_lost = False


class BatchLeases:
    """The leases of all batches, as one router sees them."""

    def __init__(
        self, blobs: BlobStore, duration_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.renew_s = duration_s / RENEWALS
        """How often a lease must be renewed."""
        self._duration_s = duration_s
        self._blobs = blobs
        self._now = now
        self._holder = secrets.token_hex(16)
        self._seen: dict[str, tuple[str, float]] = {}
        """Of each lease that another router holds, its version and when this router first saw it."""

    async def create(self, owner: str, batch_id: str) -> None:
        """Make the lease of a new batch, which nobody holds."""
        await self._blobs.create(_key(owner, batch_id), msgspec.json.encode(_Lease()))

    async def remove(self, owner: str, batch_id: str) -> None:
        """Remove the lease of a batch that has ended."""
        self._seen.pop(batch_id, None)
        await self._blobs.delete(_key(owner, batch_id))

    async def batches(self) -> list[tuple[str, str]]:
        """Return owner and id of every batch with a lease, oldest first."""
        found = []
        for entry in await self._blobs.entries(_FOLDER):
            _, owner, name = entry.key.rsplit("/", 2)
            found.append((owner, name.removesuffix(".json")))
        ids = {batch_id for _, batch_id in found}
        self._seen = {batch_id: seen for batch_id, seen in self._seen.items() if batch_id in ids}
        return sorted(found, key=lambda each: each[1])

    async def take(self, owner: str, batch_id: str) -> HeldLease | None:
        """Take a lease that nobody holds, or whose holder has not renewed it; None if it cannot be taken."""
        blob = await self._blobs.get(_key(owner, batch_id))
        if blob is None:
            return None
        lease = msgspec.json.decode(blob.data, type=_Lease)
        now = self._now()
        if lease.holder:
            version, since = self._seen.get(batch_id, ("", 0.0))
            if version != blob.version:
                self._seen[batch_id] = (blob.version, now)
                return None
            if now - since < self._duration_s:
                return None
        term = lease.renewals + 1
        taken = _Lease(holder=self._holder, renewals=term)
        try:
            version = await self._blobs.replace(
                _key(owner, batch_id), msgspec.json.encode(taken), blob.version
            )
        except Changed:
            return None
        self._seen.pop(batch_id, None)
        return HeldLease(owner, batch_id, term, version, now)

    async def renew(self, held: HeldLease) -> None:
        """Renew a lease; afterwards `is_lost` tells whether another router has it.

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
        lease = _Lease(holder=holder, renewals=held.renewals + 1)
        try:
            held.version = await self._blobs.replace(
                _key(held.owner, held.batch_id), msgspec.json.encode(lease), held.version
            )
        except Changed:
            held.is_lost = True
            return
        held.renewals += 1
        held.renewed = asked

    async def confirm(self, held: HeldLease) -> None:
        """Ask the storage whether a lease is held still, which a clock that stood still does not tell.

        Raises:
            LeaseLost: another router may have it.
        """
        blob = await self._blobs.get(_key(held.owner, held.batch_id))
        if blob is None or msgspec.json.decode(blob.data, type=_Lease).holder != self._holder:
            held.is_lost = True
        if not self.is_held(held):
            raise LeaseLost

    def is_held(self, held: HeldLease) -> bool:
        """Whether no other router can have the lease yet."""
        return not held.is_lost and self._now() - held.renewed < self._duration_s - self.renew_s


def _key(owner: str, batch_id: str) -> str:
    return f"{_FOLDER}/{owner}/{batch_id}.json"
