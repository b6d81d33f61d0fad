"""The session policy: a hash of the session selects the replica, with bounded loads (`bounded_load`).

The client declares its session in the header `x-session-id`, else as `prompt_cache_key` or `session_id` in the body.
The cost policy places requests without a session.
"""

from __future__ import annotations

import random

from argosy_router.policy import bounded_load, cost
from argosy_router.policy.policy_interface import Candidate, Decision, RouteRequest, decide


def choose(request: RouteRequest, candidates: list[Candidate], rng: random.Random) -> Decision:
    """Choose the replica that the session hashes to."""
    if not request.session:
        return cost.choose(request, candidates, rng)
    decision = decide(request, candidates, bounded_load.assign(request.session, candidates))
    if decision.reason != "only":
        decision.reason = "session"
    return decision


def terms(request: RouteRequest, candidates: list[Candidate]) -> list[dict[str, float]]:
    """Each candidate's requests, and the bound; without a session, the cost policy's terms."""
    return bounded_load.terms(candidates) if request.session else cost.terms(request, candidates)
