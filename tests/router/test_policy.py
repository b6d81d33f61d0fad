"""Routing policies as tables."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from argosy_router.policy import (
    COLD_SLACK,
    POLICIES,
    PRIOR,
    Candidate,
    Decision,
    Rates,
    RouteRequest,
    assumed,
    bound,
    cost,
    favourite,
    waiting_s,
    weights,
)


def candidate(
    number: int,
    queued_tokens: int = 0,
    requests: int = 0,
    kv_usage: float = 0.0,
    prefill_tokens_per_s: float = 1000.0,
    decode_step_s: float = 0.01,
    recent_work: float = 0.0,
) -> Candidate:
    """A candidate by its figures."""
    made = Candidate(f"r{number}", prefill_tokens_per_s, decode_step_s, 64)
    made.queued_tokens = queued_tokens
    made.requests = requests
    made.kv_usage = kv_usage
    made.recent_work = recent_work
    made.wait_s = waiting_s(made)
    return made


def choose(policy: str, request: RouteRequest, fleet: list[Candidate], seed: int = 0) -> Decision:
    for one in fleet:
        one.wait_s = waiting_s(one)  # its figures may have changed
    return POLICIES[policy].choose(request, fleet, random.Random(seed))


def outcome(decision: Decision) -> tuple[int, str, int, float]:
    return decision.position, decision.reason, decision.predicted_tokens, decision.cost_s


def request(
    tokens: int = 1000,
    hits: dict[int, int] | None = None,
    key: int = 1,
    sequence: int = 0,
    session: int = 0,
) -> RouteRequest:
    return RouteRequest(tokens, hits or {}, key, sequence, session)


COST_TABLE = {
    "the holder of the prefix wins": ([candidate(0), candidate(1)], {1: 900}, 1, "cached"),
    "the longer prefix wins": ([candidate(0), candidate(1)], {0: 400, 1: 900}, 1, "cached"),
    "a busy holder loses when waiting costs more than computing": (
        [candidate(0), candidate(1, queued_tokens=2000)],
        {1: 900},
        0,
        "load",
    ),
    "a little queue does not move a prefix": (
        [candidate(0), candidate(1, queued_tokens=500)],
        {1: 900},
        1,
        "cached",
    ),
    "one idle replica in a busy fleet does not move a prefix": (
        [candidate(0, queued_tokens=2500), candidate(1), candidate(2, 1000), candidate(3, 1000)],
        {0: 900},
        0,
        "cached",
    ),
    "the holder's own queue is no reason to stay": (
        [candidate(0, queued_tokens=2500), candidate(1), candidate(2, 0), candidate(3, 0)],
        {0: 900, 1: 20},
        1,
        "cached",
    ),
    "stickiness decides a draw": ([candidate(0), candidate(1, queued_tokens=900)], {1: 900}, 1, "cached"),
    "a fast replica makes up for a missing prefix": (
        [candidate(0, prefill_tokens_per_s=100_000.0), candidate(1)],
        {1: 500},
        0,
        "load",
    ),
    "decode slots taken count": (
        [candidate(0, requests=64), candidate(1, requests=1)],
        {0: 100, 1: 100},
        1,
        "cached",
    ),
    "KV pressure counts": (
        [candidate(0, kv_usage=0.97), candidate(1, kv_usage=0.2)],
        {0: 100, 1: 100},
        1,
        "cached",
    ),
    "a full KV cache is finite": (
        [candidate(0, kv_usage=1.0), candidate(1, queued_tokens=1000)],
        {0: 20, 1: 20},
        1,
        "cached",
    ),
    "hits below a block are no hits": ([candidate(0, queued_tokens=5000), candidate(1)], {0: 5}, 1, "load"),
    "one candidate": ([candidate(3)], {0: 7}, 0, "only"),
}


@pytest.mark.parametrize("name", COST_TABLE)
def test_cost(name: str) -> None:
    candidates, hits, expected, reason = COST_TABLE[name]
    for seed in range(5):
        decision = choose("cost", request(hits=hits), candidates, seed)
        assert (decision.position, decision.reason) == (expected, reason)
        assert decision.predicted_tokens == hits.get(expected, 0)


def test_cost_is_seconds() -> None:
    (seconds,) = cost(request(tokens=1000), [candidate(0, queued_tokens=3000)])
    assert seconds == pytest.approx(4.0)


def test_unmeasured_replicas_get_the_fleet_median_then_the_prior() -> None:
    unknown = Rates(0.0, 0.0)
    assert assumed([Rates(10.0, 0.3), Rates(500.0, 0.0), Rates(1000.0, 0.1), unknown]) == (500.0, 0.3)
    assert assumed([unknown, unknown]) == PRIOR


def test_equal_holders_share() -> None:
    fleet = [candidate(number) for number in range(4)]
    hits = dict.fromkeys(range(4), 900)
    rng = random.Random(0)
    counts = Counter(POLICIES["cost"].choose(request(hits=hits), fleet, rng).position for _ in range(400))
    assert min(counts.values()) > 60


@pytest.mark.parametrize("policy", ["cost", "prefix-hash"])
def test_cold_prefixes_spread_and_routers_agree(policy: str) -> None:
    """llm-d#1290, #1892: routers that share nothing must not scatter a prefix over their favourites."""
    fleet = [candidate(number) for number in range(4)]
    shuffled = [fleet[2], fleet[0], fleet[3], fleet[1]]
    counts: Counter[bytes] = Counter()
    for key in range(400):
        asked = request(key=key * 0x9E3779B97F4A7C15)
        ours = fleet[choose(policy, asked, fleet, 1).position]
        assert shuffled[choose(policy, asked, shuffled, 2).position] is ours
        counts[ours.identity] += 1
    assert min(counts.values()) > 60


