"""Routing policies: pure functions that choose a replica. `cost` is the default; the others are simpler, or baselines.

Owns: the choice, and the figures that it looks at. Must not know: connections, telemetry, clocks; state comes in as
arguments and leaves as a `Decision`, so the router, `argosy route` and the simulator get the same answer from the same
code.
Invariant: a policy chooses only among the candidates it is given; randomness comes from the caller.
To add a policy, write its choice and its terms, register them in `POLICIES`, and add its name to
`argosy_protocol.fleet.RoutingPolicy`.

The cost policy: expected seconds until the first token, plus what the choice costs other requests.

    T(w) = wait(w)                                    time lost to load, see `waiting_s`
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
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, NamedTuple

import xxhash

from argosy_router.native.build import first_ranked

Reason = Literal["cached", "predicted", "load", "session", "only", "busy"]
"""Value of the response header `x-argosy-route`."""

MIN_HIT_TOKENS: Final = 16
"""One KV block: the engine reuses nothing shorter, and role names alone must not look like a shared prefix."""


class RouteRequest:
    """The part of a request that routing looks at."""

    def __init__(
        self, prompt_tokens: int, hits: dict[int, int], affinity_hash: int, sequence: int, session: int = 0
    ) -> None:
        self.prompt_tokens = prompt_tokens
        """An estimate: the router has no tokenizer."""
        self.hits = hits
        """position of a candidate -> prompt tokens expected in its cache; absent means none"""
        self.affinity_hash = affinity_hash
        """Hash of the prompt's beginning; equal for prompts that share it."""
        self.sequence = sequence
        """Number of this request at this router, for policies that take turns."""
        self.session = session
        """Hash of the session that the client declared; zero for none."""


class Candidate:
    """A replica that may be chosen, as far as policies look at it.

    Subclasses keep the figures up to date. Every figure has a value; what is not measured is assumed (`assumed`).
    """

    def __init__(
        self, name: str, prefill_tokens_per_s: float, decode_step_s: float, max_num_seqs: int
    ) -> None:
        self.identity = name.encode()
        """Its name in bytes, the same at every router."""
        self.queued_tokens = 0
        """Uncached prompt tokens to be computed before those of a new request."""
        self.requests = 0
        """Requests running or waiting."""
        self.kv_usage = 0.0
        """Share of the KV cache taken by running requests, 0..1."""
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.decode_step_s = decode_step_s
        self.max_num_seqs = max_num_seqs
        self.recent_work = 0.0
        """Seconds of prefill it was sent lately, on a scale shared by all candidates: only ratios matter."""
        self.wait_s = 0.0
        """`waiting_s` of this candidate, updated when the figures change rather than at each decision."""


class Decision:
    """The chosen candidate, by position, and the reason."""

    def __init__(self, position: int, reason: Reason, predicted_tokens: int, cost_s: float) -> None:
        self.position = position
        self.reason = reason
        self.predicted_tokens = predicted_tokens
        self.cost_s = cost_s
        """The chosen candidate's cost in seconds; zero for policies that compute none."""


class Policy(NamedTuple):
    """A policy's choice function, and the function that explains its choices."""

    choose: Callable[[RouteRequest, list[Candidate], random.Random], Decision]
    """Chooses a replica. There is at least one candidate; they are ordered by name."""
    terms: Callable[[RouteRequest, list[Candidate]], list[dict[str, float]]]
    """For each candidate, the named figures that the choice depends on."""


def decide(
    request: RouteRequest, candidates: list[Candidate], position: int, cost_s: float = 0.0
) -> Decision:
    """Build the decision for a position; its reason follows from the predicted hit."""
    hit = request.hits.get(position, 0)
    if len(candidates) == 1:
        return Decision(position, "only", hit, cost_s)
    return Decision(position, "cached" if hit >= MIN_HIT_TOKENS else "load", hit, cost_s)


PRIOR_PREFILL_TOKENS_PER_S = 8000.0
"""A mid-size GPU with an 8B model (SMG's mock worker assumes the same). Only ratios between terms depend on it."""
PRIOR_DECODE_STEP_S = 0.02
"""50 tokens per second per sequence."""
PRIOR_MAX_NUM_SEQS = 256
"""vLLM's usual default."""


class Rates(NamedTuple):
    """A replica's speed. Zero means not measured."""

    prefill_tokens_per_s: float
    decode_step_s: float


PRIOR = Rates(PRIOR_PREFILL_TOKENS_PER_S, PRIOR_DECODE_STEP_S)


