"""How the memory of a router's prefix indexes is divided among its services.

Owns: the shares. Must not know: services, what the indexes hold.
Invariant: shares never exceed the whole. Whoever is full gets as much as anybody, and beyond that what others leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

FULL = 0.85
"""Filled to this degree, an index could use more memory than it has."""
SPARE = 2.0
"""Others keep this many times what they use, so that they can grow until memory is shared out again."""


class Index(Protocol):
    capacity: int

    @property
    def bytes(self) -> int: ...
    def __len__(self) -> int: ...


def shares(total: int, indexes: Sequence[Index]) -> list[int]:
    """Bytes for each index: the smallest wishes are granted first, and what is left over is divided evenly."""
    wishes = [
        total if len(index) >= FULL * index.capacity else min(total, int(SPARE * index.bytes))
        for index in indexes
    ]
    granted = [0] * len(wishes)
    for done, position in enumerate(sorted(range(len(wishes)), key=wishes.__getitem__)):
        granted[position] = min(wishes[position], total // (len(wishes) - done))
        total -= granted[position]
    return [share + total // len(wishes) for share in granted]
