"""What owners share: a number of slots, such as those for requests that wait for the storage, and places that they take
in turn.

Invariant of the slots: an owner may take one while it has fewer than are free (Choudhury and Hahne, "Dynamic queue
length thresholds"): one alone has half of them at most, and there is room for others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from argosy_protocol.errors import Unavailable


class OwnerSlots:
    """Counts the slots that are taken, and by whom."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: Counter[str] = Counter()
        self.num_taken = 0

    def num_of(self, owner: str) -> int:
        """Return how many slots an owner has."""
        return self._taken[owner]

    def take(self, owner: str) -> bool:
        """Take a slot; return whether there was one for this owner. Whoever took one releases it once."""
        if self._taken[owner] >= self._size - self.num_taken:
            return False
        self._taken[owner] += 1
        self.num_taken += 1
        return True

    def refusal(self, owner: str, verb: str, things: str) -> Unavailable:
        """Return the error for an owner who got no slot, such as "the router `receives` 64 `files` already"."""
        return Unavailable(
            f"the router {verb} {self.num_taken} {things} already, {self.num_of(owner)} of them with this key; retry "
            "later",
            retry_after_s=1.0,
        )

    def release(self, owner: str) -> None:
        self.num_taken -= 1
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]


class _Line:
    """The requests of one owner."""

    def __init__(self, size: int) -> None:
        self.places = asyncio.Semaphore(size)
        self.num_requests = 0


class OwnerTurns:
    """Places for work that takes much memory or time. An owner has one or a few at a time, and those that wait get
    theirs in the order in which they came: one with a thousand requests delays another one by those few."""

    def __init__(self, size: int, of_owner: int = 1) -> None:
        """`of_owner`: places that an owner may have at a time."""
        self._of_owner = of_owner
        self._places = asyncio.Semaphore(size)
        self._lines: dict[object, _Line] = {}
        """Of owners that have a place or wait for one."""

    @property
    def num_owners(self) -> int:
        """Owners that have a place or wait for one."""
        return len(self._lines)

    @contextlib.asynccontextmanager
    async def turn(self, owner: object) -> AsyncIterator[None]:
        """Wait for a place, and hold it inside the block."""
        line = self._lines.setdefault(owner, _Line(self._of_owner))
        line.num_requests += 1
        try:
            async with line.places, self._places:
                yield
        finally:
            line.num_requests -= 1
            if not line.num_requests:
                del self._lines[owner]
