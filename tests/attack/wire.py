"""A small HTTP/1.1 client with one connection per request, which records when each piece of a response arrives.

Owns bytes and their arrival times. Must not know what is asked, or what the answer should be. A full client library
would spend more CPU on the attack than the fleet spends on defending itself.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import httptools

HOST = "127.0.0.1"
MAX_RESPONSE_BYTES = 64 << 20
"""No legitimate response is this large; larger ones are cut off and count as broken."""


class Broken(Exception):
    """The connection ended before a complete response, or the response is not HTTP."""


@dataclass
class Response:
    """A complete response. Times are on `time.monotonic`'s clock."""

    status: int
    body: bytes
    sent_at: float
    arrivals: list[float] = field(default_factory=list)
    """Arrival times of the body's pieces; for a stream, nearly one per event."""
    ended_at: float = 0.0

    def json(self) -> Any:
        return json.loads(self.body)


def head(method: str, path: str, length: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"host: {HOST}", "connection: close"]
    if length or method == "POST":
        lines += [f"content-length: {length}", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def encoded(body: object) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


class _Exchange(asyncio.Protocol):
    """One request and its response."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self.began = asyncio.Event()
        """Set when the first piece of the body arrived, or the exchange failed."""
        self.arrivals: list[float] = []
        self.whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def body(self) -> bytes:
        return bytes(self._body)

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)
        self.sent_at = time.monotonic()
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"no HTTP: {error}")

    def on_body(self, data: bytes) -> None:
        self._body += data
        self.arrivals.append(time.monotonic())
        self.began.set()
        if len(self._body) > MAX_RESPONSE_BYTES:
            self._fail("the response is endless")

    def on_message_complete(self) -> None:
        if not self.whole.done():
            self.whole.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the connection ended after {len(self._body)} bytes of the body: {error}")

    def _fail(self, reason: str) -> None:
        self.began.set()
        if not self.whole.done():
            self.whole.set_exception(Broken(reason))
            self.whole.exception()  # marks it as retrieved: a client that left on purpose never awaits it
        self.transport.abort()


async def ask(
    port: int,
    path: str,
    body: object = None,
    *,
    key: str = "",
    headers: Mapping[str, str] | None = None,
    method: str = "",
    timeout_s: float = 60.0,
) -> Response:
    """Send one request and read its complete response.

    Raises:
        Broken: the response is incomplete or not HTTP.
        TimeoutError: the response is not complete within `timeout_s`.
        OSError: the connection could not be opened.
    """
    content = b"" if body is None else encoded(body)
    method = method or ("GET" if body is None else "POST")
    request = head(method, path, len(content), {**bearer(key), **(headers or {})}) + content
    async with asyncio.timeout(timeout_s):
        exchange = await _open(port, request)
        try:
            await exchange.whole
        finally:
            exchange.transport.abort()
    return Response(exchange.status, exchange.body, exchange.sent_at, exchange.arrivals, time.monotonic())


async def _open(port: int, request: bytes) -> _Exchange:
    loop = asyncio.get_running_loop()
    _, exchange = await loop.create_connection(lambda: _Exchange(request), HOST, port)
    return exchange


async def leave(port: int, path: str, body: object, *, key: str, after_events: int, wait_s: float) -> None:
    """Send a request and reset the connection after `wait_s`, counted from the body's first piece if `after_events`."""
    content = encoded(body)
    exchange = await _open(port, head("POST", path, len(content), bearer(key)) + content)
    try:
        async with asyncio.timeout(10.0):
            if after_events:
                await exchange.began.wait()
            await asyncio.sleep(wait_s)
    finally:
        reset(exchange.transport)


def reset(transport: asyncio.WriteTransport) -> None:
    """Close a connection with a TCP RST, as the kernel may for a client that was killed."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


async def raw(port: int, *pieces: bytes, pause_s: float = 0.0, listen_s: float = 5.0) -> bytes:
    """Write pieces with pauses between them; return what arrives until the server closes or `listen_s` passes."""
    reader, writer = await asyncio.open_connection(HOST, port)
    received = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            if pause_s:
                await asyncio.sleep(pause_s)
        async with asyncio.timeout(listen_s):
            while data := await reader.read(65536):
                received += data
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
    return received


def status_of(received: bytes) -> int:
    """Return the status of a raw response, 0 if there is none."""
    words = received.split(b" ", 2)
    return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/1.") else 0
