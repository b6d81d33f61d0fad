"""Attempts on rare paths: deadlines, their number, and that no request is lost or sent twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from argosy_protocol.fleet import FleetDocument
from argosy_protocol.telemetry import Draining, Load
from argosy_router.config import UpstreamLimits
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.upstream import ConnectFailed, ConnectionPool, UpstreamConnection, UpstreamTls
from argosy_router.proxy import resilience
from argosy_router.proxy.resilience import MAX_ATTEMPTS

from .fake_engine import DONE, Connection, FakeEngine, Received, answer_normally, event
from .harness import DEADLINE_S, Rig, StoppedClock, chat, is_settled, raw, rig, service, until
from .raw_requests import request_bytes
from .resumable_stream import ResumableStream, events, fold

STREAM = {**chat(stream=True), "stream_options": {"include_usage": True}}


async def ask(r: Rig, body: dict[str, Any]) -> bytes:
    headers = {"x-request-id": "same"}
    return (await r.http.post("/v1/chat/completions", json=body, headers=headers)).content


# deadlines


async def test_a_first_token_that_is_expected_late_is_waited_for() -> None:
    release = asyncio.Event()

    async def late(connection: Connection, request: Received) -> None:
        await release.wait()
        await answer_normally(connection, request)

    engine = FakeEngine(script=late)
    async with rig([engine], first_byte_timeout_s=0.05) as r:
        assert (await r.chat(stream=True)).status_code == 504
        load = Load(core_step_age_s=0.0, queued_uncached_tokens=100_000, prefill_tokens_per_s=1000.0)
        engine.announce(load)
        await r.until(lambda: r.replica(0).load.queued_tokens >= 100_000)
        asking = asyncio.create_task(r.chat(stream=True))
        await r.until(lambda: len(engine.requests) == 2)
        for _ in range(3):  # each of these is overdue, which shows that time passes
            engine.announce(Load(core_step_age_s=0.0))
            await r.until(lambda: r.replica(0).load.queued_tokens < 1000)
            assert (await r.chat("now", stream=True)).status_code == 504
        release.set()
        assert (await asking).status_code == 200


async def test_no_prediction_outlasts_the_request() -> None:
    async def never(connection: Connection, _: Received) -> None:
        await connection.gone()

    engine = FakeEngine(script=never)
    async with rig([engine], first_byte_timeout_s=0.05, request_timeout_s=0.1) as r:
        engine.announce(Load(core_step_age_s=0.0, queued_uncached_tokens=10**6, prefill_tokens_per_s=1.0))
        await r.until(lambda: r.replica(0).load.queued_tokens >= 10**6)
        answer = await r.chat(stream=True)
        assert answer.status_code == 504
        assert (answer.headers["retry-after"], answer.headers["x-should-retry"]) == ("1", "true")


async def only_begin(connection: Connection) -> None:
    """The head of a stream, as other makes of engines send it at once, and a comment, as some do while it waits."""
    connection.begin_stream()
    connection.chunk(b": still here\n\n")
    await connection.writer.drain()


async def test_a_head_is_no_first_token() -> None:
    release = asyncio.Event()

    async def late(connection: Connection, _: Received) -> None:
        await only_begin(connection)
        await release.wait()
        connection.chunk(event("hello", "stop") + DONE)
        connection.end_stream()

    impatient = UpstreamLimits(idle_timeout_s=1.0)
    engine = FakeEngine(script=late)
    async with rig([engine], first_byte_timeout_s=60.0, upstream=impatient, clock=StoppedClock()) as r:
        asking = asyncio.create_task(r.chat(stream=True))
        await r.until(lambda: any(each.headers for each in r.replica(0).inflight_attempts))
        await r.pass_time(3 * impatient.idle_timeout_s)
        release.set()
        answer = await asking
    assert (answer.status_code, answer.content) == (200, event("hello", "stop") + DONE)


async def test_a_replica_that_sends_no_more_than_a_head_is_overdue() -> None:
    async def never(connection: Connection, _: Received) -> None:
        await only_begin(connection)
        await connection.gone()

    async with rig([FakeEngine(script=never)], first_byte_timeout_s=0.05) as r:
        assert (await r.chat(stream=True)).status_code == 504


async def test_a_death_after_the_response_head_is_hidden_from_the_client() -> None:
    async def die(connection: Connection, _: Received) -> None:
        await only_begin(connection)
        connection.die()

    async with rig([FakeEngine(script=die), FakeEngine()], policy="round-robin") as r:
        for _ in range(2):
            answer = await r.chat(stream=True)
            assert answer.status_code == 200
            assert answer.content.endswith(DONE)
            assert b"error" not in answer.content
        assert r.metric("retries_total") == 1


async def test_an_answer_that_trickles_has_the_request_s_time() -> None:
    async def trickle(connection: Connection, _: Received) -> None:
        connection.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n\r\n"
        )
        gone = asyncio.ensure_future(connection.gone())
        while not gone.done():
            connection.send(b" ")
            await asyncio.sleep(0.01)

    async with rig([FakeEngine(script=trickle)], request_timeout_s=0.2) as r:
        assert (await r.chat()).status_code == 504


# what an attempt costs


async def die_on_request(connection: Connection, request: Received) -> None:
    if b"kill" in request.body:
        connection.die()
    else:
        await answer_normally(connection, request)


async def test_a_stale_connection_is_retried_from_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resilience, "FREE_RETRIES_PER_S", 0.0)
    monkeypatch.setattr(resilience, "RETRY_RATIO", 0.0)
    monkeypatch.setattr(resilience, "MAX_RETRY_CREDIT", 5.0)
    engine = FakeEngine(script=die_on_request)
    async with rig([engine]) as r:
        for _ in range(20):
            assert (await r.chat("warm")).status_code == 200
            assert (await r.chat("kill")).status_code == 502
        killed = sum(b"kill" in request.body for request in engine.requests)
        assert killed == 20 + 5
        assert r.metric('retries_total{model="tiny",reason="stale"}') == 5


async def test_a_request_that_kills_engines_meets_as_many_as_there_are_attempts() -> None:
    engines = [FakeEngine(script=die_on_request) for _ in range(4)]
    async with rig(engines, policy="round-robin", admin_port=0) as r:
        for number in range(8):
            assert (await r.chat(str(number))).status_code == 200
        assert (await r.chat("kill")).status_code == 502
        assert sum(b"kill" in q.body for engine in engines for q in engine.requests) == MAX_ATTEMPTS
        records = (await r.http.get(r.router.admin_url + "/decisions", params={"limit": 2})).json()
        assert records[0]["attempt"] == MAX_ATTEMPTS


async def test_a_stale_connection_to_a_replica_that_left_is_not_retried_there() -> None:
    go_on = asyncio.Event()

    async def leave(connection: Connection, request: Received) -> None:
        if b"kill" in request.body:
            await go_on.wait()
            connection.die()
        else:
            await answer_normally(connection, request)

    engines = [FakeEngine(script=leave), FakeEngine()]
    async with rig(engines, policy="round-robin") as r:
        for number in range(2):
            assert (await r.chat(str(number))).status_code == 200
        asking = asyncio.create_task(r.chat("kill"))
        await r.until(lambda: len(engines[0].requests) == 2)
        rest = service(engines, endpoints=service(engines).endpoints[1:])
        r.discovery.set(FleetDocument(services=(rest,)))
        go_on.set()
        assert (await asking).headers["x-argosy-replica"] == "r1"
        assert len(engines[0].requests) == 2


@pytest.mark.parametrize(
    ("engine", "mode"), [(FakeEngine(), "synced"), (FakeEngine(has_telemetry=False), "foreign")]
)
async def test_answers_tell_what_was_known_of_the_replica(engine: FakeEngine, mode: str) -> None:
    async with rig([engine], admin_port=0) as r:
        assert (await r.chat()).headers["x-argosy-mode"] == mode
        assert (await r.chat(stream=True)).headers["x-argosy-mode"] == mode
        records = (await r.http.get(r.router.admin_url + "/decisions")).json()
        assert {record["mode"] for record in records} == {mode}
        if mode == "synced":
            engine.hello = {"block_size": "?"}  # the next stream breaks the protocol
            engine.cut_telemetry()
            await r.until_state(0, "stale")
            assert (await r.chat()).headers["x-argosy-mode"] == "stale"


# leaving while streams move


async def test_a_stream_moves_on_while_the_router_drains() -> None:
    die = asyncio.Event()
    resumable = ResumableStream()

    async def script(connection: Connection, request: Received) -> None:
        if "resume" in request.json or die.is_set():
            await resumable(connection, request)
            return
        connection.begin_stream()
        connection.chunk(events(request)[0])
        await die.wait()
        connection.die()

    async with rig([FakeEngine(script=script), FakeEngine(script=script)]) as r:
        asking = asyncio.create_task(ask(r, STREAM))
        await r.until(lambda: any(engine.requests for engine in r.engines))
        drain = asyncio.create_task(r.router.drain())
        await r.until(lambda: r.router.application.is_draining)
        die.set()
        said = fold(await asking)
        await asyncio.wait_for(drain, DEADLINE_S)
        assert said["choices"][0]["finish"] == ["stop"]
        assert sum(len(engine.requests) for engine in r.engines) == 2
        assert is_settled(r)


@pytest.mark.parametrize("how", ["announced", "removed"])
async def test_a_stream_of_a_leaving_replica_moves_on_when_it_dies(how: str) -> None:
    die = asyncio.Event()
    script = ResumableStream()

    async def begin(connection: Connection, request: Received) -> None:
        connection.begin_stream()
        connection.chunk(events(request)[0])
        await die.wait()
        connection.die()

    engines = [FakeEngine(script=begin), FakeEngine(script=script)]
    async with rig(engines, policy="round-robin") as r:
        asking = asyncio.create_task(ask(r, STREAM))
        await r.until(lambda: r.router.requests.inflight == 1 and bool(engines[0].requests))
        leaving = r.replica(0)
        if how == "announced":
            engines[0].announce(Draining())
            await r.until_state(0, "draining")
        else:
            rest = service(engines, endpoints=service(engines).endpoints[1:])
            r.discovery.set(FleetDocument(services=(rest,)))
        die.set()
        assert fold(await asking)["choices"][0]["finish"] == ["stop"]
        assert [len(engine.requests) for engine in engines] == [1, 1]
        assert (leaving.load.inflight, leaving.load.inflight_tokens) == (0, 0)


class Connecting:
    """A waiter for a connection."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_connected(self, connection: UpstreamConnection) -> None:
        self.told.append("connected")

    def on_connect_failed(self, error: ConnectFailed) -> None:
        self.told.append(str(error))


