"""The least-load policy: time until the queue is worked off, blind to caches.

    T(w) = queued(w) / prefill_rate(w) + decode_step(w) * requests(w)

The lowest T wins, ties are drawn. It is the baseline the cost policy must never fall behind.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from argosy_router.policy.base import Candidate, Decision, RouteRequest
from argosy_router.policy.rates import decode_step, prefill_rate


def choose(request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random) -> Decision:
    """The candidate with the lowest T."""
    prior_rate = prefill_rate(candidates)
    prior_step = decode_step(candidates)
    costs = [
        candidate.queued_tokens / (candidate.prefill_tokens_per_s or prior_rate)
        + candidate.requests * (candidate.decode_step_s or prior_step)
        for candidate in candidates
    ]
    best = min(costs)
    index = rng.choice([index for index, value in enumerate(costs) if value == best])
    hit = request.hits.get(candidates[index].slot, 0)
    return Decision(index, "only" if len(candidates) == 1 else "load", hit, best)
