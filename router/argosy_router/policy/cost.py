"""The cost policy: expected seconds until the first token, plus what the choice costs other requests.

    T(w) = wait(w)                                    time lost to load, see `wait_model`
         + (prompt - hit(w)) / prefill_rate(w)        time to compute the uncached part of this prompt
         - stickiness * hit(w) / prefill_rate(o)      what computing the prefix again elsewhere would cost others

    stickiness = STICKINESS + CROWDING * mean(queued) / prompt, at most MAX_STICKINESS

where o ("elsewhere") is the replica that would have the lowest T if no replica held a prefix, and the mean is over the
replicas that hold less of the prompt than the longest prefix found.

A prefix that is computed a second time takes cache space, often another prefix's, and delays the requests queued behind
it: few while the other replicas are idle, many once they have queues of their own. So a hot prefix spreads over idle
replicas and stays in place when the fleet is busy. The holders' own queues do not count, or a single hot prefix would
be kept in one place by the very queue that it causes. Nor does the policy take the shortest queue instead of the mean:
in a fleet at 80 % load some replica has no queue at nearly every moment, and each such moment would copy a prefix.

The lowest T wins; candidates within `TIE_S` or `TIE_SHARE` of it count as equal, and one is drawn at random. When no
replica holds more than `COLD_HIT` of the prompt (all chats begin with the same template), the draw is replaced by a
rendezvous hash of the prompt's beginning among the candidates within `COLD_SLACK` of the best. Routers thus agree on
where a new prefix goes without communicating, and loaded replicas are passed over. So are replicas that were sent more
than `COLD_SHARE` of the mean lately: in an idle fleet a hash alone would give some replica more prefixes than its cache
can hold. If none is left, slower replicas within `MAX_COLD_COST_RATIO` are considered, so that a replica whose first
steps were slow gets requests on which to be measured again.
"""

from __future__ import annotations

import random
from typing import Final

from argosy_router.policy.policy_interface import MIN_HIT_TOKENS, Candidate, Decision, RouteRequest, decide
from argosy_router.policy.rendezvous import favourite
from argosy_router.policy.wait_model import waiting_terms

STICKINESS: Final = 0.5
"""In an idle fleet, half of the time that a hit saves counts once more, for keeping the prefix in one place."""
CROWDING: Final = 6.0
"""Added per prompt of this size queued at the mean replica elsewhere. In replays (docs/log/router.md) the hit rate
grows up to this value and little beyond it, while requests may wait longer for their prefix the higher it is."""
MAX_STICKINESS: Final = 10.0
"""Cap, so that the cache hit cannot dominate the cost."""
TIE_S: Final = 0.001
"""Smaller differences are noise in the estimates."""
TIE_SHARE: Final = 0.02
COLD_SLACK: Final = 1.25
"""Load bound of the rendezvous choice, as in consistent hashing with bounded loads, but in seconds."""
COLD_HIT: Final = 0.1
"""Saving a tenth of the prompt is not worth sending all prompts to one replica."""
COLD_SHARE: Final = 1.25
"""The same bound on the work sent in the last minute or so."""
MAX_COLD_COST_RATIO: Final = 4.0
"""Speed differences within this factor may be noise; a replica slower than that is used only when others are busy."""


def choose(request: RouteRequest, candidates: list[Candidate], rng: random.Random) -> Decision:
    """Choose the candidate with the lowest T."""
    if len(candidates) == 1:
        return decide(request, candidates, 0)
    costs = _without_hits(request, candidates)
    best = cold = min(costs)
    hits = request.hits
    if hits:
        _deduct_hits(costs, request, candidates, costs.index(cold))
        best = min(cold, min([costs[position] for position in hits]))
    if hits and max(hits.values()) >= max(MIN_HIT_TOKENS, COLD_HIT * request.prompt_tokens):
        limit = best + max(TIE_S, TIE_SHARE * abs(best))
        among = hits if cold > limit else range(len(costs))  # nearly always only holders come close
        close = [position for position in among if costs[position] <= limit]
        chosen = close[0] if len(close) == 1 else close[int(rng.random() * len(close))]
    else:
        limit = best + max(TIE_S, (COLD_SLACK - 1.0) * best)
        close = [position for position, value in enumerate(costs) if value <= limit]
        chosen = favourite(request.affinity_hash, candidates, _with_room(candidates, close, costs, best))
    return decide(request, candidates, chosen, costs[chosen])


def _with_room(candidates: list[Candidate], close: list[int], costs: list[float], best: float) -> list[int]:
    """Candidates for a cold prompt: those of `close` that were not sent more than their share lately; else any that
    were not, whose wait is within the best's whole cost, and that are not far slower; else all of `close`."""
    bound = COLD_SHARE * sum([candidate.recent_work for candidate in candidates]) / len(candidates)
    return (
        [position for position in close if candidates[position].recent_work <= bound]
        or [
            position
            for position, candidate in enumerate(candidates)
            if candidate.recent_work <= bound
            and candidate.wait_s <= best
            and costs[position] <= MAX_COLD_COST_RATIO * best
        ]
        or close
    )


def cost(request: RouteRequest, candidates: list[Candidate]) -> list[float]:
    """T of every candidate, in seconds."""
    costs = _without_hits(request, candidates)
    _deduct_hits(costs, request, candidates, costs.index(min(costs)))
    return costs


def _without_hits(request: RouteRequest, candidates: list[Candidate]) -> list[float]:
    """T of every candidate if no replica held a prefix."""
    prompt = request.prompt_tokens
    return [candidate.wait_s + prompt / candidate.prefill_tokens_per_s for candidate in candidates]


def _deduct_hits(
    costs: list[float], request: RouteRequest, candidates: list[Candidate], elsewhere: int
) -> None:
    prompt = request.prompt_tokens
    bonus_s = stickiness_s(request, candidates, elsewhere)
    for position, hit in request.hits.items():
        costs[position] -= (1.0 / candidates[position].prefill_tokens_per_s + bonus_s) * min(hit, prompt)


def stickiness_s(request: RouteRequest, candidates: list[Candidate], elsewhere: int) -> float:
    """Value of a hit beyond the time it saves this request, in seconds per token."""
    crowding = CROWDING * _queued_elsewhere(request, candidates) / max(1, request.prompt_tokens)
    return min(MAX_STICKINESS, STICKINESS + crowding) / candidates[elsewhere].prefill_tokens_per_s


def _queued_elsewhere(request: RouteRequest, candidates: list[Candidate]) -> float:
    """Mean queue, in uncached prompt tokens, of the replicas that hold less than the longest prefix."""
    hits = request.hits
    longest = max(hits.values(), default=0)
    holders = [position for position, hit in hits.items() if hit == longest]
    others = len(candidates) - len(holders)
    if not others:
        return 0.0
    queued = sum([candidate.queued_tokens for candidate in candidates])
    return (queued - sum([candidates[position].queued_tokens for position in holders])) / others


def terms(request: RouteRequest, candidates: list[Candidate]) -> list[dict[str, float]]:
    """The summands of T."""
    prompt = request.prompt_tokens
    costs = _without_hits(request, candidates)
    bonus_s = stickiness_s(request, candidates, costs.index(min(costs)))
    table = []
    for position, candidate in enumerate(candidates):
        rate = candidate.prefill_tokens_per_s
        hit = min(request.hits.get(position, 0), prompt)
        own = {"prefill_s": (prompt - hit) / rate, "stickiness_s": -bonus_s * hit}
        table.append(waiting_terms(candidate) | own)
    return table