@pytest.mark.parametrize("turns", range(5))
async def test_removing_a_replica_fails_pending_connects_to_it(turns: int) -> None:
    """At once, or `turns` iterations of the loop after they began: their requests have no other deadline."""
    loop = asyncio.get_running_loop()
    async with FakeEngine() as engine:
        wheel = TimerWheel(loop)
        pool = ConnectionPool(engine.url, UpstreamLimits(), wheel, UpstreamTls())
        waiter = Connecting()
        pool.acquire(waiter)
        for _ in range(turns):
            await asyncio.sleep(0)
        pool.close()
        await until(lambda: bool(waiter.told))
        assert len(waiter.told) == 1
        wheel.close()


async def test_a_client_that_leaves_during_a_retry_ends_it(
    black_hole: int,
) -> None:
    script = ResumableStream()

    async def begin(connection: Connection, request: Received) -> None:
        connection.begin_stream()
        connection.chunk(events(request)[0])
        await connection.writer.drain()
        connection.die()

    engines = [FakeEngine(script=begin), FakeEngine(script=script)]
    limits = UpstreamLimits(connect_timeout_s=30.0)
    async with rig(engines, policy="round-robin", upstream=limits) as r:
        second = r.replica(1)
        port, second.pool.port = second.pool.port, black_hole
        async with raw(r.router) as (reader, writer):
            writer.write(request_bytes(stream=True))
            await asyncio.wait_for(reader.readuntil(b"role"), DEADLINE_S)
            await r.until(lambda: second.load.inflight == 1)
        await r.until(lambda: is_settled(r))
        assert not engines[1].requests
        assert r.metric("client_disconnects_total") == 1
        second.pool.port = port
        assert fold(await ask(r, STREAM))["choices"][0]["finish"] == ["stop"]


