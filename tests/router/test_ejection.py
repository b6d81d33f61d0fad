"""Ejection limits: how many replicas may be ejected, and panic when most of them are."""

from __future__ import annotations

import asyncio

import pytest

from argosy_router.config import UpstreamLimits
from argosy_router.fleet import telemetry
from argosy_router.fleet.health import BASE_EJECTION_S, ReplicaHealth, panics

from .fake_engine import Connection, FakeEngine, Received
from .harness import DEADLINE_S, StoppedClock, rig


class Full(FakeEngine):
    """Has as many telemetry readers as it takes."""

    is_full = True

    async def stream_telemetry(self, connection: Connection) -> None:
        if self.is_full:
            connection.answer(429, b'{"error":{"message":"too many readers"}}')
        else:
            await super().stream_telemetry(connection)


async def test_dead_processes_leave_the_choice_whatever_their_number() -> None:
    engines = [FakeEngine() for _ in range(4)]
    async with rig(engines) as r:
        for engine in engines[:3]:
            await engine.stop()
        for number in range(3):
            await r.until_state(number, "connecting")
        assert sum(replica.health.is_ejected for replica in r.router.fleet.replicas()) <= 2
        retries = r.metric("retries_total")
        assert {(await r.chat(str(number))).headers["x-argosy-replica"] for number in range(8)} == {"r3"}
        assert r.metric("retries_total") == retries
        for engine in engines[:3]:
            await engine.start()
        for number in range(3):
            await r.until_state(number, "synced")


async def test_silence_ejects_at_most_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "BACKOFF_CAP_S", 0.01)
    engines = [FakeEngine() for _ in range(4)]

    async def no_answer(connection: Connection) -> None:
        await connection.gone()

    async with rig(engines, clock=StoppedClock()) as r:
        replicas = list(r.router.fleet.replicas())
        for engine in engines:
            engine.stream_telemetry = no_answer  # type: ignore[method-assign]
        await r.pass_time(telemetry.STALE_AFTER_S)
        await r.until(lambda: all(replica.health.is_suspect for replica in replicas))
        ejected = []
        for tries in range(2, 10):
            await r.until(lambda tries=tries: all(engine.connections == tries for engine in engines))
            ejected.append(sum(replica.health.is_ejected for replica in replicas))
            await r.pass_time(telemetry.HEAD_TIMEOUT_S)
        assert max(ejected) == ejected[-1] == 2


async def test_an_engine_without_room_for_a_reader_is_routed_by_history() -> None:
    engine = Full()
    async with rig([engine]) as r:
        assert r.replica(0).state == "stale"
        assert (await r.chat("word " * 400)).status_code == 200
        assert (await r.chat("word " * 400)).headers["x-argosy-route"] == "only"
        assert int((await r.chat("word " * 400)).headers["x-argosy-predicted-tokens"]) > 0
        engine.is_full = False
        await r.until_state(0, "synced")


@pytest.mark.usefixtures("ejections_last")
async def test_a_black_hole_takes_the_connect_deadline(black_hole: int) -> None:
    async with rig([FakeEngine(), FakeEngine()], policy="round-robin", clock=StoppedClock()) as r:
        r.replica(0).pool.port = black_hole
        connecting = r.replica(0).inflight_attempts
        answers = []
        for number in range(8):
            asked = asyncio.create_task(r.chat(str(number)))
            await r.until(lambda asked=asked: asked.done() or bool(connecting))
            if connecting:
                await asyncio.sleep(0)  # now it connects
                await r.pass_time(UpstreamLimits().connect_timeout_s)
            answers.append(await asyncio.wait_for(asked, DEADLINE_S))
        assert {(a.status_code, a.headers["x-argosy-replica"]) for a in answers} == {(200, "r1")}
        failed = r.metric('upstream_failures_total{model="tiny",reason="connect",replica="r0"}')
        assert failed == 3, "then it is ejected"
        assert r.replica(0).health.is_ejected
        assert not r.replica(0).load.inflight


