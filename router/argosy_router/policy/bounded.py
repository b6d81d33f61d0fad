"""Hashing with bounded loads: a key lives on its favourite replica until that one has clearly more than its share.

    bound = max(1, LOAD_FACTOR * mean(requests)) + 1

Among replicas with at most `bound` requests the key's favourite wins (consistent hashing with bounded loads, Mirrokni
et al. 2016, over rendezvous instead of a ring). The `+ 1` keeps the bound from falling below a single request, where a
quiet fleet would scatter every key.

Owns: the choice by key. Must not know: what a key stands for.
"""

from __future__ import annotations

from argosy_router.policy.base import Candidate
from argosy_router.policy.rendezvous import favourite

LOAD_FACTOR = 1.25
"""The paper's example: a quarter above the mean costs little balance and keeps most keys at home."""


def bound(candidates: list[Candidate]) -> float:
    """Requests above which a replica takes no further keys."""
    total = sum([candidate.requests for candidate in candidates])
    return max(1.0, LOAD_FACTOR * total / len(candidates)) + 1.0


def place(key: int, candidates: list[Candidate]) -> int:
    """The position where the key lives now."""
    limit = bound(candidates)
    return favourite(
        key,
        candidates,
        [position for position, candidate in enumerate(candidates) if candidate.requests <= limit],
    )


def terms(candidates: list[Candidate]) -> list[dict[str, float]]:
    """Requests against the bound."""
    limit = bound(candidates)
    return [{"requests": float(candidate.requests), "bound": limit} for candidate in candidates]
