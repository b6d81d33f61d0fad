"""Traces and their replay: the simulator uses the router's own policies, and they differ as expected."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from argosy.commands.bench_router import main as bench_router
from argosy.errors import UsageError
from argosy_router.fleet.replica import Replica
from argosy_router.observability.lines import TraceError, TraceRequest, read_trace, write_trace
from argosy_router.policy import POLICIES
from argosy_router.prefixes import Prompt
from argosy_router.simulation import (
    EngineModel,
    Job,
    PolicyResult,
    SimulatedEngine,
    SimulatedRouter,
    Simulation,
    at_speed,
    oracle_tokens,
    percentile,
    result_of,
    synthetic_trace,
)

FAST = EngineModel(prefill_tokens_per_s=8000.0)


def replay(
    requests: list[TraceRequest], policy: str, replicas: int = 4, routers: int = 1, model: EngineModel = FAST
) -> PolicyResult:
    outcome = Simulation(requests, policy, replicas, model, routers=routers).run()
    assert len(outcome.ttft_s) == len(requests), "every request is served once"
    assert outcome.prompt_tokens == sum(request.input_tokens for request in requests)
    return result_of(outcome, oracle_tokens(requests))


# traces


def test_a_trace_survives_a_file(tmp_path: Path) -> None:
    trace = synthetic_trace(200, 10.0)
    write_trace(tmp_path / "trace.jsonl", trace)
    again = read_trace(tmp_path / "trace.jsonl")
    start = trace[0].arrival_s
    assert [request[1:] for request in again] == [request[1:] for request in trace]
    assert [request.arrival_s for request in again] == pytest.approx([r.arrival_s - start for r in trace])


def test_mooncake_lines(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.jsonl"
    file.write_text(
        '{"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}\n\n'
        '{"timestamp": 1000, "input_length": 512, "output_length": 0, "hash_ids": [1], "extra": 1}\n'
    )
    first, second = read_trace(file)
    assert first == TraceRequest(0.0, 512, 0, (1,), (512,))
    assert second == TraceRequest(2.0, 1100, 5, (1, 2, 3), (512, 1024, 1100))
    assert oracle_tokens([first, second]) == 512
    assert oracle_tokens([first, first]) == 511, "the last token is always computed"
    assert at_speed([second], 4.0)[0].arrival_s == 0.5


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"timestamp": 1, "input_length": 0, "output_length": 1}',
        '{"timestamp": -1, "input_length": 1, "output_length": 1}',
        '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}',
        '{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": [1, 2], "token_ends": [5]}',
        '{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": [1, 2], "token_ends": [5, 3]}',
        "",
    ],
)
def test_an_invalid_trace_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "bad.jsonl"
    good = '{"timestamp": 1, "input_length": 1, "output_length": 1}\n' if line else ""
    file.write_text(good + line)
    with pytest.raises(TraceError, match=r":2: " if line else "no requests"):
        read_trace(file)
    with pytest.raises(UsageError):
        bench_router(["--replay", str(file)])


def test_the_synthetic_trace_is_what_it_says() -> None:
    trace = synthetic_trace(3000, 10.0)
    assert trace == synthetic_trace(3000, 10.0)
    assert trace != synthetic_trace(3000, 10.0, seed=1)
    assert trace == sorted(trace, key=lambda request: request.arrival_s)
    for part in (trace[:1000], trace[2000:]):
        assert len(part) / (part[-1].arrival_s - part[0].arrival_s) == pytest.approx(10.0, rel=0.3)
    for request in trace:
        assert len(request.blocks) == len(request.ends)
        assert request.ends[-1] <= request.input_tokens
    share = oracle_tokens(trace) / sum(request.input_tokens for request in trace)
    assert 0.5 < share < 0.95


# engines


def run_engine(model: EngineModel, requests: list[TraceRequest]) -> list[tuple[float, int]]:
    """First token and cached tokens of requests sent to one engine."""
    import heapq

    events: list[tuple[float, int, object]] = []
    done: list[tuple[float, int]] = []

    def schedule(when: float, event: object) -> None:
        heapq.heappush(events, (when, len(done) + len(events) * 1000 + id(event) % 1000, event))

    engine = SimulatedEngine(model, schedule, lambda change: None)
    for request in requests:
        job = Job(request, lambda job, now: done.append((now, job.cached_tokens)), lambda job, now: None)
        engine.submit(job, request.arrival_s)
        while events:
            now, _, event = heapq.heappop(events)
            event(now)  # type: ignore[operator]
    assert engine.running == engine.waiting == engine.queued_tokens == 0
    return done


def test_an_engine_computes_only_what_it_does_not_hold() -> None:
    model = EngineModel(
        prefill_tokens_per_s=1000.0, decode_step_s=0.01, decode_step_per_seq_s=0.0, kv_cache_tokens=1000
    )
    a = TraceRequest(0.0, 500, 1, (1, 2), (256, 500))
    b = TraceRequest(0.0, 600, 1, (1, 9), (256, 600))
    done = run_engine(model, [a, a, b])
    assert done == [
        (pytest.approx(0.51), 0),
        (pytest.approx(0.011), 499),
        (pytest.approx(0.354), 256),
    ]
    c = TraceRequest(0.0, 900, 1, (5, 6), (450, 900))
    assert [cached for _, cached in run_engine(model, [a, c, a])] == [0, 0, 0], "the cache is bounded"


def test_requests_share_blocks_of_the_cache_and_keep_them_while_they_run() -> None:
    events: list[tuple[float, object]] = []
    removed: list[int] = []
    model = EngineModel(kv_cache_tokens=1000)
    engine = SimulatedEngine(
        model, lambda when, event: events.append((when, event)), lambda change: removed.extend(change.removed)
    )

    def step() -> None:
        events.sort(key=lambda entry: entry[0])
        now, event = events.pop(0)
        event(now)  # type: ignore[operator]

    def submit(request: TraceRequest) -> None:
        engine.submit(Job(request, lambda job, now: None, lambda job, now: None), 0.0)

    long = TraceRequest(0.0, 400, 100, (1, 2), (300, 400))
    submit(long)
    submit(long._replace(output_tokens=50, blocks=(1, 3)))
    for _ in range(3):  # prefill and first token of the one, prefill of the other
        step()
    assert engine.running == 2
    assert engine.running_tokens == (400 + 100) + (100 + 50), "the first block counts once"
    submit(TraceRequest(0.0, 600, 1, (7,), (600,)))
    assert engine.waiting == 1, "it waits for room, not for a seat"
    while events:
        step()
    assert engine.running == engine.waiting == engine.running_tokens == 0
    assert removed == [2], "what was used longest ago leaves, its beginning last"


# replays


def test_an_idle_fleet_shares_prefixes_evenly() -> None:
    """Nothing waits anywhere, so nothing but what was sent before tells where a new prefix should live."""
    for seed in range(5):
        prefixes = [TraceRequest(5.0 * n, 2000, 8, (n * 10 + seed,), (2000,)) for n in range(12)]
        busy = Simulation(prefixes, "cost", 4, FAST).run().busy_s
        assert max(busy) <= (12 / 4 + 1) * 2000 / FAST.prefill_tokens_per_s


def test_a_fleet_that_is_behind_keeps_prefixes_where_they_are() -> None:
    """Under overload every prefix computed twice delays all that wait; greed for one's own first token pays twice."""
    trace = synthetic_trace(900, 40.0)
    cost, hashed = replay(trace, "cost"), replay(trace, "prefix-hash")
    assert cost.ttft_p50_s > 2.0, "an overload"
    assert cost.cached_share >= 0.9 * cost.oracle_share
    assert cost.ttft_mean_s <= hashed.ttft_mean_s


