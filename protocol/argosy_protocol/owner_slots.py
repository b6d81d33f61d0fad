"""A number of slots that owners share, such as those for requests that wait for the storage.

Invariant: an owner may take a slot while it has fewer than are free (Choudhury and Hahne, "Dynamic queue length
thresholds"): one alone has half of them at most, and there is room for others.
"""

from __future__ import annotations

from collections import Counter

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
