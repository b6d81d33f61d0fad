"""Clients that send requests without reading the answers use bounded memory and keep nobody else out."""

from __future__ import annotations

import asyncio
import contextlib
from typing import cast

import pytest

from argosy_router.config import ServerLimits
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.messages import Request
from argosy_router.http.server_connection import (
    FEED_BYTES,
    PIECE_BYTES,
    PLAIN_PIECE_BYTES,
    REQUESTS_PER_TURN,
    TLS_BUFFER_BYTES,
    ServerConnection,
    ServerState,
)

from .fake_engine import DONE, Connection, FakeEngine, Received, event
from .harness import DEADLINE_S, TICK_S, StoppedClock, raw, read_all, rig
from .raw_requests import answer, request_bytes, stop_reading
from .server_in_memory import Clock, Recorder, Wire

KEY_LINE = b"\r\nauthorization: Bearer k\r\n"
PUBLIC = b"GET /version HTTP/1.1\r\nhost: a\r\nx-request-id: " + b"i" * 128 + b"\r\n\r\n"
"""On a route that needs no key."""
LAST = PUBLIC.replace(b"host: a", b"host: a\r\nconnection: close")
MAX_CONNECTIONS = 4
LONG = 128 * 1024
"""Bytes of an answer that its client does not read."""


@pytest.mark.parametrize("last", [b"", LAST], ids=["left open", "closing"])
@pytest.mark.parametrize("count", [60, 2000], ids=["a few", "more than are answered"])
async def test_unread_answers_of_unauthenticated_clients_block_no_client(count: int, last: bytes) -> None:
    limits = ServerLimits(
        max_connections=MAX_CONNECTIONS, write_buffer_bytes=1024, surplus_timeout_s=DEADLINE_S
    )
    async with (
        rig([FakeEngine()], server=limits, api_keys=("k",)) as r,
        contextlib.AsyncExitStack() as stack,
    ):
        streams = [await stack.enter_async_context(raw(r.router)) for _ in range(MAX_CONNECTIONS)]
        await r.until(lambda: len(r.router.server.connections) == MAX_CONNECTIONS)
        for _, writer in streams:
            stop_reading(r, writer)
            writer.write(PUBLIC * count + last)
        await r.until(lambda: all(connection.is_behind for connection in r.router.server.connections))
        async with raw(r.router) as (reader, writer):
            writer.write(request_bytes().replace(b"\r\n", KEY_LINE, 1))
            assert (await answer(reader))[0] == 200


