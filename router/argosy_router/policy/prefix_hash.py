"""The prefix-hash policy: a prompt's beginning names its replica, within bounded loads (`bounded`).

It needs no telemetry and no memory: routers agree by construction. It sees neither what is cached nor how long prompts
are, which the cost policy does.
"""

from __future__ import annotations

import random

from argosy_router.policy import bounded
from argosy_router.policy.base import Candidate, Decision, RouteRequest, decide


def choose(request: RouteRequest, candidates: list[Candidate], rng: random.Random) -> Decision:
    """The replica on which the prompt's beginning lives."""
    return decide(request, candidates, bounded.place(request.key, candidates))


def terms(request: RouteRequest, candidates: list[Candidate]) -> list[dict[str, float]]:
    """Requests against the bound."""
    return bounded.terms(candidates)