async def test_a_connection_that_comes_after_its_client_left_is_kept_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig([FakeEngine()]) as r:
        pool = r.replica(0).pool
        loop = asyncio.get_running_loop()
        connect, go_on = loop.create_connection, asyncio.Event()

        async def connect_late(factory: Any, host: str, port: int, **options: Any) -> Any:
            if port == pool.port:
                await go_on.wait()
            return await connect(factory, host, port, **options)

        monkeypatch.setattr(loop, "create_connection", connect_late)
        async with raw(r.router) as (_, writer):
            writer.write(request_bytes())
            await r.until(lambda: r.replica(0).load.inflight == 1)
        await r.until(lambda: is_settled(r))
        go_on.set()
        await r.until(lambda: pool.idle == 1)
        assert not r.engines[0].requests
        assert (await r.chat()).status_code == 200
        assert len(r.engines[0].requests) == 1


@pytest.mark.parametrize("has_telemetry", [True, False])
async def test_a_request_that_cannot_be_written_ends_and_blames_no_replica(has_telemetry: bool) -> None:
    async with rig([FakeEngine(has_telemetry=has_telemetry) for _ in range(2)]) as r:
        for replica in r.router.fleet.replicas():
            replica.key.current = "\u20ac"  # no header can have it
        for stream in (False, True, False, True):  # on new connections, then on idle ones
            told = await r.chat(stream=stream)
            assert told.status_code == 500
            assert "could not be sent" in told.json()["error"]["message"]
        await until(lambda: is_settled(r))
        assert not any(replica.health.is_ejected for replica in r.router.fleet.replicas())
        assert not any(engine.requests for engine in r.engines)
        for replica in r.router.fleet.replicas():
            replica.key.current = ""
        assert (await r.chat()).status_code == 200
