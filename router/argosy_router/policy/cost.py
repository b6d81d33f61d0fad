"""The cost policy: seconds until the first token, plus what the choice costs others.

    T(w) = wait(w)                                  the load's share: `waiting`
         + (prompt - hit(w)) / prefill_rate(w)      what of this prompt must be computed
         - STICKINESS * hit(w) / prefill_rate(w)    a copy elsewhere costs cache space

The lowest T wins; candidates within `TIE_S` or `TIE_SHARE` of it are equal and one is drawn. When nobody holds a
useful prefix, the draw is replaced by a rendezvous hash of the prompt's beginning among those within `COLD_SLACK` of
the best: router replicas agree where a new prefix should live without talking, and a loaded replica is passed over. A
prefix whose holder has more waiting than the prefix saves is computed, and then held, elsewhere too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from argosy_router.policy.base import MIN_HIT_TOKENS, Candidate, Decision, RouteRequest, decide
from argosy_router.policy.rendezvous import favourite
from argosy_router.policy.waiting import waiting_terms

STICKINESS = 0.1
"""Share of the time saved by a hit that is added for keeping the prefix in one place."""
TIE_S = 0.001
"""Below this, differences are noise of the estimates."""
TIE_SHARE = 0.02
COLD_SLACK = 1.25
"""Bounded load of the rendezvous choice, as in consistent hashing with bounded loads, but in seconds."""


def choose(request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random) -> Decision:
    """The candidate with the lowest T."""
    if len(candidates) == 1:
        return decide(request, candidates, 0)
    costs = cost(request, candidates)
    best = min(costs)
    hits = request.hits
    if hits and max(hits.values()) >= MIN_HIT_TOKENS:
        limit = best + max(TIE_S, TIE_SHARE * abs(best))
        close = [position for position, value in enumerate(costs) if value <= limit]
        chosen = close[0] if len(close) == 1 else close[int(rng.random() * len(close))]
    else:
        limit = best + max(TIE_S, (COLD_SLACK - 1.0) * best)
        close = [position for position, value in enumerate(costs) if value <= limit]
        chosen = favourite(request.key, candidates, close)
    return decide(request, candidates, chosen, costs[chosen])


def cost(request: RouteRequest, candidates: Sequence[Candidate]) -> list[float]:
    """T of every candidate, in seconds."""
    prompt = request.prompt_tokens
    costs = [candidate.wait_s + prompt / candidate.prefill_tokens_per_s for candidate in candidates]
    for position, hit in request.hits.items():
        costs[position] -= (1.0 + STICKINESS) * min(hit, prompt) / candidates[position].prefill_tokens_per_s
    return costs


def terms(request: RouteRequest, candidates: Sequence[Candidate]) -> list[dict[str, float]]:
    """The summands of T."""
    prompt = request.prompt_tokens
    table = []
    for position, candidate in enumerate(candidates):
        rate = candidate.prefill_tokens_per_s
        hit = min(request.hits.get(position, 0), prompt)
        own = {"prefill_s": (prompt - hit) / rate, "stickiness_s": -STICKINESS * hit / rate}
        table.append(waiting_terms(candidate) | own)
    return table
