"""Pauses between attempts that fail: longer each time, and never the same for all who wait."""

from __future__ import annotations

from random import Random
from typing import Final

_MAX_DOUBLINGS: Final = 16


def backoff_s(doublings: int, base_s: float, cap_s: float, rng: Random) -> float:
    """Return the pause in seconds: the base, doubled so many times, up to the cap, and of that half to all."""
    return min(cap_s, base_s * 2.0 ** min(doublings, _MAX_DOUBLINGS)) * rng.uniform(0.5, 1.0)
