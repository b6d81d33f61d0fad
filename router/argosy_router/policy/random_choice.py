"""The random policy: every replica is as likely as any other. A baseline."""

from __future__ import annotations

import random

from argosy_router.policy.policy_interface import Candidate, Decision, RouteRequest, decide


def choose(request: RouteRequest, candidates: list[Candidate], rng: random.Random) -> Decision:
    """Choose any candidate."""
    return decide(request, candidates, int(rng.random() * len(candidates)))


def terms(request: RouteRequest, candidates: list[Candidate]) -> list[dict[str, float]]:
    """The probability of each candidate."""
    return [{"chance": 1.0 / len(candidates)} for _ in candidates]
