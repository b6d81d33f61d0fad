"""The cost policy: seconds until the first token, plus what the choice costs others.

    T(w) = (queued(w) + prompt - hit(w)) / prefill_rate(w)             the prompts ahead, then this one's rest
         + EXPECTED_OUTPUT_TOKENS * decode_step(w) * requests(w) / max_num_seqs(w)     share of decode slots taken
         + KV_PRESSURE_S * k / (1 - k),  k = kv_usage(w)                risk of preemption
         - STICKINESS * hit(w) / prefill_rate(w)                        a copy elsewhere costs cache space

The lowest T wins; candidates within `TIE_S` or `TIE_SHARE` of it are equal and one is drawn. When nobody holds a
useful prefix, the draw is replaced by a rendezvous hash of the prompt's beginning among those within `COLD_SLACK` of
the best: router replicas agree where a new prefix should live without talking, and a loaded replica is passed over.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from argosy_router.policy.base import Candidate, Decision, RouteRequest
from argosy_router.policy.rates import PRIOR_MAX_NUM_SEQS, decode_step, prefill_rate
from argosy_router.policy.rendezvous import ranked

EXPECTED_OUTPUT_TOKENS = 64
"""Decode steps a newcomer shares with those already there; half a short answer, because they end meanwhile."""
KV_PRESSURE_S = 0.05
"""At 90 % KV use a preemption is near: 0.45 s, the price of recomputing a few thousand tokens."""
STICKINESS = 0.1
"""Share of the time saved by a hit that is added for keeping the prefix in one place."""
TIE_S = 0.001
"""Below this, differences are noise of the estimates."""
TIE_SHARE = 0.02
COLD_SLACK = 1.25
"""Bounded load of the rendezvous choice, as in consistent hashing with bounded loads, but in seconds."""
MIN_HIT_TOKENS = 16
"""One KV block: the engine reuses nothing below it. Role names alone must not look like a shared prefix."""
_MAX_KV = 0.99


def choose(request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random) -> Decision:
    """The candidate with the lowest T."""
    if len(candidates) == 1:
        only = candidates[0]
        return Decision(0, "only", _hit(request, only), 0.0)
    costs = cost(request, candidates)
    best = min(costs)
    hits = [_hit(request, candidate) for candidate in candidates]
    if max(hits) >= MIN_HIT_TOKENS:
        limit = best + max(TIE_S, TIE_SHARE * abs(best))
        close = [index for index, value in enumerate(costs) if value <= limit]
        chosen = close[0] if len(close) == 1 else rng.choice(close)
    else:
        limit = best + max(TIE_S, (COLD_SLACK - 1.0) * best)
        chosen = next(index for index in ranked(request.key, candidates) if costs[index] <= limit)
    hit = hits[chosen]
    return Decision(chosen, "cached" if hit >= MIN_HIT_TOKENS else "load", hit, costs[chosen])


def cost(request: RouteRequest, candidates: Sequence[Candidate]) -> list[float]:
    """T of every candidate, in seconds."""
    prior_rate = prefill_rate(candidates)
    prior_step = decode_step(candidates)
    prompt = request.prompt_tokens
    hits = request.hits
    costs = []
    for candidate in candidates:
        rate = candidate.prefill_tokens_per_s or prior_rate
        hit = min(hits.get(candidate.slot, 0), prompt)
        seats = candidate.max_num_seqs or PRIOR_MAX_NUM_SEQS
        step = candidate.decode_step_s or prior_step
        kv = min(candidate.kv_usage, _MAX_KV)
        costs.append(
            (candidate.queued_tokens + prompt - hit - STICKINESS * hit) / rate
            + EXPECTED_OUTPUT_TOKENS * step * candidate.requests / seats
            + KV_PRESSURE_S * kv / (1.0 - kv)
        )
    return costs


def _hit(request: RouteRequest, candidate: Candidate) -> int:
    return request.hits.get(candidate.slot, 0)
