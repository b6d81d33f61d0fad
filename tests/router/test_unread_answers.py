"""Clients that send requests without reading the answers use bounded memory and keep nobody else out."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import cast

import pytest

from argosy_router.config import ServerLimits
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.server_connection import REQUESTS_PER_TURN, ServerConnection, ServerState

from .fake_engine import FakeEngine
from .harness import DEADLINE_S, raw, rig
from .raw_requests import answer, request_bytes
from .server_in_memory import Clock, Recorder, Wire

KEY_LINE = b"\r\nauthorization: Bearer k\r\n"
PUBLIC = b"GET /version HTTP/1.1\r\nhost: a\r\nx-request-id: " + b"i" * 128 + b"\r\n\r\n"
"""On a route that needs no key."""
LAST = PUBLIC.replace(b"host: a", b"host: a\r\nconnection: close")
MAX_CONNECTIONS = 4


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
        for connection in r.router.server.connections:
            end = connection.transport.get_extra_info("socket")
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for _, writer in streams:
            writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
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
