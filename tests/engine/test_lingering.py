"""A refused client that is still sending can read the refusal: over real sockets, where a reset would discard it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from argosy_engine.api.http.asgi_layers import RequestLimits
from argosy_http.bounded_protocol import MAX_TURNED_AWAY, ConnectionLimit, HttpLimits

FEW_CONNECTIONS = 2
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def max_connections() -> int:
    """More than a test opens: the server may learn late that a client has closed."""
    return 100


@pytest.fixture
async def port(max_connections: int) -> AsyncIterator[int]:
    """Of a server with the engine's protocol and request limits."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        RequestLimits(answer),
        http=ConnectionLimit.for_server(
            max_connections=max_connections,
            limits=HttpLimits(linger_s=60.0),  # a busy machine sends slowly
        ),
        lifespan="off",
        log_level="critical",
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    yield listener.getsockname()[1]
    server.should_exit = True
    await serving
    listener.close()


def send_all_then_read(port: int, data: bytes) -> bytes:
    """As most HTTP clients do: the answer is read when the whole request has been sent, or sending has failed."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(data)
        while chunk := client.recv(65536):
            received += chunk
    return received


REFUSED = {
    "a body too large": (HEAD + b"connection: close\r\ncontent-length: 40000000\r\n\r\n", 40_000_000, b"413"),
    "another content type": (
        HEAD.replace(b"json", b"xml") + b"connection: close\r\ncontent-length: 8000000\r\n\r\n",
        8_000_000,
        b"400",
    ),
    "HTTP/1.0": (HEAD.replace(b"/1.1", b"/1.0") + b"content-length: 40000000\r\n\r\n", 40_000_000, b"413"),
    "broken chunks": (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 8_000_000, b"400"),
    "headers too large": (HEAD + b"x-a: ", 8_000_000, b"431"),
}


@pytest.mark.parametrize("refused", REFUSED)
async def test_the_answer_arrives_while_the_client_continues_to_send(port: int, refused: str) -> None:
    head, size, status = REFUSED[refused]
    for _ in range(3):
        received = await asyncio.to_thread(send_all_then_read, port, head + b"x" * size)
        assert received.startswith(b"HTTP/1.1 " + status)


async def test_a_request_is_answered_although_no_request_follows_it(port: int) -> None:
    request = HEAD + b"content-length: 2\r\n\r\n{}"
    for after in (
        b"x y z\r\n\r\n",
        b"\0" * 4_000_000,
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\nhost: x\r\n\r\n",
    ):
        received = await asyncio.to_thread(send_all_then_read, port, request + after)
        assert received.startswith(b"HTTP/1.1 200")
        assert received.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("max_connections", [FEW_CONNECTIONS])
async def test_a_connection_too_many_is_told_so_although_it_sends_a_request(
    port: int, max_connections: int
) -> None:
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(max_connections)]
    try:
        for client in held:  # by its answer it is known to be connected
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await loop.sock_recv(client, 100)).startswith(b"HTTP/1.1 200")
        request = HEAD + b"content-length: 4000000\r\n\r\n" + b"x" * 4_000_000
        for _ in range(2 * MAX_TURNED_AWAY):
            assert (await asyncio.to_thread(send_all_then_read, port, request)).startswith(b"HTTP/1.1 503")
    finally:
        for client in held:
            client.close()
