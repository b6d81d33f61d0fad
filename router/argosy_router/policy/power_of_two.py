"""The power-of-two-choices policy: of two replicas drawn at random, the one with the shorter wait (`wait_model`).

Two choices reduce the longest queue from log n to log log n (Mitzenmacher 2001), and routers that decide on stale
figures do not all pick the same replica. It ignores caches.
"""

from __future__ import annotations

import random

from argosy_router.policy.policy_interface import Candidate, Decision, RouteRequest, decide
from argosy_router.policy.wait_model import waiting_terms


def choose(request: RouteRequest, candidates: list[Candidate], rng: random.Random) -> Decision:
    """Choose the better of two drawn at random."""
    count = len(candidates)
    if count == 1:
        return decide(request, candidates, 0)
    first = int(rng.random() * count)
    second = (first + 1 + int(rng.random() * (count - 1))) % count
    chosen = first if candidates[first].wait_s <= candidates[second].wait_s else second
    return decide(request, candidates, chosen, candidates[chosen].wait_s)


def terms(request: RouteRequest, candidates: list[Candidate]) -> list[dict[str, float]]:
    """The summands of the wait."""
    return [waiting_terms(candidate) for candidate in candidates]
