"""A replica that stops without dying (SIGSTOP, a frozen machine): connections stay open, nothing answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from argosy_protocol.telemetry import Load
from argosy_router.fleet.links import telemetry_client

from .fake_engine import Connection, FakeEngine, Received, event
from .harness import DEADLINE_S, Rig, raw, rig
from .raw_requests import request_bytes


class Mortal(FakeEngine):
    """Has a heartbeat until it is stopped; then it accepts connections and does nothing."""

    is_stopped = False

    async def beat(self) -> None:
        while not self.is_stopped:
            self.announce(Load(core_step_age_s=0.0))
            await asyncio.sleep(0.01)

    async def handle(self, connection: Connection, request: Received) -> None:
        if self.is_stopped:
            if request.path.startswith("/v1/"):
                self.requests.append(request)
            await connection.gone()
            return
        await super().handle(connection, request)


@contextlib.asynccontextmanager
async def beating(engines: list[Mortal]) -> AsyncIterator[Rig]:
    async with rig(engines, policy="round-robin") as r:
        beats = [asyncio.create_task(engine.beat()) for engine in engines]
        try:
            yield r
        finally:
            for beat in beats:
                beat.cancel()


@pytest.fixture(autouse=True)
def heartbeats_are_missed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_client, "STALE_AFTER_S", 1.0)
    monkeypatch.setattr(telemetry_client, "HEAD_TIMEOUT_S", 1.0)


async def test_requests_it_has_not_begun_to_answer_move_on() -> None:
    engines = [Mortal(), Mortal()]
    async with beating(engines) as r:
        engines[0].is_stopped = True
        answers = await asyncio.gather(*[r.chat(str(n), stream=n % 2 == 1) for n in range(8)])
        assert {answer.status_code for answer in answers} == {200}
        assert engines[0].requests, "some were sent to it"
        assert {answer.headers["x-argosy-replica"] for answer in answers} == {"r1"}
        assert r.metric('retries_total{model="tiny",reason="first_byte_timeout"}') == len(engines[0].requests)
        sent = len(engines[0].requests)
        assert {(await r.chat(str(n))).headers["x-argosy-replica"] for n in range(6)} == {"r1"}
        assert len(engines[0].requests) == sent, "a suspect gets nothing new"


async def test_a_head_alone_does_not_keep_a_stream() -> None:
    async def begin(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        await connection.gone()

    engines = [Mortal(script=begin), Mortal()]
    async with beating(engines) as r:
        asked = [asyncio.create_task(r.chat(str(n), stream=True)) for n in range(4)]
        await r.until(lambda: bool(engines[0].requests))
        engines[0].is_stopped = True
        assert {(await answer).headers["x-argosy-replica"] for answer in asked} == {"r1"}


async def test_an_unresponsive_replica_is_used_again_once_it_continues() -> None:
    engines = [Mortal(), Mortal()]
    async with beating(engines) as r:
        engines[0].is_stopped = True
        await r.until(lambda: r.replica(0).health.is_suspect)
        engines[0].is_stopped = False
        beat = asyncio.create_task(engines[0].beat())
        engines[0].cut_telemetry()
        await r.until_state(0, "synced")
        assert {(await r.chat(str(n))).headers["x-argosy-replica"] for n in range(4)} == {"r0", "r1"}
        beat.cancel()


async def test_without_another_replica_requests_keep_waiting() -> None:
    engine = Mortal()
    go_on = asyncio.Event()

    async def late(connection: Connection, _: Received) -> None:
        await go_on.wait()
        connection.answer(200, b'{"late":true}')

    engine.script = late
    async with beating([engine]) as r:
        answer = asyncio.create_task(r.chat())
        await r.until(lambda: bool(engine.requests))
        engine.is_stopped = True
        await r.until(lambda: r.replica(0).health.is_suspect)
        go_on.set()
        assert (await answer).json() == {"late": True}


async def test_streams_it_has_begun_end_once_it_is_certainly_gone() -> None:
    async def begin(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("hel"))
        await connection.gone()

    engines = [Mortal(script=begin), Mortal()]
    async with beating(engines) as r, raw(r.router) as (reader, writer):
        writer.write(request_bytes(stream=True))
        await reader.readuntil(b"hel")
        engines[0].is_stopped = True
        await r.until(lambda: r.replica(0).health.is_suspect)
        connections = engines[0].connections
        await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), DEADLINE_S)
        assert engines[0].connections > connections, "not before a new connection went unanswered"