def test_cold_prefixes_pass_over_a_loaded_favourite() -> None:
    fleet = [candidate(number) for number in range(4)]
    first, second = sorted(range(4), key=weights(1, fleet).__getitem__, reverse=True)[:2]
    fleet[first].queued_tokens = int(1000 * (COLD_SLACK - 1)) + 10
    assert choose("cost", request(), fleet).position == second
    fleet[first].queued_tokens = int(1000 * (COLD_SLACK - 1)) - 10
    assert choose("cost", request(), fleet).position == first


def test_cold_prefixes_pass_over_a_favourite_that_was_sent_more_than_its_share() -> None:
    fleet = [candidate(number, recent_work=4.0) for number in range(4)]
    first, second = sorted(range(4), key=weights(1, fleet).__getitem__, reverse=True)[:2]
    fleet[first].recent_work = 6.0
    assert choose("cost", request(), fleet).position == second
    fleet[first].recent_work = 5.0
    assert choose("cost", request(), fleet).position == first
    for other in fleet:
        other.queued_tokens = 5000
    fleet[first].queued_tokens, fleet[first].recent_work = 0, 6.0
    assert choose("cost", request(), fleet).position == first, "waiting counts first"


def test_replicas_that_were_slow_once_get_their_share_of_cold_prefixes() -> None:
    """Or their speed would never be measured again while the fleet is at rest."""
    fleet = [
        candidate(0, prefill_tokens_per_s=3000.0),
        candidate(1),
        candidate(2, prefill_tokens_per_s=500.0),
    ]
    for key in range(60):
        position = choose("cost", request(key=key), fleet).position
        fleet[position].recent_work += 1000 / fleet[position].prefill_tokens_per_s
    assert fleet[2].recent_work == 0.0, "six times slower"
    assert fleet[0].recent_work > 0.5 * fleet[1].recent_work > 0.0
    fleet[1].queued_tokens = 1000
    assert all(choose("cost", request(key=key), fleet).position == 0 for key in range(20))


def test_a_prefix_that_all_prompts_share_does_not_gather_them() -> None:
    """Chats begin with the same template: a twentieth of the prompt saved is no reason for all to share one cache."""
    fleet = [candidate(number) for number in range(4)]
    chosen = {choose("cost", request(hits={0: 50}, key=key), fleet).position for key in range(40)}
    assert chosen == {0, 1, 2, 3}
    chosen = {choose("cost", request(hits={0: 200}, key=key), fleet).position for key in range(40)}
    assert chosen == {0}


def test_a_departed_replica_moves_only_its_own_keys() -> None:
    fleet = [candidate(number) for number in range(5)]
    for key in range(200):
        home = fleet[favourite(key, fleet, range(5))]
        rest = fleet[:4]
        if home is not fleet[4]:
            assert rest[favourite(key, rest, range(4))] is home


def test_a_hot_prefix_gets_a_second_home_when_its_holder_saturates() -> None:
    """production-stack#990, GIE#2823: a prefix that never leaves its first replica makes a hotspot."""
    fleet = [candidate(number) for number in range(3)]
    hits = {0: 900}
    homes = set()
    for _ in range(40):
        decision = choose("cost", request(hits=hits), fleet)
        fleet[decision.position].queued_tokens += 1000 - decision.predicted_tokens
        fleet[decision.position].requests += 1
        hits[decision.position] = 900
        homes.add(decision.position)
    assert homes == {0, 1, 2}
    queues = [fake.queued_tokens for fake in fleet]
    assert max(queues) - min(queues) < 2000


