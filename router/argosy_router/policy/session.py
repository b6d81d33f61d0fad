"""The session policy: a session stays on its replica, within bounded loads (`bounded`).

The session is what the client declares: the header `x-session-id`, else `prompt_cache_key` or `session_id` in the
body. A request without one is placed by the cost policy.
"""

from __future__ import annotations

import random

from argosy_router.policy import bounded, cost
from argosy_router.policy.base import Candidate, Decision, RouteRequest, decide


def choose(request: RouteRequest, candidates: list[Candidate], rng: random.Random) -> Decision:
    """The replica on which the session lives."""
    if not request.session:
        return cost.choose(request, candidates, rng)
    decision = decide(request, candidates, bounded.place(request.session, candidates))
    if decision.reason != "only":
        decision.reason = "session"
    return decision


def terms(request: RouteRequest, candidates: list[Candidate]) -> list[dict[str, float]]:
    """Requests against the bound; the cost policy's terms without a session."""
    return bounded.terms(candidates) if request.session else cost.terms(request, candidates)
