"""Clients that disconnect or read slowly: the engine's request is aborted or paused."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from argosy_protocol.errors import ApiError
from argosy_router.config import ServerLimits
from argosy_router.http.deadlines import STEPS_PER_TURN, TimerWheel
from argosy_router.http.messages import Client, Request
from argosy_router.http.server_connection import ServerConnection, ServerState

from .fake_engine import Connection, FakeEngine, Received, event
from .harness import DEADLINE_S, chat, raw, rig
from .server_in_memory import Wire


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["reset", "half-close"])
async def test_a_client_that_leaves_aborts_the_engine(stream: bool, how: str) -> None:
    aborted = asyncio.Event()
    working = asyncio.Event()

    async def work(connection: Connection, _: Received) -> None:
        if stream:
            connection.begin_stream()
            connection.chunk(event("hel"))
        working.set()
        await connection.gone()
        aborted.set()

    async with rig([FakeEngine(script=work)]) as r, raw(r.router) as (_, writer):
        body = json.dumps(chat(stream=stream)).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await asyncio.wait_for(working.wait(), DEADLINE_S)
        if how == "reset":
            writer.transport.abort()
        else:
            writer.write_eof()
        await r.until(lambda: r.router.requests.inflight == 0)
        for _ in range(10_000):  # turns of the loop, not long: no timer stands between
            if not aborted.is_set():
                await asyncio.sleep(0)
        assert aborted.is_set()
        assert r.replica(0).load.inflight == 0
        assert r.metric("client_disconnects_total") == 1


async def test_a_slow_reader_pauses_the_engine_and_is_cut_off() -> None:
    sent = 0
    aborted = asyncio.Event()

    async def pour(connection: Connection, _: Received) -> None:
        nonlocal sent
        connection.begin_stream()
        connection.writer.transport.set_write_buffer_limits(high=1)
        try:
            while sent < 500_000_000:
                connection.chunk(event("x" * 65536))
                await connection.writer.drain()
                sent += 65536
        except ConnectionError:
            aborted.set()

    limits = ServerLimits(write_stall_s=0.2)
    async with rig([FakeEngine(script=pour)], server=limits) as r, raw(r.router) as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        body = json.dumps(chat(stream=True)).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await asyncio.wait_for(aborted.wait(), DEADLINE_S)
        assert sent < 50_000_000, "the engine was paused when the sockets' buffers were full"
        await r.until(lambda: r.router.requests.inflight == 0)


class Answering:
    """Answers nothing, and notes in which turn of the event loop its client is lost."""

    def __init__(self, turns: list[int]) -> None:
        self._turns = turns
        self.clients: list[Client] = []
        self.lost: list[int] = []

    def on_head(self, request: Request) -> bool:
        return True

    def on_refused(self, error: ApiError, request: Request | None) -> tuple[bytes, bytes]:
        raise AssertionError(error)

    def on_request(self, client: Client, request: Request) -> None:
        self.clients.append(client)
        client.attach(self)

    def on_client_lost(self) -> None:
        self.lost.append(self._turns[0])

    def on_client_paused(self) -> None:
        pass

    def on_client_resumed(self) -> None:
        pass


class ClosedWire(Wire):
    """A transport that is closed once it was aborted, as uvloop's."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.is_closed
        super().write(data)


@pytest.mark.parametrize("how", ["reset", "half-close"])
async def test_of_many_clients_that_leave_at_once_a_few_are_told_in_each_turn(how: str) -> None:
    """One with a thousand streams, of which each took up to half a millisecond, held the event loop for as many."""
    turns = [0]
    loop = asyncio.get_running_loop()
    application = Answering(turns)
    state = ServerState(application, ServerLimits(), TimerWheel(loop))
    connections = [ServerConnection(state) for _ in range(4 * STEPS_PER_TURN)]
    for connection in connections:
        connection.connection_made(ClosedWire())
        connection.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        connection.start(200, b"", b"begun")
    for connection in connections:
        if how == "half-close":
            connection.eof_received()
        connection.transport.abort()
        connection.connection_lost(None)
    assert 0 < len(application.lost) <= STEPS_PER_TURN
    for client in application.clients[-2:]:
        client.send(b"goes on")
    application.clients[-1].finish()
    while state.wheel.losses.are_waiting:
        turns[0] += 1
        await asyncio.sleep(0)
    assert len(application.lost) == len(connections) - 1, "one has answered meanwhile"
    assert max(Counter(application.lost).values()) <= 2 * STEPS_PER_TURN
    assert not state.connections
    state.wheel.close()