def test_affinity_does_not_pile_onto_a_slow_replica() -> None:
    """sglang#14305: the more a slow worker queues, the less its cache is worth."""
    slow, *others = fleet = [candidate(0, prefill_tokens_per_s=100.0), candidate(1), candidate(2)]
    hits = {0: 900}
    for number in range(30):
        decision = choose("cost", request(hits=hits), fleet, number)
        fleet[decision.position].queued_tokens += 1000 - decision.predicted_tokens
        hits[decision.position] = 900
    assert slow.queued_tokens / slow.prefill_tokens_per_s < 2 * max(
        fake.queued_tokens / fake.prefill_tokens_per_s for fake in others
    )


def test_low_concurrency_does_not_go_to_one_replica() -> None:
    """sglang#32983: an idle fleet with unrelated prompts is used as a whole."""
    fleet = [candidate(number) for number in range(4)]
    chosen = {choose("cost", request(key=key * 0x9E3779B97F4A7C15), fleet).position for key in range(50)}
    assert chosen == {0, 1, 2, 3}


def test_the_bound_of_hashing_is_meaningful_at_low_load() -> None:
    """kubeai#519: with many replicas and few requests a bound below one request scatters every key."""
    fleet = [candidate(number) for number in range(200)]
    home = choose("prefix-hash", request(), fleet).position
    fleet[home].requests = 2
    assert bound(fleet) >= 2
    assert choose("prefix-hash", request(), fleet).position == home
    fleet[home].requests = 3
    assert choose("prefix-hash", request(), fleet).position != home


def test_sessions_stay_and_move_when_their_replica_has_more_than_its_share() -> None:
    fleet = [candidate(number, requests=4) for number in range(4)]
    homes = {session: choose("session", request(session=session), fleet) for session in range(1, 60)}
    assert {decision.reason for decision in homes.values()} == {"session"}
    assert {decision.position for decision in homes.values()} == {0, 1, 2, 3}
    fleet[homes[1].position].requests = 40
    for session, before in homes.items():
        after = choose("session", request(session=session), fleet, seed=session)
        if before.position == homes[1].position:
            assert after.position != before.position
        else:
            assert after.position == before.position


def test_without_a_session_prefixes_decide() -> None:
    fleet = [candidate(0), candidate(1)]
    by_session, by_cost = (choose(policy, request(hits={1: 900}), fleet) for policy in ("session", "cost"))
    assert outcome(by_session) == outcome(by_cost)


def test_least_load_ignores_prefixes_and_shares_ties() -> None:
    fleet = [candidate(0, queued_tokens=10), candidate(1, requests=3), candidate(2), candidate(3)]
    decisions = [choose("least-load", request(hits={0: 900}), fleet, seed) for seed in range(50)]
    assert {decision.position for decision in decisions} == {2, 3}
    assert {decision.reason for decision in decisions} == {"load"}


def test_round_robin_takes_turns() -> None:
    fleet = [candidate(0), candidate(1), candidate(2)]
    turns = [choose("round-robin", request(sequence=number), fleet) for number in range(6)]
    assert [turn.position for turn in turns] == [0, 1, 2] * 2


def test_random_is_uniform() -> None:
    fleet = [candidate(number) for number in range(4)]
    rng = random.Random(0)
    counts = Counter(POLICIES["random"].choose(request(), fleet, rng).position for _ in range(800))
    assert sorted(counts) == [0, 1, 2, 3]
    assert min(counts.values()) > 140


def test_power_of_two_takes_the_better_of_two_different_ones() -> None:
    fleet = [candidate(0, queued_tokens=9000), candidate(1, queued_tokens=100), candidate(2)]
    rng = random.Random(0)
    counts = Counter(POLICIES["power-of-two"].choose(request(), fleet, rng).position for _ in range(300))
    assert counts[0] == 0, "the worst never wins a pair"
    assert counts[2] > counts[1] > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_pure_chooses_a_candidate_and_explains_itself(policy: str) -> None:
    for count in (1, 2, 5):
        fleet = [candidate(n, queued_tokens=n * 10, requests=n, kv_usage=0.1 * n) for n in range(count)]
        asked = request(hits={0: 500}, session=7, sequence=3)
        decision = choose(policy, asked, fleet, 5)
        assert outcome(decision) == outcome(choose(policy, asked, fleet, 5))
        assert 0 <= decision.position < count
        assert (decision.reason == "only") == (count == 1)
        assert len(POLICIES[policy].terms(asked, fleet)) == count


@pytest.mark.parametrize("policy", ["cost", "least-load", "power-of-two"])
def test_terms_add_up_to_the_cost(policy: str) -> None:
    fleet = [candidate(n, queued_tokens=n * 700, requests=n, kv_usage=0.3 * n) for n in range(3)]
    asked = request(hits={1: 400, 2: 2000})
    decision = choose(policy, asked, fleet, 1)
    rows = POLICIES[policy].terms(asked, fleet)
    assert sum(rows[decision.position].values()) == pytest.approx(decision.cost_s)
    if policy == "cost":
        assert [sum(row.values()) for row in rows] == pytest.approx(cost(asked, fleet))
