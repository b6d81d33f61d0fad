"""How much each owner keeps: counted from a listing now and then, and from what this process writes in between.

Invariants: what is being written counts from its reservation on; what is written while a listing is made counts beside
what the listing finds. Another process's writes count at the next listing, so several processes together may exceed a
quota by what an owner writes within `LISTING_MAX_AGE_S`.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from argosy_batch.storage.shared_calls import SharedCalls
from argosy_protocol.errors import Forbidden

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
    """Counts what owners keep. Times are a monotonic clock's."""

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
