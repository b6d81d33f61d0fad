"""What a replica's cache is worth: prompt tokens that it has saved of late and that no other cache would have.

Owns: the decayed sum, and how one hit is valued. Must not know: replicas, prompts, clocks.

    value of a hit = (own - other) + other / holders

with `own` the cached tokens at the chosen replica, `other` the longest prefix of the prompt at any other replica, and
`holders` the number of replicas that hold some prefix of it. A conversation that only one replica knows counts in full;
a system prompt that all of them hold counts little, because removing one replica does not lose it.
"""

from __future__ import annotations

from math import exp
from typing import Final

RECENT_S: Final = 600.0
"""Time constant of the decay. Conversations pause for minutes; what was not used for half an hour has no value left."""


def hit_value(hits: dict[int, int], position: int) -> float:
    """Value of a hit, in tokens.

    Args:
        hits: cached tokens of the prompt by position of the replica.
        position: that of the chosen replica.
    """
    own = hits.get(position, 0)
    if not own:
        return 0.0
    other = 0
    for each, tokens in hits.items():
        if each != position and tokens > other:
            other = tokens
    other = min(own, other)
    return own - other + other / len(hits)


class CacheValue:
    """Recent value of one replica's cache."""

    __slots__ = ("_sum", "_time")

    def __init__(self) -> None:
        self._sum = 0.0
        self._time = 0.0

    def add(self, tokens: float, now: float) -> None:
        """Count a hit of this value."""
        self._sum = self._sum * exp((self._time - now) / RECENT_S) + tokens
        self._time = now

    def rate(self, now: float) -> float:
        """Tokens saved per second, averaged over about RECENT_S."""
        return self._sum * exp((self._time - now) / RECENT_S) / RECENT_S