@pytest.mark.parametrize("rate", [40.0, 55.0])
def test_shared_prefixes_are_rarely_computed_twice_under_load(rate: float) -> None:
    """Ten prefixes over four engines that hold three or four each, at 65 and 90 % of what they can compute: a copy that
    one impatient request makes drives another prefix out."""
    model = EngineModel(kv_cache_tokens=12_288)
    shares, patient, greedy = [], [], []
    for seed in range(5):
        trace = shared_prefixes(rate, 600, seed)
        oracle = oracle_tokens(trace)
        cost = result_of(Simulation(trace, "cost", 4, model, seed=seed).run(), oracle)
        fixed = result_of(Simulation(trace, "prefix-hash", 4, model, seed=seed).run(), oracle)
        shares.append(cost.cached_share / cost.oracle_share)
        patient.append(cost.ttft_p90_s)
        greedy.append(fixed.ttft_p90_s)
    assert sum(shares) / len(shares) >= 0.985
    assert sum(patient) <= 0.8 * sum(greedy)


def shared_prefixes(rate_per_s: float, count: int, seed: int) -> list[TraceRequest]:
    """Questions of 512 tokens behind one of ten prefixes of 2048, after each prefix was asked for twice."""
    rng = random.Random(seed)
    requests = []
    now = 0.0
    for number in range(20 + count):
        is_warming = number < 20
        now = number * 0.5 if is_warming else now + rng.expovariate(rate_per_s)
        prefix = number % 10 if is_warming else rng.randrange(10)
        blocks = (*(100 * prefix + block for block in range(8)), 10_000 + 2 * number, 10_001 + 2 * number)
        requests.append(TraceRequest(now, 2560, 32, blocks, tuple(range(256, 2561, 256))))
    return requests


