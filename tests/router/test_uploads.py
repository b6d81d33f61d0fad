"""Request bodies being received: who may send one, and the memory that they may use."""

from __future__ import annotations

import asyncio
import gc
import sys

import pytest

from argosy_protocol.errors import Unavailable
from argosy_router.auth.accounts import Account
from argosy_router.config import ServerLimits
from argosy_router.fleet.service import Service
from argosy_router.http.limits import BodyMemory
from argosy_router.proxy.exchange import Exchange

from .fake_engine import Connection, FakeEngine, Received, event
from .harness import Rig, raw, read_all, rig, until
from .raw_requests import HEAD, request
from .uploads import body_of, several

WITH_KEY = HEAD + b"authorization: Bearer k\r\n"


def held_bytes(r: Rig) -> int:
    return r.router.server.body_memory.held


@pytest.mark.parametrize(
    "head",
    [HEAD, HEAD + b"authorization: Bearer wrong\r\n", HEAD.replace(b"/v1/chat/completions", b"/nowhere")],
)
@pytest.mark.parametrize("length", [b"content-length: 30000000\r\n", b"transfer-encoding: chunked\r\n"])
async def test_without_a_key_no_body_is_taken(head: bytes, length: bytes) -> None:
    async with rig([FakeEngine()], api_keys=("k",)) as r, raw(r.router) as (reader, writer):
        writer.write(head + length + b"expect: 100-continue\r\n\r\n")
        answer = await read_all(reader)
        assert answer.startswith(b"HTTP/1.1 401 "), "the answer must not wait for the body, nor ask for it"
        assert b"\r\nx-request-id: " in answer
        assert b"\r\nconnection: close\r\n" in answer


@pytest.mark.parametrize("path", [b"/health", b"/v1/models", b"/nowhere"])
async def test_routes_that_read_no_body_take_little_of_one(path: bytes) -> None:
    head = WITH_KEY.replace(b"/v1/chat/completions", path)
    async with rig([FakeEngine()], api_keys=("k",)) as r:
        for length in (b"content-length: 30000000\r\n", b"transfer-encoding: chunked\r\n"):
            async with raw(r.router) as (reader, writer):
                writer.write(head + length + b"\r\n" + (b"10000\r\n" + b"x" * 0x10000 + b"\r\n"))
                assert (await read_all(reader)).startswith(b"HTTP/1.1 413 ")


async def test_small_chunks_take_no_more_memory_than_their_bytes() -> None:
    pieces = 20_000
    async with rig([FakeEngine()]) as r, raw(r.router) as (_, writer):
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"2\r\nab\r\n" * pieces)
        await until(lambda: held_bytes(r) == 2 * pieces)
        (connection,) = r.router.server.connections
        assert memory_of(connection.reader) < 4 * pieces, "one object per chunk would be 35 bytes each"


async def test_bodies_of_all_clients_together_are_bounded() -> None:
    release = asyncio.Event()

    async def slow(connection: Connection, _: Received) -> None:
        await release.wait()
        connection.answer(200, b"{}")

    limits = ServerLimits(max_body_bytes=50_000, max_inflight_bytes=100_000)
    body = body_of(40_000)
    async with rig([FakeEngine(script=slow)], server=limits) as r, several(r, 3) as streams:
        (first, first_out), (_, second_out), (third, third_out) = streams
        first_out.write(request(body))
        await until(lambda: bool(r.engines[0].requests))
        second_out.write(request(body)[:-1])  # still on its way
        await until(lambda: held_bytes(r) == 2 * len(body) - 1)
        third_out.write(request(body))
        refusal = await read_all(third)
        assert refusal.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: " in refusal
        release.set()
        assert (await first.readline()) == b"HTTP/1.1 200 OK\r\n"
        await until(lambda: held_bytes(r) == len(body) - 1)
        second_out.transport.abort()
        await until(lambda: held_bytes(r) == 0)
        assert (await r.chat("x" * 40_000)).status_code == 200, "what was given back is there for others"


@pytest.mark.parametrize("is_whole", [False, True])
async def test_one_key_leaves_others_memory_for_their_bodies(is_whole: bool) -> None:
    release = asyncio.Event()

    async def slow(connection: Connection, received: Received) -> None:
        if len(received.body) > 1000:
            await release.wait()
        connection.answer(200, b"{}")

    limits = ServerLimits(max_body_bytes=30_000, max_inflight_bytes=100_000)
    body, other = body_of(24_000), HEAD + b"authorization: Bearer other\r\n"
    rigged = rig([FakeEngine(script=slow)], server=limits, api_keys=("k", "other"))
    async with rigged as r, several(r, 6) as streams:
        *mine, (reader, writer) = streams
        for number, (_, out) in enumerate(mine[:3], 1):
            out.write(request(body, WITH_KEY)[: None if is_whole else -1])
            await until(lambda number=number: held_bytes(r) >= number * (len(body) - 1))
        for refused, out in mine[3:]:
            out.write(request(body, WITH_KEY))
            answered = await read_all(refused)
            assert answered.startswith(b"HTTP/1.1 503 ")
            assert b"share" in answered
            assert b"\r\nretry-after: " in answered
        writer.write(request(body_of(100), other))
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
        release.set()
        for _, out in mine:
            out.transport.abort()
        await until(lambda: held_bytes(r) == 0)


def test_a_single_body_may_take_the_whole_memory() -> None:
    memory = BodyMemory(100)
    memory.reserve(60, "a", 0)
    memory.reserve(40, "a", 60)
    with pytest.raises(Unavailable, match="max-inflight-bytes"):
        memory.reserve(1, "b", 0)
    memory.release(100, "a")
    assert memory.held == 0


def test_accounts_share_the_memory_that_is_free() -> None:
    memory = BodyMemory(1600)

    def take(account: str) -> int:
        """Reserve single bytes until they are refused."""
        for number in range(1600):
            try:
                memory.reserve(1, account, 0)
            except Unavailable:
                return number
        return 1600

    granted = {account: take(account) for account in "abc"}
    assert granted == {"a": 1200, "b": 300, "c": 75}
    memory.reserve(25, None, 0)
    for account, size in granted.items():
        memory.release(size, account)
    memory.release(25, None)
    assert take("b") == 1200


async def test_a_begun_stream_keeps_one_copy_of_its_body() -> None:
    async def endless(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("x"))
        await connection.gone()

    size = 300_000
    async with rig([FakeEngine(script=endless)]) as r, raw(r.router) as (reader, writer):
        writer.write(request(body_of(size, stream=True)))
        await reader.readuntil(b"data:")
        (connection,) = r.router.server.connections
        exchange = connection.listener
        assert isinstance(exchange, Exchange)
        parts = [
            part
            for part in gc.get_referents(exchange.outcome.call)
            if not isinstance(part, Service | Account)
        ]
        assert size < memory_of(parts, connection.request, connection.reader) < 1.5 * size, (
            "retries and migration need the body once"
        )


def memory_of(*roots: object) -> int:
    """Bytes that plain data reachable from `roots` takes; shared objects count once."""
    seen: set[int] = set()
    queue, total = list(roots), 0
    while queue:
        thing = queue.pop()
        if id(thing) in seen or callable(thing):
            continue
        seen.add(id(thing))
        total += sys.getsizeof(thing)
        queue += gc.get_referents(thing)
    return total
