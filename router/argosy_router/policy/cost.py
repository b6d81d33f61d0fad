"""The cost policy: seconds until the first token, plus what the choice costs others.

    T(w) = wait(w)                                    the load's share: `waiting`
         + (prompt - hit(w)) / prefill_rate(w)        what of this prompt must be computed
         - stickiness * hit(w) / prefill_rate(o)      what computing it again elsewhere would cost everybody

    stickiness = STICKINESS + CROWDING * mean(queued) / prompt, at most MAX_STICKINESS

where o is elsewhere: the replica with the lowest T if nobody held a prefix, and the mean is over the replicas that hold
less of the prompt than the longest prefix found.

A prefix computed a second time takes cache space, often another prefix's, and delays whoever queues behind it: few
while the other replicas are idle, many once they have queues of their own. So a hot prefix spreads over idle replicas
and stays where it is when the fleet is busy. The holders' own queues do not count: a single hot prefix would be kept
in its one place by the very queue that it causes. Nor is it the emptiest replica's queue: in a fleet at 80 % some
replica has none at nearly every moment, and each such moment would copy a prefix.

The lowest T wins; candidates within `TIE_S` or `TIE_SHARE` of it are equal and one is drawn. When nobody holds more
than `COLD_HIT` of the prompt (all chats begin with the same template), the draw is replaced by a rendezvous hash of the
prompt's beginning among those within `COLD_SLACK` of the best: router replicas agree where a new prefix should live
without talking, and a loaded replica is passed over. So is one that was sent more than `COLD_SHARE` of the mean lately:
at rest, when nothing waits anywhere, a hash alone would give some replica more prefixes than its cache can hold. If
that leaves nobody, slower ones within `COLD_STRETCH` take their share, so that a replica whose first steps were slow
gets the chance to show better.
"""

from __future__ import annotations

import random
from typing import Final

from argosy_router.policy.base import MIN_HIT_TOKENS, Candidate, Decision, RouteRequest, decide
from argosy_router.policy.rendezvous import favourite
from argosy_router.policy.waiting import waiting_terms

STICKINESS: Final = 0.5
"""At rest, half of the time a hit saves counts again for keeping the prefix in one place."""
CROWDING: Final = 6.0
"""Per prompt of this size that waits at the mean replica elsewhere. Replays (docs/log.md) gain hits up to this and
little beyond it, while a request may wait longer for its prefix the higher it is."""
MAX_STICKINESS: Final = 10.0
"""Beyond it nothing but the hit would count."""
TIE_S: Final = 0.001
"""Below this, differences are noise of the estimates."""
TIE_SHARE: Final = 0.02
COLD_SLACK: Final = 1.25
"""Bounded load of the rendezvous choice, as in consistent hashing with bounded loads, but in seconds."""
COLD_HIT: Final = 0.1
"""A tenth of the prompt saved is not worth having all prompts in one place."""
COLD_SHARE: Final = 1.25
"""The same bound on work sent in the last minute or so."""
COLD_STRETCH: Final = 4.0
"""Speeds within it may be noise; a replica slower than that is for when others are busy."""


def choose(request: RouteRequest, candidates: list[Candidate], rng: random.Random) -> Decision:
    """The candidate with the lowest T."""
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
        chosen = favourite(request.key, candidates, _with_room(candidates, close, costs, best))
    return decide(request, candidates, chosen, costs[chosen])


def _with_room(candidates: list[Candidate], close: list[int], costs: list[float], best: float) -> list[int]:
    """Those of `close` that were not sent more than their share lately; else whoever was not, waits less than the best
    takes in all, and is not far slower; else all of `close`."""
    bound = COLD_SHARE * sum([candidate.recent_work for candidate in candidates]) / len(candidates)
    return (
        [position for position in close if candidates[position].recent_work <= bound]
        or [
            position
            for position, candidate in enumerate(candidates)
            if candidate.recent_work <= bound
            and candidate.wait_s <= best
            and costs[position] <= COLD_STRETCH * best
        ]
        or close
    )


def cost(request: RouteRequest, candidates: list[Candidate]) -> list[float]:
    """T of every candidate, in seconds."""
    costs = _without_hits(request, candidates)
    _deduct_hits(costs, request, candidates, costs.index(min(costs)))
    return costs


def _without_hits(request: RouteRequest, candidates: list[Candidate]) -> list[float]:
    """T of every candidate if nobody held a prefix."""
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
    """What a hit counts beyond the time it saves this request, in seconds per token."""
    crowding = CROWDING * _queued_elsewhere(request, candidates) / max(1, request.prompt_tokens)
    return min(MAX_STICKINESS, STICKINESS + crowding) / candidates[elsewhere].prefill_tokens_per_s


def _queued_elsewhere(request: RouteRequest, candidates: list[Candidate]) -> float:
    """Mean queue, in uncached prompt tokens, of the replicas that do not hold the longest prefix."""
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
