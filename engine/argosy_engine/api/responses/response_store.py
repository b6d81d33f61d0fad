"""ResponseStore: keeps responses for their owners, so that later requests can read and continue them.

An owner is a client as far as the server can tell clients apart: its key, or the tenant that a router names. Whoever
asks for another owner's response learns the same as about one that does not exist.

Owns: the interface, its bounds, and the store in the memory of one engine, which ends with it. Behind a router the
router stores responses, where all routers find them.
Must not know: what a record means.
Invariant: neither an owner nor all of them together have more records or bytes than the bounds; the oldest ones go.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from argosy_protocol.errors import PayloadTooLarge
from argosy_protocol.response_history import StoredResponse


@dataclass(frozen=True)
class StoreLimits:
    ttl_s: float = 3600.0 * 24
    """Seconds after which a record is dropped."""
    max_records: int = 10_000
    max_bytes: int = 256 << 20
    """Of all records together; they stay in this process's memory."""
    max_records_of_owner: int = 2_500
    max_bytes_of_owner: int = 64 << 20
    """A quarter of all, so that no owner displaces all others."""


class ResponseStore(ABC):
    """Stored responses by owner and id."""

    @abstractmethod
    def check(self, size: int) -> None:
        """Check that a record of a size in bytes may be stored.

        Raises:
            PayloadTooLarge: it is larger than all records of one owner may be.
        """

    @abstractmethod
    async def put(self, owner: str, response_id: str, record: StoredResponse) -> None:
        """Keep a record, in place of an earlier one of that id.

        Raises:
            PayloadTooLarge: it is larger than all records of one owner may be.
        """

    @abstractmethod
    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a record; None if there is none, or it is another owner's."""

    @abstractmethod
    async def delete(self, owner: str, response_id: str) -> bool:
        """Drop a record. Returns whether there was one."""


@dataclass
class _Kept:
    record: StoredResponse
    size: int
    expires: float


class InMemoryResponseStore(ResponseStore):
    """
    Args:
        now: a monotonic clock.
    """

    def __init__(
        self, limits: StoreLimits | None = None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits or StoreLimits()
        self._now = now
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        """Oldest first."""
        self._by_owner: dict[str, OrderedDict[str, None]] = {}
        """Ids of each owner, oldest first."""
        self._num_bytes = 0
        self._bytes_of: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all records."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._kept)

    def check(self, size: int) -> None:
        limit = self._limits.max_bytes_of_owner
        if size > limit:
            raise PayloadTooLarge(
                f"the conversation has {size} bytes; one that is stored may have {limit}; send store: false",
                param="store",
            )

    async def put(self, owner: str, response_id: str, record: StoredResponse) -> None:
        size, limits = record.size, self._limits
        self.check(size)
        self._drop(owner, response_id)
        self._drop_expired()
        self._kept[owner, response_id] = _Kept(record, size, self._now() + limits.ttl_s)
        ids = self._by_owner.setdefault(owner, OrderedDict())
        ids[response_id] = None
        self._num_bytes += size
        self._bytes_of[owner] = self._bytes_of.get(owner, 0) + size
        while len(ids) > limits.max_records_of_owner or self._bytes_of[owner] > limits.max_bytes_of_owner:
            self._drop(owner, next(iter(ids)))
        while len(self._kept) > limits.max_records or self._num_bytes > limits.max_bytes:
            self._drop(*next(iter(self._kept)))

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        self._drop_expired()
        kept = self._kept.get((owner, response_id))
        return None if kept is None else kept.record

    async def delete(self, owner: str, response_id: str) -> bool:
        self._drop_expired()
        return self._drop(owner, response_id)

    def _drop_expired(self) -> None:
        now = self._now()
        while self._kept:
            key, kept = next(iter(self._kept.items()))
            if kept.expires > now:
                return
            self._drop(*key)

    def _drop(self, owner: str, response_id: str) -> bool:
        kept = self._kept.pop((owner, response_id), None)
        if kept is None:
            return False
        self._num_bytes -= kept.size
        self._bytes_of[owner] -= kept.size
        ids = self._by_owner[owner]
        del ids[response_id]
        if not ids:
            del self._by_owner[owner], self._bytes_of[owner]
        return True