def test_one_hot_prefix_is_spread_over_the_fleet() -> None:
    """GIE#2823: nothing but one system prompt must not mean one replica."""
    trace = synthetic_trace(800, 60.0, groups=1, turns=1.0)
    cost, load = replay(trace, "cost"), replay(trace, "least-load")
    assert cost.imbalance < 1.3
    assert cost.ttft_p90_s <= 1.2 * load.ttft_p90_s


@pytest.mark.parametrize("rate", [3.0, 20.0])
def test_cost_finds_what_an_oracle_would_and_is_never_behind_load_alone(rate: float) -> None:
    trace = synthetic_trace(800, rate)
    cost, load, turns = (replay(trace, policy) for policy in ("cost", "least-load", "round-robin"))
    assert cost.cached_share >= 0.95 * cost.oracle_share
    assert cost.ttft_p90_s <= (0.5 if rate > 10.0 else 1.0) * turns.ttft_p90_s
    assert cost.ttft_p90_s <= load.ttft_p90_s
    assert cost.ttft_mean_s <= load.ttft_mean_s


def test_routers_that_share_nothing_agree() -> None:
    """llm-d#1290, #1892, #1946, production-stack#166: the hit rate must not fall with each router."""
    trace = synthetic_trace(800, 12.0)
    alone, three = replay(trace, "cost"), replay(trace, "cost", routers=3)
    assert three.cached_share >= 0.97 * alone.cached_share
    assert three.ttft_p90_s <= 1.5 * alone.ttft_p90_s


def test_work_sent_long_ago_fades() -> None:
    service = SimulatedRouter(["a", "b"], FAST, 1000).service
    a, b = service.replicas["a"], service.replicas["b"]
    prompt = Prompt((1,), 1, 0, 1000, chunk_tokens=(1000,))
    rng = random.Random(0)

    def send(to: Replica, now: float) -> None:
        choice = service.choose(prompt, now, rng)
        choice.replica, choice.uncached_tokens = to, 1000
        service.dispatched(choice, prompt, now)

    send(a, 0.0)
    for second in range(4):
        send(b, float(second))
    assert 3.9 < b.load.recent_work / a.load.recent_work < 4.2
    for hours in (1, 24, 24 * 365):
        send(a, 3600.0 * hours)
        assert a.load.recent_work > 1000.0 * b.load.recent_work
        send(b, 3600.0 * hours)
        assert b.load.recent_work == pytest.approx(a.load.recent_work)


def test_a_slow_replica_is_not_buried() -> None:
    """sglang#14305: affinity must not pile requests onto a replica that falls behind."""
    trace = synthetic_trace(600, 12.0)
    slow = EngineModel(prefill_tokens_per_s=1500.0)
    outcome = Simulation(trace, "cost", 4, [FAST, FAST, FAST, slow]).run()
    mixed = result_of(outcome, oracle_tokens(trace))
    turns = result_of(Simulation(trace, "round-robin", 4, [FAST, FAST, FAST, slow]).run(), 1)
    assert mixed.ttft_p99_s < 0.5 * turns.ttft_p99_s
    assert outcome.busy_s[3] / outcome.makespan_s < 0.9


def test_predictions_come_true_where_the_model_is_simple() -> None:
    trace = synthetic_trace(800, 6.0)
    result = replay(trace, "cost")
    assert result.predicted_share == pytest.approx(result.cached_share, abs=0.02)
    assert result.ttft_error_mean_s < 0.25 * result.ttft_mean_s


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_every_request_and_replays_alike(policy: str) -> None:
    trace = synthetic_trace(150, 30.0)
    assert replay(trace, policy, replicas=16) == replay(trace, policy, replicas=16)


def test_percentiles() -> None:
    assert [percentile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.5, 0.9, 1.0)] == [1.0, 3.0, 4.0, 4.0]


def test_the_command_prints_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    arguments = ["--requests", "60", "--policy", "cost", "--policy", "round-robin", "--replicas", "2"]
    assert bench_router([*arguments, "--write-trace", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["POLICY", "cost", "round-robin"]
    assert bench_router(["--replay", str(file), *arguments, "-o", "json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [result["policy"] for result in results] == ["cost", "round-robin"]
    assert bench_router(["--replay", str(file), *arguments]) == 0
    assert f"  {results[0]['cached_share']:.1%}  " in capsys.readouterr().out
    for wrong in (["--replicas", "513"], ["--speed", "0"], ["--policy", "best"]):
        with pytest.raises(UsageError):
            bench_router(wrong)
