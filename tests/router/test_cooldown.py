"""Cooldown: a replica that reports itself full is avoided until it has capacity, and not ejected."""

from __future__ import annotations

import asyncio
import time

import pytest

from argosy_protocol.errors import ResourceUnavailable
from argosy_protocol.telemetry import Load
from argosy_router.fleet.health import CONSECUTIVE_FAILURES, ReplicaHealth
from argosy_router.proxy import resilience
from argosy_router.proxy.resilience import MAX_ATTEMPTS

from .fake_engine import Connection, FakeEngine, Received, Script, answer_normally
from .harness import Rig, chat, rig

RETRY_AFTER_S = 50.0
SEATS = 64
"""`max_num_seqs` of a fake engine's hello."""
FULL = Load(core_step_age_s=0.0, num_running=SEATS, num_waiting=2)
FREE = Load(core_step_age_s=0.0, num_running=SEATS - 1)


def busy(status: int = 429, headers: str = f"retry-after: {RETRY_AFTER_S:.0f}\r\n") -> Script:
    async def script(connection: Connection, _: Received) -> None:
        connection.answer(status, b'{"error":{"message":"full"}}', headers)

    return script


def let_pass(r: Rig, seconds: float) -> None:
    """Move the clock ahead by which replicas are chosen; it stands still from then on."""
    now = r.router.requests.now() + seconds
    r.router.requests.shared.now = lambda: now


async def ask(r: Rig, count: int) -> list[tuple[str, str]]:
    """Replica and reason of `count` answers."""
    answers = [await r.chat(str(number)) for number in range(count)]
    return [(answer.headers["x-argosy-replica"], answer.headers["x-argosy-route"]) for answer in answers]


async def told(r: Rig, load: Load) -> None:
    """The first replica's telemetry says so, and the router has heard it."""
    heard_at = r.replica(0).heard_at
    r.engines[0].announce(load)
    await r.until(lambda: r.replica(0).heard_at != heard_at)


@pytest.mark.parametrize("status", [429, 503])
async def test_a_replica_is_in_cooldown_for_as_long_as_it_asked(status: int) -> None:
    engines = [FakeEngine(script=busy(status)), FakeEngine(), FakeEngine()]
    async with rig(engines, policy="round-robin") as r:
        let_pass(r, 0.0)
        assert {name for name, _ in await ask(r, 12)} == {"r1", "r2"}
        assert len(engines[0].requests) == 1
        engines[0].script = answer_normally
        let_pass(r, RETRY_AFTER_S - 1.0)
        assert {name for name, _ in await ask(r, 6)} == {"r1", "r2"}
        let_pass(r, 2.0)
        assert {name for name, _ in await ask(r, 6)} == {"r0", "r1", "r2"}
        assert r.metric('rests_total{model="tiny",replica="r0"}') == 1


def busy_resource() -> Script:
    error = ResourceUnavailable("32 long prompts are waiting", retry_after_s=RETRY_AFTER_S)
    return busy(error.http_status, "".join(f"{name}: {value}\r\n" for name, value in error.headers().items()))


async def test_a_replica_too_busy_for_one_kind_of_request_answers_others() -> None:
    async with rig([FakeEngine(script=busy_resource()), FakeEngine()], policy="round-robin") as r:
        assert [name for name, _ in await ask(r, 4)] == ["r1"] * 4
        assert len(r.engines[0].requests) == 2, "it is asked in its turn"
        assert r.metric("rests_total") == 0
        assert r.metric("ejections_total") == 0


