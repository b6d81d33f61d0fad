"""Connections on both hops: reuse, idle timeouts, and no delay of small writes."""

from __future__ import annotations

import asyncio
import socket

from argosy_router.config import ServerLimits, UpstreamLimits

from .fake_engine import DONE, Connection, FakeEngine, Received, completion, event
from .harness import StoppedClock, raw, read_all, read_until, rig
from .raw_requests import request_bytes


async def test_the_connection_released_last_is_the_next_one_used() -> None:
    used: dict[str, Connection] = {}
    may_end = {name: asyncio.Event() for name in ("first", "second", "third")}

    async def wait(connection: Connection, request: Received) -> None:
        name = request.json["messages"][0]["content"]
        used[name] = connection
        if name in may_end:
            await may_end[name].wait()
        connection.answer(200, completion())

    async with rig([FakeEngine(script=wait)]) as r:
        asking = {name: asyncio.create_task(r.chat(name)) for name in may_end}
        await r.until(lambda: len(used) == len(may_end))
        assert len({id(connection) for connection in used.values()}) == len(may_end)
        for name in ("first", "third", "second"):
            may_end[name].set()
            assert (await asking[name]).status_code == 200
        for name in ("next", "one more"):
            assert (await r.chat(name)).status_code == 200
            assert used[name] is used["second"], "the others go cold"


async def test_an_upstream_connection_is_closed_once_it_was_idle_too_long() -> None:
    async with rig([FakeEngine()], clock=StoppedClock()) as r:
        engine, pool = r.engines[0], r.replica(0).pool
        before, standing = engine.connections, len(engine.writers)
        for number in range(2):
            assert (await r.chat()).status_code == 200
            assert engine.connections == before + number + 1
            await r.pass_time(UpstreamLimits().keep_alive_s)
            await r.until(lambda: pool.idle == 0 and len(engine.writers) == standing)


async def test_a_replica_is_not_silent_while_its_client_is_behind() -> None:
    big = event("x" * 900_000)

    async def fall_silent(connection: Connection, request: Received) -> None:
        # A body until the connection's end: behind its last byte nothing more arrives.
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        connection.send(big if b"much" in request.body else event("little"))
        await connection.gone()

    async with (
        rig(
            [FakeEngine(script=fall_silent)],
            server=ServerLimits(write_buffer_bytes=1024, write_stall_s=3600.0),
            clock=StoppedClock(),
        ) as r,
        raw(r.router) as (reader, writer),
    ):
        await r.until(lambda: bool(r.router.server.connections))
        (connection,) = r.router.server.connections
        for end, buffer in ((writer.transport, socket.SO_RCVBUF), (connection.transport, socket.SO_SNDBUF)):
            end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, buffer, 32768)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        ask = request_bytes(content="much", stream=True)
        writer.write(ask.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1))
        await r.until(lambda: connection.is_behind)
        silent = event("little") + b'data: {"error":'
        asked = asyncio.create_task(r.chat(stream=True))
        await r.until_answering(0, attempts=2)
        await r.pass_time(UpstreamLimits().idle_timeout_s)
        assert (await asked).content.startswith(silent), "the time has passed"
        assert r.metric("interrupted_streams_total") == 1, "and ended one of the two"
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = await read_until(reader, lambda data: len(data) > len(big))
        await r.pass_time(UpstreamLimits().idle_timeout_s)
        answer += await read_all(reader)
        assert b'data: {"error":' in answer[-1000:], "from then on it counts again"


async def test_no_hop_waits_for_more_to_send() -> None:
    may_end = asyncio.Event()

    async def stream(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("hel"))
        await may_end.wait()
        connection.chunk(DONE)
        connection.end_stream()

    async with rig([FakeEngine(script=stream)]) as r, raw(r.router) as (reader, writer):
        writer.write(request_bytes(stream=True))
        await reader.readuntil(event("hel"))
        (downstream,) = r.router.server.connections
        (upstream,) = r.replica(0).pool.connections
        for hop in (downstream, upstream):
            end = hop.transport.get_extra_info("socket")
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), hop
        may_end.set()
        await reader.readuntil(DONE)
