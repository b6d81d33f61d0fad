"""HTTP client of the load generator: keep-alive connections on httptools that cost little CPU per event.

Owns: connections, their pool, TLS and deadlines. Must not know: what is asked, and what an answer means.
Invariant: a connection carries one request at a time, and one on which anything went wrong is closed.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Final, cast
from urllib.parse import urlsplit

import httptools

CONNECT_TIMEOUT_S: Final = 60.0
REQUEST_TIMEOUT_S: Final = 6 * 3600.0
"""vLLM's: a request may wait long in a full server's queue."""

Receiver = Callable[[int, float, bytes], None]
"""Takes (status, time of arrival by `time.perf_counter`, bytes of the body)."""


class HttpFailure(Exception):
    """There is no whole answer; the message says why."""


class NoConnection(HttpFailure):
    """Nobody could be reached at the address."""


class _Stale(HttpFailure):
    """A kept connection was closed before the first byte of an answer: the request may be sent again."""


class StreamingHttp:
    """Client of one server. Connections are opened as requests need them, and kept.

    Args:
        base_url: `http://HOST[:PORT][/PREFIX]` or https.
        headers: of every request.
        verifies: whether to verify the certificate of an https:// URL.

    Raises (from the constructor):
        ValueError: not an http:// or https:// URL, or a header that cannot be sent.
    """

    def __init__(
        self, base_url: str, headers: Mapping[str, str] | None = None, *, verifies: bool = True
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{base_url!r} is not an http:// or https:// URL")
        self._host = parts.hostname
        self._tls = _tls(verifies) if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self.url = f"{parts.scheme}://{parts.netloc}{self._prefix}"
        given = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", **(headers or {})}
        self._headers = "".join(_header(name, value) for name, value in given.items())
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def request(
        self,
        method: str,
        path: str,
        receive: Receiver,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> int:
        """Send a request, and give its answer's bytes to `receive` as they arrive; return the status.

        Raises:
            NoConnection: the server cannot be reached.
            HttpFailure: the answer broke off, is not HTTP, or took too long; or `receive` raised an error.
        """
        own = "".join(_header(name, value) for name, value in (headers or {}).items())
        if body:
            own += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        message = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{own}\r\n".encode() + body
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                while (connection := self._kept()) is not None:
                    try:
                        return await self._exchange(connection, message, receive)
                    except _Stale:
                        continue
                return await self._exchange(await self._connect(), message, receive)
        except TimeoutError:
            raise HttpFailure(f"no whole answer within {REQUEST_TIMEOUT_S:.0f} s") from None

    async def close(self) -> None:
        """Close all connections."""
        self._idle.clear()
        for connection in list(self._open):
            connection.close()
            await connection.ended.wait()

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._open), self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise NoConnection(f"no connection within {CONNECT_TIMEOUT_S:.0f} s") from None
        except OSError as error:
            raise NoConnection(_reason(error)) from None
        return connection

    async def _exchange(self, connection: _Connection, message: bytes, receive: Receiver) -> int:
        try:
            status = await connection.send(message, receive)
        except BaseException:
            connection.close()
            raise
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return status


class _Connection(asyncio.Protocol):
    """One connection, and the answer that it is waiting for. The parser calls the methods `on_...`.

    Args:
        connections: has this one while it is open.
    """

    def __init__(self, connections: set[_Connection]) -> None:
        self._connections = connections
        self.ended = asyncio.Event()
        self.is_closed = False
        self.is_reusable = False
        self._answer: asyncio.Future[int] | None = None
        self._has_answered = False
        self._has_bytes = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._connections.add(self)

    async def send(self, message: bytes, receive: Receiver) -> int:
        """Send a request; return the status after the last byte of its answer.

        Raises:
            HttpFailure: as `StreamingHttp.request`.
        """
        self._answer = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._receive = receive
        self._status = 0
        self._has_bytes = self._is_framed = self.is_reusable = False
        self._transport.write(message)
        return await self._answer

    def close(self) -> None:
        self.is_closed = True
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.close()  # bytes that no request asked for
            return
        self._now = time.perf_counter()
        self._has_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(HttpFailure(str(error.__context__ or error)))
        except httptools.HttpParserError as error:
            self._fail(HttpFailure(f"the answer is not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        self._connections.discard(self)
        self.ended.set()
        if self._answer is None or self._answer.done():
            return
        if self._status and not self._is_framed:
            self._finish()  # the end of the connection is the end of the body
        elif self._has_answered and not self._has_bytes:
            self._fail(_Stale("the server closed the connection"))
        else:
            detail = f": {_reason(error)}" if isinstance(error, OSError) else ""
            self._fail(HttpFailure(f"the server closed the connection before the answer's end{detail}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._is_framed = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._receive(self._status, self._now, data)

    def on_message_complete(self) -> None:
        if self._status >= 200:
            self.is_reusable = self._parser.should_keep_alive()
            self._finish()

    def _finish(self) -> None:
        self._has_answered = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(self._status)

    def _fail(self, error: HttpFailure) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


def _tls(verifies: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verifies:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _header(name: str, value: str) -> str:
    """
    Raises:
        ValueError: it would be more than one header, or is not ASCII.
    """
    line = f"{name}: {value}"
    if not name or not line.isascii() or not line.isprintable() or ":" in name or " " in name:
        raise ValueError(f"{name!r} is not a header that can be sent with its value")
    return f"{line}\r\n"


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
