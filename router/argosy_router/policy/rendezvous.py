"""Rendezvous hashing: every router ranks the replicas for a key alike, and a departed replica moves only its own keys.

Owns: the ranking. Must not know: load.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from argosy_router.policy.base import Candidate

_MASK = (1 << 64) - 1


def ranked(key: int, candidates: Sequence[Candidate]) -> list[int]:
    """Positions of the candidates, the key's favourite first."""
    seed = key & _MASK
    weights = [xxhash.xxh3_64_intdigest(candidate.name.encode(), seed) for candidate in candidates]
    return sorted(range(len(candidates)), key=weights.__getitem__, reverse=True)