def assumed(measured: Iterable[Rates]) -> Rates:
    """Rates to assume for the unmeasured replicas of a service with these measurements."""
    rates = list(measured)
    return Rates(
        _median([rate.prefill_tokens_per_s for rate in rates]) or PRIOR.prefill_tokens_per_s,
        _median([rate.decode_step_s for rate in rates]) or PRIOR.decode_step_s,
    )


def _median(values: list[float]) -> float:
    known = sorted(value for value in values if value > 0.0)
    return known[len(known) // 2] if known else 0.0


EXPECTED_OUTPUT_TOKENS: Final = 64
"""Decode steps that a new request shares with the running ones: half a short answer, as they end meanwhile."""
KV_PRESSURE_S: Final = 0.05
"""At 90 % KV use, where preemption is near, the term is 0.45 s: the price of recomputing a few thousand tokens."""
_MAX_KV: Final = 0.99


def waiting_s(candidate: Candidate) -> float:
    """What a replica's load costs a new request, in seconds, without the request's own prefill.

    wait(w) = queued(w) / prefill_rate(w)                                              prompts queued ahead
            + EXPECTED_OUTPUT_TOKENS * decode_step(w) * requests(w) / max_num_seqs(w)  share of decode slots taken
            + KV_PRESSURE_S * k / (1 - k),  k = kv_usage(w)                            risk of preemption
    """
    kv = candidate.kv_usage
    decode_s = EXPECTED_OUTPUT_TOKENS * candidate.decode_step_s * candidate.requests / candidate.max_num_seqs
    queue = candidate.queued_tokens / candidate.prefill_tokens_per_s + decode_s
    if not kv:
        return queue
    kv = min(kv, _MAX_KV)
    return queue + KV_PRESSURE_S * kv / (1.0 - kv)


def waiting_terms(candidate: Candidate) -> dict[str, float]:
    """The summands of wait(w)."""
    kv = min(candidate.kv_usage, _MAX_KV)
    return {
        "queue_s": candidate.queued_tokens / candidate.prefill_tokens_per_s,
        "decode_s": EXPECTED_OUTPUT_TOKENS
        * candidate.decode_step_s
        * candidate.requests
        / candidate.max_num_seqs,
        "kv_s": KV_PRESSURE_S * kv / (1.0 - kv),
    }


_MASK = (1 << 64) - 1
_xxh3 = xxhash.xxh3_64_intdigest


def favourite(key: int, candidates: list[Candidate], positions: Sequence[int]) -> int:
    """Return the one of `positions` whose candidate the key ranks first, by rendezvous hashing: every router ranks
    replicas for a key alike, and a replica that leaves moves only its own keys."""
    return positions[first_ranked([candidates[position].identity for position in positions], key & _MASK)]


def weights(key: int, candidates: list[Candidate]) -> list[int]:
    """Each candidate's weight for the key; the highest wins."""
    seed = key & _MASK
    return [_xxh3(candidate.identity, seed) for candidate in candidates]


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


def choose_cost(request: RouteRequest, candidates: list[Candidate], rng: random.Random) -> Decision:
    """The cost policy: the candidate with the lowest T, see the module's docstring."""
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


def cost_terms(request: RouteRequest, candidates: list[Candidate]) -> list[dict[str, float]]:
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


LOAD_FACTOR = 1.25
"""The paper's example: a quarter above the mean costs little balance and keeps most keys on their favourite."""


def bound(candidates: list[Candidate]) -> float:
    """Number of requests above which a replica takes no further keys."""
    total = sum([candidate.requests for candidate in candidates])
    return max(1.0, LOAD_FACTOR * total / len(candidates)) + 1.0


def assign(key: int, candidates: list[Candidate]) -> int:
    """Return the position of the candidate that the key is assigned to at the current load: its favourite, unless that
    has clearly more than its share.

        bound = max(1, LOAD_FACTOR * mean(requests)) + 1

    Among the replicas with at most `bound` requests, the one that the key ranks first wins (consistent hashing with
    bounded loads, Mirrokni et al. 2016, over rendezvous hashing instead of a ring). With a bound of a single request or
    less, a quiet fleet would scatter every key; the `+ 1` prevents that.
    """
    limit = bound(candidates)
    return favourite(
        key,
        candidates,
        [position for position, candidate in enumerate(candidates) if candidate.requests <= limit],
    )


def bounded_load_terms(request: RouteRequest, candidates: list[Candidate]) -> list[dict[str, float]]:
    """Each candidate's requests, and the bound."""
    limit = bound(candidates)
    return [{"requests": float(candidate.requests), "bound": limit} for candidate in candidates]


def choose_prefix_hash(request: RouteRequest, candidates: list[Candidate], rng: random.Random) -> Decision:
    """The prefix-hash policy: a hash of the prompt's beginning selects the replica, with bounded loads (`assign`).

    It needs no telemetry. Routers agree while no replica exceeds the bound; beyond it, each goes by its own estimate of
    the replicas' requests, so routers under load may choose differently. Unlike the cost policy it sees neither what is
    cached nor how long prompts are.
    """
    return decide(request, candidates, assign(request.affinity_hash, candidates))


def choose_session(request: RouteRequest, candidates: list[Candidate], rng: random.Random) -> Decision:
    """The session policy: a hash of the session selects the replica, with bounded loads (`assign`).

    The client declares its session in the header `x-session-id`, else as `prompt_cache_key` or `session_id` in the
    body. The cost policy places requests without a session.
    """
    if not request.session:
        return choose_cost(request, candidates, rng)
    decision = decide(request, candidates, assign(request.session, candidates))
    if decision.reason != "only":
        decision.reason = "session"
    return decision


def session_terms(request: RouteRequest, candidates: list[Candidate]) -> list[dict[str, float]]:
    """Each candidate's requests, and the bound; without a session, the cost policy's terms."""
    return bounded_load_terms(request, candidates) if request.session else cost_terms(request, candidates)


def choose_least_load(request: RouteRequest, candidates: list[Candidate], rng: random.Random) -> Decision:
    """The least-load policy: lowest time until the queue is worked off; it ignores caches.

        T(w) = queued(w) / prefill_rate(w) + decode_step(w) * requests(w)

    The lowest T wins; ties are drawn at random. It is the baseline that the cost policy must never fall behind.
    """
    costs = [
        candidate.queued_tokens / candidate.prefill_tokens_per_s
        + candidate.requests * candidate.decode_step_s
        for candidate in candidates
    ]
    best = min(costs)
    close = [position for position, value in enumerate(costs) if value == best]
    return decide(request, candidates, close[int(rng.random() * len(close))], best)


def least_load_terms(request: RouteRequest, candidates: list[Candidate]) -> list[dict[str, float]]:
    """The summands of T."""
    return [
        {
            "queue_s": candidate.queued_tokens / candidate.prefill_tokens_per_s,
            "decode_s": candidate.requests * candidate.decode_step_s,
        }
        for candidate in candidates
    ]


def choose_power_of_two(request: RouteRequest, candidates: list[Candidate], rng: random.Random) -> Decision:
    """The power-of-two-choices policy: of two replicas drawn at random, the one with the shorter wait (`waiting_s`).

    Two choices reduce the longest queue from log n to log log n (Mitzenmacher 2001), and routers that decide on stale
    figures do not all pick the same replica. It ignores caches.
    """
    count = len(candidates)
    if count == 1:
        return decide(request, candidates, 0)
    first = int(rng.random() * count)
    second = (first + 1 + int(rng.random() * (count - 1))) % count
    chosen = first if candidates[first].wait_s <= candidates[second].wait_s else second
    return decide(request, candidates, chosen, candidates[chosen].wait_s)


def power_of_two_terms(request: RouteRequest, candidates: list[Candidate]) -> list[dict[str, float]]:
    """The summands of the wait."""
    return [waiting_terms(candidate) for candidate in candidates]


def choose_round_robin(request: RouteRequest, candidates: list[Candidate], rng: random.Random) -> Decision:
    """The round-robin policy: replicas take turns in the order of their names."""
    return decide(request, candidates, request.sequence % len(candidates))


def round_robin_terms(request: RouteRequest, candidates: list[Candidate]) -> list[dict[str, float]]:
    """Turns until each candidate is next."""
    count = len(candidates)
    return [{"turns_until": float((position - request.sequence) % count)} for position in range(count)]


def choose_random(request: RouteRequest, candidates: list[Candidate], rng: random.Random) -> Decision:
    """The random policy: every replica is as likely as any other. A baseline."""
    return decide(request, candidates, int(rng.random() * len(candidates)))


def random_terms(request: RouteRequest, candidates: list[Candidate]) -> list[dict[str, float]]:
    """The probability of each candidate."""
    return [{"chance": 1.0 / len(candidates)} for _ in candidates]


POLICIES: dict[str, Policy] = {
    "cost": Policy(choose_cost, cost_terms),
    "least-load": Policy(choose_least_load, least_load_terms),
    "prefix-hash": Policy(choose_prefix_hash, bounded_load_terms),
    "session": Policy(choose_session, session_terms),
    "round-robin": Policy(choose_round_robin, round_robin_terms),
    "random": Policy(choose_random, random_terms),
    "power-of-two": Policy(choose_power_of_two, power_of_two_terms),
}
