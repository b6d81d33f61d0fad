"""The policies as tables."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from argosy_router.policy import POLICIES, RouteRequest
from argosy_router.policy.cost import COLD_SLACK, cost
from argosy_router.policy.rates import PRIOR_PREFILL_TOKENS_PER_S
from argosy_router.policy.rendezvous import ranked


@dataclass
class Fake:
    """A candidate by its figures."""

    slot: int
    queued_tokens: int = 0
    requests: int = 0
    kv_usage: float = 0.0
    prefill_tokens_per_s: float = 1000.0
    decode_step_s: float = 0.01
    max_num_seqs: int = 64

    @property
    def name(self) -> str:
        return f"r{self.slot}"


def request(
    tokens: int = 1000, hits: dict[int, int] | None = None, key: int = 1, sequence: int = 0
) -> RouteRequest:
    return RouteRequest(tokens, hits or {}, key, sequence)


COST_TABLE = {
    "the holder of the prefix wins": ([Fake(0), Fake(1)], {1: 900}, 1, "cached"),
    "the longer prefix wins": ([Fake(0), Fake(1)], {0: 400, 1: 900}, 1, "cached"),
    "a busy holder loses when waiting costs more than computing": (
        [Fake(0), Fake(1, queued_tokens=2000)],
        {1: 900},
        0,
        "load",
    ),
    "a little queue does not move a prefix": ([Fake(0), Fake(1, queued_tokens=500)], {1: 900}, 1, "cached"),
    "stickiness decides a draw": ([Fake(0), Fake(1, queued_tokens=900)], {1: 900}, 1, "cached"),
    "a fast replica makes up for a missing prefix": (
        [Fake(0, prefill_tokens_per_s=100_000.0), Fake(1)],
        {1: 500},
        0,
        "load",
    ),
    "decode slots taken count": ([Fake(0, requests=64), Fake(1, requests=1)], {0: 100, 1: 100}, 1, "cached"),
    "KV pressure counts": ([Fake(0, kv_usage=0.97), Fake(1, kv_usage=0.2)], {0: 100, 1: 100}, 1, "cached"),
    "a full KV cache is finite": (
        [Fake(0, kv_usage=1.0), Fake(1, queued_tokens=1000)],
        {0: 20, 1: 20},
        1,
        "cached",
    ),
    "hits below a block are no hits": ([Fake(0, queued_tokens=5000), Fake(1)], {0: 5}, 1, "load"),
    "one candidate": ([Fake(3)], {3: 7}, 0, "only"),
}


@pytest.mark.parametrize("name", COST_TABLE)
def test_cost(name: str) -> None:
    candidates, hits, expected, reason = COST_TABLE[name]
    for seed in range(5):
        decision = POLICIES["cost"](request(hits=hits), candidates, random.Random(seed))
        assert (decision.position, decision.reason) == (expected, reason)
        assert decision.predicted_tokens == hits.get(candidates[expected].slot, 0)


def test_cost_is_seconds() -> None:
    (seconds,) = cost(request(tokens=1000), [Fake(0, queued_tokens=3000)])
    assert seconds == pytest.approx(4.0)


def test_unmeasured_replicas_get_the_fleet_median_then_the_prior() -> None:
    fresh = Fake(9, prefill_tokens_per_s=0.0)
    fleet = [Fake(0, prefill_tokens_per_s=10.0), Fake(1, prefill_tokens_per_s=500.0), Fake(2), fresh]
    assert cost(request(), fleet)[3] == pytest.approx(1000 / 500)
    assert cost(request(), [fresh])[0] == pytest.approx(1000 / PRIOR_PREFILL_TOKENS_PER_S)


def test_equal_holders_share() -> None:
    fleet = [Fake(slot) for slot in range(4)]
    hits = dict.fromkeys(range(4), 900)
    rng = random.Random(0)
    counts = Counter(POLICIES["cost"](request(hits=hits), fleet, rng).position for _ in range(400))
    assert min(counts.values()) > 60


def test_cold_prefixes_spread_and_routers_agree() -> None:
    fleet = [Fake(slot) for slot in range(4)]
    shuffled = [fleet[2], fleet[0], fleet[3], fleet[1]]
    counts: Counter[str] = Counter()
    for key in range(400):
        ours = POLICIES["cost"](request(key=key * 0x9E3779B97F4A7C15), fleet, random.Random(1))
        theirs = POLICIES["cost"](request(key=key * 0x9E3779B97F4A7C15), shuffled, random.Random(2))
        assert fleet[ours.position].name == shuffled[theirs.position].name
        counts[fleet[ours.position].name] += 1
    assert min(counts.values()) > 60


def test_cold_prefixes_pass_over_a_loaded_favourite() -> None:
    fleet = [Fake(slot) for slot in range(4)]
    first, second, *_ = ranked(1, fleet)
    fleet[first].queued_tokens = int(1000 * (COLD_SLACK - 1)) + 10
    assert POLICIES["cost"](request(), fleet, random.Random(0)).position == second
    fleet[first].queued_tokens = int(1000 * (COLD_SLACK - 1)) - 10
    assert POLICIES["cost"](request(), fleet, random.Random(0)).position == first


def test_a_departed_replica_moves_only_its_own_keys() -> None:
    fleet = [Fake(slot) for slot in range(5)]
    for key in range(200):
        favourite = fleet[ranked(key, fleet)[0]]
        rest = [candidate for candidate in fleet if candidate is not fleet[4]]
        if favourite is not fleet[4]:
            assert rest[ranked(key, rest)[0]] is favourite


def test_least_load_ignores_prefixes_and_shares_ties() -> None:
    fleet = [Fake(0, queued_tokens=10), Fake(1, requests=3), Fake(2), Fake(3)]
    rng = random.Random(0)
    decisions = [POLICIES["least-load"](request(hits={0: 900}), fleet, rng) for _ in range(50)]
    assert {decision.position for decision in decisions} == {2, 3}
    assert {decision.reason for decision in decisions} == {"load"}


def test_round_robin_takes_turns_by_name() -> None:
    fleet = [Fake(2), Fake(0), Fake(1)]
    turns = [POLICIES["round-robin"](request(sequence=n), fleet, random.Random(0)) for n in range(6)]
    assert [fleet[turn.position].name for turn in turns] == ["r0", "r1", "r2"] * 2
