"""Hashing with bounded loads: a key goes to its favourite replica unless that has clearly more than its share of load.

    bound = max(1, LOAD_FACTOR * mean(requests)) + 1

Among the replicas with at most `bound` requests, the one that the key ranks first wins (consistent hashing with bounded
loads, Mirrokni et al. 2016, over rendezvous hashing instead of a ring). With a bound of a single request or less, a
quiet fleet would scatter every key; the `+ 1` prevents that.

Must not know: what a key stands for.
"""

from __future__ import annotations

from argosy_router.policy.policy_interface import Candidate
from argosy_router.policy.rendezvous import favourite

LOAD_FACTOR = 1.25
"""The paper's example: a quarter above the mean costs little balance and keeps most keys on their favourite."""


def bound(candidates: list[Candidate]) -> float:
    """Number of requests above which a replica takes no further keys."""
    total = sum([candidate.requests for candidate in candidates])
    return max(1.0, LOAD_FACTOR * total / len(candidates)) + 1.0


def assign(key: int, candidates: list[Candidate]) -> int:
    """Return the position of the candidate that the key is assigned to at the current load."""
    limit = bound(candidates)
    return favourite(
        key,
        candidates,
        [position for position, candidate in enumerate(candidates) if candidate.requests <= limit],
    )


def terms(candidates: list[Candidate]) -> list[dict[str, float]]:
    """Each candidate's requests, and the bound."""
    limit = bound(candidates)
    return [{"requests": float(candidate.requests), "bound": limit} for candidate in candidates]