class FullWire(Wire):
    """A client that takes one answer at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.is_read = True
        self.connection: ServerConnection | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        super().write(data)
        if self.connection is not None:
            self.connection.pause_writing()

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


async def test_requests_sent_ahead_leave_the_loop_to_others() -> None:
    recorder, wire, count = Recorder(), FullWire(), 100
    wheel = TimerWheel(cast("asyncio.AbstractEventLoop", Clock()))
    connection = ServerConnection(ServerState(recorder, ServerLimits(), wheel))
    connection.connection_made(wire)
    connection.data_received(PUBLIC * count)
    turns = 0
    while len(recorder.messages) < count:
        assert len(recorder.messages) == (turns + 1) * REQUESTS_PER_TURN
        assert not wire.is_read
        await asyncio.sleep(0)
        turns += 1
    assert wire.is_read
    assert not wire.is_closed


async def test_requests_wait_until_the_answers_before_them_are_read() -> None:
    recorder, wire, count = Recorder(), FullWire(), 100
    wheel = TimerWheel(cast("asyncio.AbstractEventLoop", Clock()))
    wire.connection = connection = ServerConnection(ServerState(recorder, ServerLimits(), wheel))
    connection.connection_made(wire)
    connection.data_received(PUBLIC * count)
    for answered in range(1, count + 1):
        assert len(recorder.messages) == answered
        assert wire.is_read == (answered == count)
        connection.resume_writing()
    assert wire.is_read
    assert not wire.is_closed


async def test_requests_that_wait_for_a_slow_client_are_not_all_parsed() -> None:
    """Parsed, short ones take twenty times their bytes, and count nowhere while there is no key."""
    recorder, wire = Recorder(), FullWire()
    wheel = TimerWheel(cast("asyncio.AbstractEventLoop", Clock()))
    wire.connection = connection = ServerConnection(ServerState(recorder, ServerLimits(), wheel))
    connection.connection_made(wire)
    sent = b"GET /ping HTTP/1.1\r\nhost: a\r\n\r\n"
    count = 256 * 1024 // len(sent)
    connection.data_received(sent * count)
    while len(recorder.messages) < count:
        assert len(connection.reader.ready) <= FEED_BYTES // len(sent) + 1
        connection.resume_writing()
        await asyncio.sleep(0)
    assert wire.sent.count(b"HTTP/1.1 200") == count


def asking(key: str, **fields: object) -> bytes:
    head = b"\r\nconnection: close\r\nauthorization: Bearer " + key.encode() + b"\r\n"
    return request_bytes(**fields).replace(b"\r\n", head, 1)


async def answer_at_length(connection: Connection, received: Received) -> None:
    if received.json.get("stream"):
        connection.begin_stream()
        connection.chunk(event("x" * LONG) + DONE)
        connection.end_stream()
    else:
        connection.answer(200, b'{"x":"%b"}' % (b"x" * (LONG - 100)))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_answers_that_one_key_does_not_read_leave_memory_to_another(stream: bool) -> None:
    """They counted nowhere, and each connection held a megabyte for a minute."""
    limits = ServerLimits(max_inflight_bytes=8 * LONG, max_body_bytes=LONG)
    async with (
        rig([FakeEngine(script=answer_at_length)], server=limits, api_keys=("hostile", "other")) as r,
        contextlib.AsyncExitStack() as stack,
    ):
        server = r.router.server

        async def leave_unread(key: str) -> None:
            connected = len(server.connections)
            _, writer = await stack.enter_async_context(raw(r.router))
            await r.until(lambda: len(server.connections) > connected)
            stop_reading(r, writer)
            held, cut = server.body_memory.held, server.unread_cut
            writer.write(asking(key, stream=stream))
            await r.until(lambda: server.body_memory.held > held + LONG // 2 or server.unread_cut > cut)
            await r.until(lambda: r.router.requests.inflight == 0)
            await r.until(lambda: len(server.connections) + server.unread_cut > connected)

        number = 0
        while not server.unread_cut:
            await leave_unread("hostile")
            number += 1
        assert number < 24
        assert 4 * LONG < server.body_memory.held <= 6 * LONG
        held = server.body_memory.held
        await leave_unread("other")
        assert server.body_memory.held > held + LONG // 2
        assert (len(server.connections), r.metric("unread_responses_cut_total")) == (number, 1)
    assert server.body_memory.held == 0


class FullTls(FullWire):
    """The same over TLS."""

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self if name == "sslcontext" else default


class LongAnswer(Recorder):
    """An application that streams long events."""

    def on_request(self, connection: ServerConnection, request: Request) -> None:
        connection.start(200, b"", b"begin")
        for _ in range(2):
            connection.send(b"x" * (4 * LONG))
        connection.send(b"end")
        connection.finish()


@pytest.mark.parametrize("request_", [PUBLIC, LAST], ids=["left open", "closing"])
@pytest.mark.parametrize(("wire", "size"), [(FullTls, PIECE_BYTES), (FullWire, PLAIN_PIECE_BYTES)])
async def test_of_an_answer_that_is_not_read_the_transport_has_a_piece(
    request_: bytes, wire: type[FullWire], size: int
) -> None:
    """A transport of TLS does not tell what it has. What was read does not count any more: of slow clients the metric
    showed the most that each had left unread."""
    limits, clock, client = ServerLimits(), StoppedClock(), wire()
    wheel = TimerWheel(asyncio.get_running_loop(), TICK_S, clock)
    state = ServerState(LongAnswer(), limits, wheel)
    client.connection = connection = ServerConnection(state)
    connection.connection_made(client)
    connection.data_received(request_)
    read = 0
    while connection.is_behind:
        unread = 8 * LONG - client.sent.count(b"x")
        assert not unread or unread - size <= state.body_memory.held <= unread + 4 * LONG + TLS_BUFFER_BYTES
        written = len(client.sent)
        assert not client.is_closed
        connection.resume_writing()
        assert len(client.sent) <= written + size
        if len(client.sent) - read >= limits.min_body_rate * limits.write_stall_s:  # as slowly as it may
            read = len(client.sent)
            await clock.advance(wheel, limits.write_stall_s)
    assert client.sent.endswith(b"x\r\n3\r\nend\r\n0\r\n\r\n")
    assert client.sent.count(b"x") == 8 * LONG
    assert client.is_closed  # one that was left open as idle
    assert state.body_memory.held == 0
    wheel.close()


async def test_a_client_that_sends_no_more_reads_the_rest_of_its_answer() -> None:
    async with rig([FakeEngine(script=answer_at_length)]) as r, raw(r.router) as (reader, writer):
        await r.until(lambda: bool(r.router.server.connections))
        stop_reading(r, writer)
        writer.write(request_bytes())
        await r.until(lambda: r.router.server.body_memory.held > LONG // 2)
        await r.until(lambda: r.router.requests.inflight == 0)
        writer.write_eof()
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert (await read_all(reader)).count(b"x") >= LONG - 100


class SlowWire(Wire):
    """A client that has read all but this."""

    unread = 1_000_000
    is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize("request_", [PUBLIC, LAST], ids=["left open", "closing"])
async def test_a_client_that_reads_slowly_is_not_one_that_does_not_read(request_: bytes) -> None:
    limits, clock, wire = ServerLimits(), StoppedClock(), SlowWire()
    wheel = TimerWheel(asyncio.get_running_loop(), TICK_S, clock)
    connection = ServerConnection(ServerState(Recorder(), limits, wheel))
    connection.connection_made(wire)
    connection.data_received(request_)
    connection.pause_writing()
    for _ in range(10):
        wire.unread -= int(limits.min_body_rate * limits.write_stall_s)
        await clock.advance(wheel, limits.write_stall_s)
        assert not wire.is_aborted
    await clock.advance(wheel, limits.write_stall_s)
    assert wire.is_aborted
    wheel.close()
