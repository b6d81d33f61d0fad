"""Clients that disconnect or read slowly: the engine's request is aborted or paused."""

from __future__ import annotations

import asyncio
import json

import pytest

from argosy_router.config import ServerLimits

from .fake_engine import Connection, FakeEngine, Received, event
from .harness import DEADLINE_S, chat, raw, rig


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
