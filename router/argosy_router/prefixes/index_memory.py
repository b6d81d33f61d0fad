"""Division of the memory for prefix indexes among a router's services.

Must not know: services, what the indexes hold.
Invariant: the shares never exceed the total. Full indexes get at least an equal share, and what others do not need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

FULL = 0.85
"""An index filled to this degree counts as full: it could use more memory than it has."""
SPARE = 2.0
"""An index that is not full gets this many times what it uses, so that it can grow until the next division."""


class Index(Protocol):
    capacity: int

    @property
    def bytes(self) -> int: ...
    def __len__(self) -> int: ...


def shares(total: int, indexes: Sequence[Index]) -> list[int]:
    """Bytes for each index: the smallest demands are granted first, and the rest is divided evenly (max-min fair)."""
    wishes = [
        total if len(index) >= FULL * index.capacity else min(total, int(SPARE * index.bytes))
        for index in indexes
    ]
    granted = [0] * len(wishes)
    for done, position in enumerate(sorted(range(len(wishes)), key=wishes.__getitem__)):
        granted[position] = min(wishes[position], total // (len(wishes) - done))
        total -= granted[position]
    return [share + total // len(wishes) for share in granted]
