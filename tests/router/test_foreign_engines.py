"""Replicas of other engines (vLLM, SGLang), seen through `/metrics` and `/health`."""

from __future__ import annotations

import asyncio

import pytest

from argosy_router.fleet import foreign_engines
from argosy_router.fleet.foreign_engines import parse_load
from argosy_router.fleet.replica import ReplicaLoad
from argosy_router.prefixes import HISTORY_S, PrefixIndex, ReplicaPrefixes

from .engine_expositions import EXPOSITIONS, SGLANG, vllm
from .fake_engine import DONE, Connection, FakeEngine, Received, event
from .harness import DEADLINE_S, Rig, StoppedClock, chat, rig

PROMPT = "The quick brown fox jumps over the lazy dog. " * 60


@pytest.fixture(autouse=True)
def polls_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_engines, "POLL_INTERVAL_S", 0.005)


@pytest.mark.parametrize("name", EXPOSITIONS)
def test_expositions(name: str) -> None:
    exposition, expected = EXPOSITIONS[name]
    load = parse_load(exposition)
    assert (load is None) == (expected is None)
    if load is not None:
        assert load._replace(kv_usage=round(load.kv_usage, 6)) == expected


def other(**fields: object) -> FakeEngine:
    return FakeEngine(has_telemetry=False, **fields)  # type: ignore[arg-type]


async def test_foreign_replicas_are_polled_and_routed_by_history() -> None:
    async with rig([other() for _ in range(3)]) as r:
        assert {replica.state for replica in r.router.fleet.replicas()} == {"foreign"}
        first = await r.chat(PROMPT)
        second = await r.chat(PROMPT)
        assert second.headers["x-argosy-replica"] == first.headers["x-argosy-replica"]
        assert second.headers["x-argosy-route"] == "predicted"
        assert int(second.headers["x-argosy-predicted-tokens"]) > 100
        assert r.metric('replica_state{model="tiny",replica="r0",state="foreign"}') == 1


@pytest.mark.parametrize("exposition", [vllm(running=9, waiting=5, usage=0.5), SGLANG])
async def test_polled_load_steers_requests(exposition: bytes) -> None:
    async with rig([other(metrics=exposition), other(metrics=vllm())], policy="least-load") as r:
        load = r.replica(0).load
        expected = parse_load(exposition)
        assert expected is not None
        await r.until(lambda: load.requests == expected.running + expected.waiting)
        assert load.queued_tokens == expected.queued_tokens > 0
        assert load.kv_usage == expected.kv_usage
        assert {(await r.chat(str(n))).headers["x-argosy-replica"] for n in range(6)} == {"r1"}


async def test_figures_that_vanish_leave_our_own_account() -> None:
    engine = other(metrics=vllm(running=9, waiting=5))
    async with rig([engine]) as r:
        load = r.replica(0).load
        await r.until(lambda: load.requests == 14)
        engine.metrics = None
        await r.until(lambda: load.requests == 0)
        assert r.replica(0).is_routable
        assert (await r.chat()).status_code == 200


async def test_a_restart_voids_the_history() -> None:
    engine = other(metrics=vllm(looked_up=100))
    async with rig([engine]) as r:
        await r.chat(PROMPT)
        assert int((await r.chat(PROMPT)).headers["x-argosy-predicted-tokens"]) > 0
        slots = r.replica(0).prefixes.slots
        engine.metrics = vllm(looked_up=5)
        await r.until(lambda: r.replica(0).prefixes.slots != slots)
        assert (await r.chat(PROMPT)).headers["x-argosy-predicted-tokens"] == "0"


async def test_an_unhealthy_one_is_not_used() -> None:
    async with rig([other(health=503), other()], wait=False) as r:
        await r.until(lambda: r.replica(1).is_routable and r.replica(0).state == "foreign")
        assert {(await r.chat(str(n))).headers["x-argosy-replica"] for n in range(6)} == {"r1"}
        r.engines[0].health = 200
        await r.until(lambda: r.replica(0).is_routable)
        await r.engines[0].stop()
        await r.until(lambda: not r.replica(0).is_routable)


class Slow(FakeEngine):
    """Keeps health polls waiting while it `is_slow`."""

    polls = 0
    kept = 0
    """Polls that it has kept waiting."""
    missed = 0
    """Those of them that the router has given up."""
    is_slow = False

    async def handle(self, connection: Connection, request: Received) -> None:
        if request.path == "/health":
            self.polls += 1
            if self.is_slow:
                self.kept += 1
                await connection.gone()
                self.missed += 1
                raise ConnectionResetError
        await super().handle(connection, request)


async def miss_a_poll(r: Rig, slow: Slow, *others: Slow) -> None:
    """A poll of the slow one is not answered in time, and all polls of the others are."""
    missed = slow.missed
    await r.until(lambda: slow.kept > missed)
    for _ in range(2):
        await r.pass_time(foreign_engines.TIMEOUT_S / 2)
        for each in others:
            await another_poll(r, each)  # so that none of its polls lasts through both halves
    await r.until(lambda: slow.missed > missed)


