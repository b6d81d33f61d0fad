"""Pieces of a body that are written at once: in order, only while the client reads, and only into a chunked body."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from argosy_engine.api.http.http_server import HttpServer
from argosy_http.bounded_protocol import ClientConnection, ConnectionLimit, HttpLimits, client_connection

PIECE = bytes(range(256)) * 256
pytestmark = pytest.mark.timeout(60)

Answer = Callable[[ClientConnection, Any, Any], Awaitable[None]]
START = {"type": "http.response.start", "status": 200, "headers": []}


class Served:
    """A server that answers each request by a function of the test."""

    def __init__(self) -> None:
        self.answer: Answer
        config = uvicorn.Config(
            self._app,
            http=ConnectionLimit.for_server(max_connections=50, limits=HttpLimits()),
            lifespan="off",
            log_config=None,
            log_level="critical",
            interface="asgi3",
        )
        self.server = HttpServer(config)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.serving = asyncio.create_task(self.server.serve([self.listener]))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        direct = client_connection(scope)
        assert direct is not None
        await self.answer(direct, receive, send)

    async def ask(self, method: bytes = b"GET") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.listener.getsockname(), limit=1 << 16)
        writer.write(method + b" / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        return reader, writer


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = Served()
    yield made
    made.server.stop(0)
    await made.serving


def piece(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def body_of(reader: asyncio.StreamReader) -> bytes:
    """Read a chunked response to its end."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    return body


async def test_pieces_keep_their_order(served: Served) -> None:
    seen: list[bool] = []

    async def answer(direct: ClientConnection, _: Any, send: Any) -> None:
        seen.append(direct.is_ready)
        await send(START)
        await send(piece(b"first "))
        seen.append(direct.is_ready)
        direct.write(b"second ")
        direct.write(b"third ")
        await send(piece(b"last", more=False))
        seen.append(direct.is_ready)

    served.answer = answer
    reader, writer = await served.ask()
    assert await body_of(reader) == b"first second third last"
    assert seen == [False, True, False]
    writer.close()


async def test_nothing_is_written_while_the_client_does_not_read(served: Served) -> None:
    is_full = asyncio.Event()
    count = 0

    async def answer(direct: ClientConnection, _: Any, send: Any) -> None:
        nonlocal count
        await send(START)
        await send(piece(PIECE))
        while direct.is_ready:
            assert (count := count + 1) < 1000, "it buffers without a bound"
            direct.write(PIECE)
            await asyncio.sleep(0)
        is_full.set()
        await send(piece(b"end", more=False))  # waits for the client

    served.answer = answer
    reader, writer = await served.ask()
    await is_full.wait()
    assert count
    assert await body_of(reader) == PIECE * (count + 1) + b"end"
    writer.close()


async def test_nothing_is_written_for_a_client_that_has_left(served: Served) -> None:
    after: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def answer(direct: ClientConnection, receive: Any, send: Any) -> None:
        await send(START)
        await send(piece(b"x"))
        assert direct.is_ready
        while (await receive())["type"] != "http.disconnect":
            pass
        after.set_result(direct.is_ready)

    served.answer = answer
    reader, writer = await served.ask()
    await reader.readuntil(b"x")
    writer.close()
    assert not await after


@pytest.mark.parametrize(("method", "headers"), [(b"GET", [(b"content-length", b"4")]), (b"HEAD", [])])
async def test_a_body_of_known_length_and_none_are_sent_as_usual(
    served: Served, method: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def answer(direct: ClientConnection, _: Any, send: Any) -> None:
        await send({**START, "headers": headers})
        ready.set_result(direct.is_ready)
        await send(piece(b"body", more=False))

    served.answer = answer
    reader, writer = await served.ask(method)
    assert not await ready
    await reader.read()
    writer.close()


def test_a_request_without_a_connection_of_its_own_has_none() -> None:
    """As one that another process relays."""
    assert client_connection({"type": "http"}) is None


@pytest.mark.parametrize("num_requests", [1, 2, 3])
async def test_a_disconnect_ends_the_request_that_runs(served: Served, num_requests: int) -> None:
    """Pipelined requests wait behind it, and never begin."""
    told, begun = asyncio.Event(), []

    async def answer(direct: ClientConnection, receive: Any, send: Any) -> None:
        begun.append(direct)
        await send(START)
        await send(piece(b"x"))
        while (await receive())["type"] != "http.disconnect":
            pass
        told.set()

    served.answer = answer
    reader, writer = await asyncio.open_connection(*served.listener.getsockname())
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * num_requests)
    await reader.readuntil(b"x\r\n")
    writer.transport.abort()
    await told.wait()
    assert [direct.is_ready for direct in begun] == [False]


async def test_a_disconnect_ends_the_second_of_pipelined_requests(served: Served) -> None:
    told, num_begun = asyncio.Event(), 0

    async def answer(direct: ClientConnection, receive: Any, send: Any) -> None:
        nonlocal num_begun
        num_begun += 1
        await send(START)
        await send(piece(b"x", more=num_begun > 1))
        if num_begun > 1:
            while (await receive())["type"] != "http.disconnect":
                pass
            told.set()

    served.answer = answer
    reader, writer = await asyncio.open_connection(*served.listener.getsockname())
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 3)
    await reader.readuntil(b"0\r\n\r\n")
    await reader.readuntil(b"x\r\n")
    writer.transport.abort()
    await told.wait()
    assert num_begun == 2