@pytest.mark.parametrize("at_once", [True, False], ids=["before the stream", "in the stream"])
async def test_requests_of_a_busy_kind_leave_retries_to_others(
    monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    async def refuse(connection: Connection, request: Received) -> None:
        if at_once:
            await busy_resource()(connection, request)
        else:
            connection.begin_stream("x-argosy-resumable: true\r\n")
            connection.chunk(b"data: " + ResourceUnavailable("too many grammars").body() + b"\n\n")
            connection.end_stream()

    for name, value in (
        ("MAX_RETRY_CREDIT", 20.0),
        ("FREE_RETRIES_PER_S", 0.0),
        ("RETRY_RATIO", 0.0),
        ("RESERVED_CREDIT", 10.0),
    ):
        monkeypatch.setattr(resilience, name, value)
    async with rig([FakeEngine(script=refuse) for _ in range(3)], policy="round-robin") as r:
        for number in range(20):
            assert (await r.chat(str(number), stream=True)).status_code == 429
        assert r.metric('retries_total{model="tiny",reason="refused"}') == 10
        assert r.metric("rests_total") == 0


async def test_a_full_replica_is_not_counted_as_failing() -> None:
    async with rig([FakeEngine(script=busy()), FakeEngine()], policy="round-robin") as r:
        for number in range(2 * CONSECUTIVE_FAILURES):
            let_pass(r, RETRY_AFTER_S + 1.0 if number else 0.0)
            await ask(r, 3)
        assert len(r.engines[0].requests) == r.metric("rests_total") == 2 * CONSECUTIVE_FAILURES
        assert r.replica(0).state == "synced"
        assert r.replica(0).report().routable
        assert r.metric("ejections_total") == 0
        health = r.replica(0).health
        assert not health.failed(0.0, may_eject=True), "the count of failures has not begun"


async def test_cooldown_is_ignored_if_all_replicas_are_in_it() -> None:
    engines = [FakeEngine(script=busy()), FakeEngine(script=busy())]
    async with rig(engines, policy="round-robin", admin_port=0) as r:
        assert (await r.chat()).status_code == 429
        for engine in engines:
            engine.script = answer_normally
        answers = await ask(r, 4)
        assert {name for name, _ in answers} == {"r0", "r1"}
        assert {reason for _, reason in answers} == {"busy"}
        newest = (await r.http.get(r.router.admin_url + "/decisions")).json()[0]
        assert newest["reason"] == "busy"
        assert all(r.metric(f'rests_total{{model="tiny",replica="{name}"}}') == 1 for name in ("r0", "r1"))


async def test_a_suspect_comes_behind_one_in_cooldown() -> None:
    async with rig([FakeEngine(script=busy()), FakeEngine()], policy="round-robin") as r:
        await ask(r, 2)
        r.engines[0].script = answer_normally
        r.replica(1).health.silent(0.0, may_eject=False)
        r.router.fleet.changed()
        assert await ask(r, 2) == [("r0", "busy")] * 2


async def test_the_explanation_tells_how_long() -> None:
    async with rig([FakeEngine(script=busy()), FakeEngine()], policy="round-robin", admin_port=0) as r:
        await ask(r, 2)
        explained = (await r.http.post(r.router.admin_url + "/explain", json=chat())).json()
        assert (explained["replica"], explained["reason"]) == ("r1", "only")
        (left_out,) = explained["excluded"]
        assert left_out["replica"] == "r0"
        assert "full" in left_out["reason"]
        seconds = float(left_out["reason"].split()[-2])
        assert 0.0 < seconds <= RETRY_AFTER_S


async def test_telemetry_ends_a_cooldown_once_there_is_room() -> None:
    async with rig([FakeEngine(script=busy()), FakeEngine()], policy="round-robin") as r:
        await told(r, FULL)
        await ask(r, 2)
        r.engines[0].script = answer_normally
        await told(r, FULL)
        assert {name for name, _ in await ask(r, 4)} == {"r1"}
        await told(r, FREE)
        assert {name for name, _ in await ask(r, 4)} == {"r0", "r1"}


async def test_telemetry_older_than_the_refusal_does_not_end_a_cooldown() -> None:
    """An engine that sleeps, or a limit in front of it: its figures do not show why it refused."""
    async with rig([FakeEngine(script=busy()), FakeEngine()], policy="round-robin") as r:
        await told(r, FREE)
        await ask(r, 2)
        await told(r, FREE)
        await ask(r, 4)
        assert len(r.engines[0].requests) == 1


async def test_a_replica_in_cooldown_has_no_room() -> None:
    async with rig([FakeEngine(script=busy()), FakeEngine()], policy="round-robin") as r:
        (service,) = r.router.fleet.services.values()
        before = service.candidates.free_sequences(time.monotonic())
        await ask(r, 2)
        assert service.candidates.free_sequences(time.monotonic()) == before // 2


async def test_a_cooldown_counts_for_the_very_next_choice() -> None:
    """Also the cooldown of the last replica that a request may try."""
    asked: list[FakeEngine] = []
    is_last, refuses = asyncio.Event(), asyncio.Event()

    async def refuse_three_times(connection: Connection, request: Received) -> None:
        asked.append(connection.engine)
        is_later = len(asked) > MAX_ATTEMPTS
        if len(asked) == MAX_ATTEMPTS:
            is_last.set()
            await refuses.wait()
        await (answer_normally if is_later else busy())(connection, request)

    engines = [*(FakeEngine(script=refuse_three_times) for _ in range(MAX_ATTEMPTS)), FakeEngine()]
    async with rig(engines, policy="round-robin") as r:
        spare = r.replica(MAX_ATTEMPTS).health
        spare.silent(0.0, may_eject=False)
        r.router.fleet.changed()
        refused = asyncio.create_task(r.chat())
        await is_last.wait()
        spare.reachable()
        r.router.fleet.changed()
        assert (await r.chat()).status_code == 200, "and whoever may be chosen is remembered"
        refuses.set()
        assert (await refused).status_code == 429
        assert {name for name, _ in await ask(r, 4)} == {"r3"}


def test_the_latest_end_counts() -> None:
    health = ReplicaHealth()
    assert health.cool_down(10.0, 5.0, until_capacity=False)
    assert not health.cool_down(11.0, 1.0, until_capacity=True), "it was in cooldown already"
    assert health.is_in_cooldown(14.9)
    assert not health.is_in_cooldown(15.0)
    assert health.found_capacity()
    assert not health.is_in_cooldown(11.0)
    assert not health.found_capacity()
