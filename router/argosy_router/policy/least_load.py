"""The least-load policy: lowest time until the queue is worked off; it ignores caches.

    T(w) = queued(w) / prefill_rate(w) + decode_step(w) * requests(w)

The lowest T wins; ties are drawn at random. It is the baseline that the cost policy must never fall behind.
"""

from __future__ import annotations

import random

from argosy_router.policy.policy_interface import Candidate, Decision, RouteRequest, decide


def choose(request: RouteRequest, candidates: list[Candidate], rng: random.Random) -> Decision:
    """Choose the candidate with the lowest T."""
    costs = [
        candidate.queued_tokens / candidate.prefill_tokens_per_s
        + candidate.requests * candidate.decode_step_s
        for candidate in candidates
    ]
    best = min(costs)
    close = [position for position, value in enumerate(costs) if value == best]
    return decide(request, candidates, close[int(rng.random() * len(close))], best)


def terms(request: RouteRequest, candidates: list[Candidate]) -> list[dict[str, float]]:
    """The summands of T."""
    return [
        {
            "queue_s": candidate.queued_tokens / candidate.prefill_tokens_per_s,
            "decode_s": candidate.requests * candidate.decode_step_s,
        }
        for candidate in candidates
    ]