async def another_poll(r: Rig, engine: Slow) -> None:
    polls = engine.polls
    await r.until(lambda: engine.polls > polls)


async def test_a_busy_one_may_miss_a_poll() -> None:
    engine = Slow(has_telemetry=False)
    async with rig([engine], clock=StoppedClock()) as r:
        engine.is_slow = True
        await miss_a_poll(r, engine)
        await r.until(lambda: engine.kept == 2)
        assert r.replica(0).is_routable, "one was missed"
        await r.pass_time(foreign_engines.TIMEOUT_S)
        await r.until(lambda: not r.replica(0).is_routable)
        engine.is_slow = False
        await r.until(lambda: r.replica(0).is_routable)


async def test_requests_of_a_frozen_one_move_on() -> None:
    frozen, well = Slow(has_telemetry=False), Slow(has_telemetry=False)
    asked = asyncio.Event()

    async def freeze(connection: Connection, _: Received) -> None:
        frozen.is_slow = True
        asked.set()
        await connection.gone()

    frozen.script = freeze
    async with rig([frozen, well], policy="round-robin", clock=StoppedClock()) as r:
        answers = [asyncio.create_task(r.chat(str(number))) for number in range(2)]
        await asyncio.wait_for(asked.wait(), DEADLINE_S)
        for _ in range(foreign_engines.MISSES):
            await miss_a_poll(r, frozen, well)
        assert {(await answer).headers["x-argosy-replica"] for answer in answers} == {"r1"}
        assert r.metric('retries_total{model="tiny",reason="first_byte_timeout"}') == 1


async def test_streams_of_a_silent_one_keep_their_own_deadline() -> None:
    silent, well = Slow(has_telemetry=False), Slow(has_telemetry=False)
    go_on = asyncio.Event()

    async def slow_stream(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("hel"))
        silent.is_slow = True
        await go_on.wait()
        connection.chunk(DONE)
        connection.end_stream()

    silent.script = slow_stream
    async with (
        rig([silent, well], policy="round-robin", clock=StoppedClock()) as r,
        r.http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer,
    ):
        for _ in range(foreign_engines.MISSES + 2):
            await miss_a_poll(r, silent, well)
        assert not r.replica(0).is_routable
        go_on.set()
        assert (await answer.aread()).endswith(DONE)


# what is remembered, and what is learnt


def test_histories_begin_their_periods_at_different_times() -> None:
    index = PrefixIndex()
    replicas = [ReplicaPrefixes(index) for _ in range(100)]
    steps = 50
    most = 0
    slots = [replica.slots for replica in replicas]
    for step in range(3 * steps):
        now = step * HISTORY_S / steps
        for number, replica in enumerate(replicas):
            replica.remember([number], lambda: [10], now)
            replica.expire(now)
        after = [replica.slots for replica in replicas]
        changed = sum(one != other for one, other in zip(slots, after, strict=True))
        most = max(most, changed if step else 0)
        slots = after
    assert 0 < most <= 3 * len(replicas) / steps


def test_history_is_forgotten_by_its_age_since_last_use() -> None:
    index = PrefixIndex()
    residency = ReplicaPrefixes(index)

    def hit(chain: list[int]) -> int:
        runs, _ = index.match(chain)
        return max((runs[slot] for slot in residency.slots if slot in runs), default=0)

    start = 10 * HISTORY_S
    residency.remember([1, 2, 3], lambda: [10, 20, 30], start)
    residency.remember([7], lambda: [10], start)
    residency.expire(start + HISTORY_S)
    residency.remember([1, 2], lambda: [10, 20], start + HISTORY_S)
    assert (hit([1, 2, 3]), hit([7])) == (30, 10)
    residency.expire(start + 2 * HISTORY_S)
    assert (hit([1, 2, 3]), hit([7])) == (20, 0), "only what was used again is left"
    residency.expire(start + 3 * HISTORY_S)
    while index.scrub():
        pass
    assert len(index) == 0
    residency.close()


def test_rates_are_learnt_where_reports_have_none() -> None:
    load = ReplicaLoad("r")
    load.report(requests=1, tokens=0)
    load.learn(1000, 0.5)
    assert load.prefill_tokens_per_s == 2000.0
    load.report(requests=1, tokens=0, prefill_tokens_per_s=500.0)
    load.learn(1000, 0.5)
    assert load.prefill_tokens_per_s == 500.0


@pytest.mark.parametrize("has_telemetry", [True, False])
async def test_engines_get_allowed_tools_resolved(has_telemetry: bool) -> None:
    """vLLM does not know `allowed_tools`."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools[1:]}}
    async with rig([FakeEngine(has_telemetry=has_telemetry)]) as r:
        await r.chat("hello", tools=tools, tool_choice=choice)
        await r.chat("allowed_tools", tools=tools)
        resolved, plain = (request.json for request in r.engines[0].requests)
        assert (resolved["tool_choice"], resolved["tools"]) == ("required", tools[1:])
        assert ("tool_choice" in plain, plain["tools"]) == (False, tools)
