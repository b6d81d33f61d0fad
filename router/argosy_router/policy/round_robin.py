"""The round-robin policy: replicas take turns in the order of their names.

w = sequence mod n
"""

from __future__ import annotations

import random

from argosy_router.policy.policy_interface import Candidate, Decision, RouteRequest, decide


def choose(request: RouteRequest, candidates: list[Candidate], rng: random.Random) -> Decision:
    """Choose the next candidate in turn."""
    return decide(request, candidates, request.sequence % len(candidates))


def terms(request: RouteRequest, candidates: list[Candidate]) -> list[dict[str, float]]:
    """Turns until each candidate is next."""
    count = len(candidates)
    return [{"turns_until": float((position - request.sequence) % count)} for position in range(count)]
