"""The prefix-hash policy: a hash of the prompt's beginning selects the replica, with bounded loads (`bounded_load`).

It needs no telemetry. Routers agree while no replica exceeds the bound; beyond it, each goes by its own estimate of the
replicas' requests, so routers under load may choose differently. Unlike the cost policy it sees neither what is
cached nor how long prompts are.
"""

from __future__ import annotations

import random

from argosy_router.policy import bounded_load
from argosy_router.policy.policy_interface import Candidate, Decision, RouteRequest, decide


def choose(request: RouteRequest, candidates: list[Candidate], rng: random.Random) -> Decision:
    """Choose the replica that the prompt's beginning hashes to."""
    return decide(request, candidates, bounded_load.assign(request.affinity_hash, candidates))


def terms(request: RouteRequest, candidates: list[Candidate]) -> list[dict[str, float]]:
    """Each candidate's requests, and the bound."""
    return bounded_load.terms(candidates)
