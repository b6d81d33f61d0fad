"""Fault attribution: the request is at fault if two replicas fail it alike, the replica if another one answers it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from argosy_protocol.fleet import Endpoint, FleetDocument
from argosy_router.http.sse import MAX_EVENT_BYTES
from argosy_router.proxy import resilience

from .fake_engine import Connection, FakeEngine, Received, answer_normally
from .harness import Rig, rig, service

Script = Callable[[Connection, Received], Awaitable[None]]
BAD = "bad"
ERROR = b'{"error":{"message":"of the engine","type":"internal_error"}}'


def failing_on_bad(status: int) -> Script:
    """An engine with a flaw that certain requests meet."""

    async def script(connection: Connection, request: Received) -> None:
        if BAD.encode() in request.body:
            connection.answer(status, ERROR)
        else:
            await answer_normally(connection, request)

    return script


def broken(status: int) -> Script:
    """An engine that fails whatever it is asked."""

    async def script(connection: Connection, _: Received) -> None:
        connection.answer(status, ERROR)

    return script


def ejections(r: Rig) -> list[bool]:
    return [replica.health.is_ejected for replica in r.router.fleet.replicas()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [500, 502, 504, 507])
async def test_bad_requests_eject_no_replica(status: int, stream: bool) -> None:
    engines = [FakeEngine(script=failing_on_bad(status)) for _ in range(4)]
    async with rig(engines) as r:
        for _ in range(12):
            answers = await asyncio.gather(
                *(r.chat(f"{BAD} {number}", stream=stream) for number in range(10))
            )
            assert {answer.status_code for answer in answers} == {502 if status in (502, 504) else status}
            assert not any(ejections(r))
        assert (await r.chat("good")).status_code == 200
        assert r.metric("ejections_total") == 0
        assert sum(len(engine.requests) for engine in engines) <= 2 * 120 + 1, "two replicas at most"


async def oversized(connection: Connection, request: Received) -> None:
    """An answer whose first event exceeds what the router holds."""
    connection.begin_stream()
    for _ in range(MAX_EVENT_BYTES // 65536 + 1):
        connection.chunk(b"x" * 65536)
        await connection.writer.drain()


async def test_large_events_eject_no_replica() -> None:
    async with rig([FakeEngine(script=oversized) for _ in range(3)], policy="round-robin") as r:
        for number in range(6):
            assert (await r.chat(str(number), stream=True)).status_code == 502
        assert not any(ejections(r))
        assert r.metric('retries_total{model="tiny",reason="malformed"}') == 6, "two replicas at most"


@pytest.mark.usefixtures("ejections_last")
async def test_a_replica_whose_events_alone_are_too_large_is_ejected() -> None:
    async with rig([FakeEngine(script=oversized), FakeEngine()], policy="round-robin") as r:
        for number in range(12):
            assert (await r.chat(str(number), stream=True)).status_code == 200
        assert ejections(r) == [True, False]


async def test_the_engine_s_own_error_is_answered() -> None:
    async with rig([FakeEngine(script=failing_on_bad(500)) for _ in range(2)]) as r:
        answer = await r.chat(BAD)
        assert (answer.status_code, answer.content) == (500, ERROR)
        assert r.metric('retries_total{model="tiny",reason="status"}') == 1


@pytest.mark.usefixtures("ejections_last")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [500, 502, 507])
async def test_a_broken_replica_is_ejected_and_its_requests_are_answered(status: int, stream: bool) -> None:
    engines = [FakeEngine(script=broken(status)), *(FakeEngine() for _ in range(3))]
    async with rig(engines, policy="round-robin") as r:
        for number in range(40):
            assert (await r.chat(str(number), stream=stream)).status_code == 200
        assert ejections(r) == [True, False, False, False]
        assert len(engines[0].requests) <= 5


@pytest.mark.usefixtures("ejections_last")
async def test_a_broken_replica_is_ejected_amid_bad_requests() -> None:
    engines = [FakeEngine(script=broken(500)), *(FakeEngine(script=failing_on_bad(500)) for _ in range(4))]
    async with rig(engines, policy="round-robin") as r:
        for number in range(30):
            assert (await r.chat(f"{BAD} {number}")).status_code == 500
            assert (await r.chat(f"good {number}")).status_code == 200
        assert ejections(r) == [True, False, False, False, False]


async def test_a_client_error_from_a_second_replica_clears_the_first() -> None:
    engines = [FakeEngine(script=broken(500)), FakeEngine(script=broken(400))]
    async with rig(engines) as r:
        for number in range(20):
            assert (await r.chat(str(number))).status_code == 400
        assert not any(ejections(r))


async def test_a_lone_replica_s_error_is_answered_at_once() -> None:
    engine = FakeEngine(script=broken(500))
    async with rig([engine]) as r:
        assert (await r.chat()).status_code == 500
        assert len(engine.requests) == 1


@pytest.mark.usefixtures("ejections_last")
async def test_a_probe_that_fails_renews_the_ejection_unless_the_request_is_at_fault() -> None:
    engines = [FakeEngine(script=failing_on_bad(500)), FakeEngine(script=failing_on_bad(500))]
    async with rig(engines, policy="round-robin") as r:
        health = r.replica(0).health
        assert health.failed(r.router.requests.now() - 100.0, may_eject=True, refused=True)
        r.router.fleet.changed()
        assert r.replica(0).state == "half-open"
        for number in range(4):
            assert (await r.chat(f"{BAD} {number}")).status_code == 500
            assert r.replica(0).state == "half-open"
        engines[0].script = broken(500)
        for number in range(4):
            assert (await r.chat(str(number))).status_code == 200
        assert r.replica(0).state == "ejected"


async def test_a_service_s_retries_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests of one service fail, those of another can be retried."""

    async def die(connection: Connection, _: Received) -> None:
        connection.die()

    budget_of(monkeypatch, 5.0)
    async with (
        FakeEngine(script=die) as first,
        FakeEngine(script=die) as second,
        FakeEngine(model="other") as healthy,
        FakeEngine(model="other", script=die) as dying,
    ):
        names = [("o0", dying), ("o1", healthy)]
        endpoints = tuple(Endpoint(name=name, url=engine.url) for name, engine in names)
        document = FleetDocument(
            services=(
                service([first, second]),
                service([], name="other", uid="2", model="other", endpoints=endpoints),
            )
        )
        async with rig([], document=document, policy="round-robin") as r:
            for number in range(10):
                assert (await r.chat(str(number))).status_code == 502
            assert r.metric('retries_total{model="tiny",reason="reset"}') == 5, "its budget is used up"
            for number in range(4):
                assert (await r.chat(str(number), model="other")).status_code == 200


def budget_of(monkeypatch: pytest.MonkeyPatch, retries: float) -> None:
    """Services have this many retries and earn none."""
    for name, value in (("MAX_RETRY_CREDIT", retries), ("FREE_RETRIES_PER_S", 0.0), ("RETRY_RATIO", 0.0)):
        monkeypatch.setattr(resilience, name, value)


async def test_bad_requests_leave_retries_for_replicas_that_die(monkeypatch: pytest.MonkeyPatch) -> None:
    async def die(connection: Connection, request: Received) -> None:
        if BAD.encode() in request.body:
            connection.answer(500, ERROR)
        else:
            connection.die()

    engines = [FakeEngine(script=die), *(FakeEngine(script=failing_on_bad(500)) for _ in range(3))]
    async with rig(engines, policy="round-robin") as r:
        budget_of(monkeypatch, 20.0)
        monkeypatch.setattr(resilience, "RESERVED_CREDIT", 10.0)
        for number in range(30):
            assert (await r.chat(f"{BAD} {number}")).status_code == 500
        assert r.metric('retries_total{model="tiny",reason="status"}') == 10
        for number in range(8):
            assert (await r.chat(str(number))).status_code == 200
