"""Rendezvous hashing: every router ranks replicas for a key alike, and a replica that leaves moves only its own keys.

Owns: the ranking. Must not know: load.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from argosy_router.native.hashing import first_ranked
from argosy_router.policy.policy_interface import Candidate

_MASK = (1 << 64) - 1
_xxh3 = xxhash.xxh3_64_intdigest


def favourite(key: int, candidates: list[Candidate], positions: Sequence[int]) -> int:
    """Return the one of `positions` whose candidate the key ranks first."""
    return positions[first_ranked([candidates[position].identity for position in positions], key & _MASK)]


def weights(key: int, candidates: list[Candidate]) -> list[int]:
    """Each candidate's weight for the key; the highest wins."""
    seed = key & _MASK
    return [_xxh3(candidate.identity, seed) for candidate in candidates]