# states, and panic


async def test_every_condition_is_a_state_of_reports_and_metrics() -> None:
    async with rig([FakeEngine(), FakeEngine()]) as r:
        replica, now = r.replica(0), r.router.requests.now()

        def is_shown(state: str) -> bool:
            shown = r.metric(f'replica_state{{model="tiny",replica="r0",state="{state}"}}')
            return (replica.state, replica.report().state, shown) == (state, state, 1)

        assert is_shown("synced")
        assert replica.report().routable
        replica.health.silent(0.0, may_eject=False)
        assert is_shown("suspect")
        assert replica.report().routable, "where nothing better is there"
        replica.health.failed(now, may_eject=True, refused=True)
        assert is_shown("ejected")
        assert not replica.report().routable
        replica.health.succeeded()
        replica.health.failed(now - 2 * BASE_EJECTION_S, may_eject=True, refused=True)
        assert is_shown("half-open")
        replica.has_announced_drain = True
        assert is_shown("draining")


@pytest.mark.parametrize(
    ("replicas", "ejected", "in_panic"),
    [(1, 0, False), (2, 1, False), (3, 1, False), (3, 2, True), (4, 2, False), (2, 2, True), (0, 0, False)],
)
def test_panic_begins_beyond_half(replicas: int, ejected: int, in_panic: bool) -> None:
    fleet = [ReplicaHealth() for _ in range(replicas)]
    for health in fleet[:ejected]:
        health.failed(0.0, may_eject=True, refused=True)
    assert panics(fleet) is in_panic


async def test_in_panic_ejections_are_ignored() -> None:
    async with rig([FakeEngine() for _ in range(4)], policy="round-robin") as r:
        now = r.router.requests.now() + 3600.0
        for number in (0, 1):
            r.replica(number).health.failed(now, may_eject=True, refused=True)
        r.router.fleet.changed()
        assert {(await r.chat(str(n))).headers["x-argosy-replica"] for n in range(6)} == {"r2", "r3"}
        assert r.metric('panic{model="tiny"}') == 0
        r.replica(3).has_announced_drain = True
        r.router.fleet.changed()
        assert r.metric('panic{model="tiny"}') == 1
        names = {(await r.chat(str(n))).headers["x-argosy-replica"] for n in range(6)}
        assert names & {"r0", "r1"}
        assert r.metric('panic{model="tiny"}') == 0, "an answer has ended an ejection"


async def test_a_retry_does_not_mistake_what_it_tried_for_a_panic() -> None:
    async def refuse(connection: Connection, _: Received) -> None:
        connection.answer(503, b"{}")

    engines = [FakeEngine(script=refuse), FakeEngine(), FakeEngine(), FakeEngine()]
    async with rig(engines, policy="round-robin") as r:
        for number in (1, 2):
            health = r.replica(number).health
            health.failed(r.router.requests.now() + 3600.0, may_eject=True, refused=True)
        r.router.fleet.changed()
        assert {(await r.chat(str(n))).headers["x-argosy-replica"] for n in range(4)} == {"r3"}
        assert engines[0].requests


async def test_a_crowded_engine_that_was_silent_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "BACKOFF_CAP_S", 0.01)
    engines = [FakeEngine(), FakeEngine()]

    async def full(connection: Connection) -> None:
        connection.answer(429, b"{}")

    async with rig(engines, policy="round-robin") as r:
        engines[0].stream_telemetry = full  # type: ignore[method-assign]
        engines[0].cut_telemetry()
        await r.until_state(0, "stale")
        r.replica(0).health.silent(0.0, may_eject=False)
        r.router.fleet.changed()
        await r.until(lambda: not r.replica(0).health.is_suspect)
        assert {(await r.chat(str(n))).headers["x-argosy-replica"] for n in range(4)} == {"r0", "r1"}
