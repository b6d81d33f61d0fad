"""The client-facing side of a connection: parse requests, keep limits and deadlines, write responses.

Owns: one accepted connection from its first byte to its close.
Must not know: routes, keys, replicas: it hands whole requests to an `Application` and tells the `Exchange` that
answers when the client leaves or falls behind.
Invariant: requests are answered one at a time and in order; after a framing error nothing more is read.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, cast

import httptools

from argosy_engine.protocol.errors import (
    ApiError,
    BadRequest,
    HeadersTooLarge,
    InternalError,
    PayloadTooLarge,
    RequestTimeout,
)
from argosy_router.http.deadlines import Deadline, TimerWheel
from argosy_router.http.messages import Headers, Request, status_line


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of one client connection. Sizes in bytes, times in seconds."""

    max_header_bytes: int = 32 * 1024
    """Request line and headers; nginx's default for large headers is the same."""
    max_headers: int = 100
    max_body_bytes: int = 32 * 1024 * 1024
    """A million tokens of text are 4 MB; images travel inline as base64."""
    header_timeout_s: float = 10.0
    """From a request's first byte to the end of its headers (slowloris)."""
    body_timeout_s: float = 30.0
    """Within each such period a client must deliver `min_body_rate` bytes per second."""
    min_body_rate: int = 1024
    keep_alive_s: float = 75.0
    write_stall_s: float = 60.0
    """How long a client may leave the write buffer full before it is cut off."""
    write_buffer_bytes: int = 256 * 1024
    """Above this the replica is paused."""
    max_held_bytes: int = 64 * 1024
    """Bytes accepted ahead of the answer being written; then reading stops until it is finished."""
    tls_handshake_timeout_s: float = 10.0
    """From accepting a connection to the end of its handshake."""
    linger_s: float = 1.0
    """After refusing a request: how long to discard input, so that the refusal is not lost to a TCP reset."""


class Exchange(Protocol):
    """Whoever is answering a request."""

    def on_client_lost(self) -> None: ...

    def on_client_paused(self) -> None: ...

    def on_client_resumed(self) -> None: ...


class Client(Protocol):
    """Whoever asked, as an exchange sees it (`ServerConnection` says what each call does)."""

    def attach(self, exchange: Exchange) -> None: ...

    def respond(self, status: int, headers: bytes, body: bytes) -> None: ...

    def start(self, status: int, headers: bytes, first: bytes) -> None: ...

    def send(self, data: bytes) -> None: ...

    def finish(self) -> None: ...

    def abort(self) -> None: ...


class Application(Protocol):
    def on_request(self, connection: ServerConnection, request: Request) -> None:
        """Answers now (`respond`) or later (`attach` an exchange first). Must not raise."""
        ...


class _Phase(Enum):
    """Where the parser stands between and inside requests."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    CLOSING = "closing"


_METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"PATCH", b"OPTIONS"))
_DIGITS = frozenset(b"0123456789")


class ServerConnection(asyncio.Protocol):
    """One client connection."""

    def __init__(
        self,
        application: Application,
        limits: ServerLimits,
        wheel: TimerWheel,
        connections: set[ServerConnection],
    ) -> None:
        self._application = application
        self._limits = limits
        self._connections = connections
        self._deadline = Deadline(wheel, self._on_deadline)
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._phase = _Phase.IDLE
        self._ready: list[Request] = []
        self._failure: ApiError | None = None
        self._exchange: Exchange | None = None
        self._request: Request | None = None
        """The request being answered."""
        self._held = bytearray()
        self._is_turning = False
        self._is_write_paused = False
        self._is_draining = False
        self._is_chunked = False
        self._wire_bytes = 0
        self._reset_message()

    def _reset_message(self) -> None:
        self._target = b""
        self._headers: Headers = []
        self._header_bytes = 0
        self._header_count = 0
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._body_mark = 0
        self._incoming: Request | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's does not inherit from it
        self._transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        self._connections.add(self)
        self._deadline.set(self._limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._deadline.clear()
        self._phase = _Phase.CLOSING
        self._leave()

    def eof_received(self) -> None:
        # A half-closed connection counts as gone: nobody can be told apart from a client that died.
        if self._exchange is not None:
            self._leave()
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._phase is _Phase.CLOSING:
            return
        if self._request is None:
            self._feed(data)
            self._turn()
            return
        self._held += data
        if len(self._held) > self._limits.max_held_bytes:
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self._deadline.set(self._limits.write_stall_s)
        if self._exchange is not None:
            self._exchange.on_client_paused()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._deadline.clear()
        if self._exchange is not None:
            self._exchange.on_client_resumed()

    # parsing

    def _feed(self, data: bytes) -> None:
        self._wire_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            self._failure = self._failure or InternalError("internal error")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._failure = self._failure or BadRequest("malformed HTTP request")
        if self._failure is None and self._is_over_wire_limit():
            self._failure = self._failure or PayloadTooLarge("request is too large")

    def _is_over_wire_limit(self) -> bool:
        """Bytes that no callback has counted: an endless header line, chunk extensions, trailers."""
        limits = self._limits
        if self._phase is _Phase.HEAD and self._wire_bytes > limits.max_header_bytes:
            self._failure = HeadersTooLarge("request headers are too large")
        return self._wire_bytes > limits.max_header_bytes + 2 * limits.max_body_bytes + limits.max_held_bytes

    def _refuse(self, error: ApiError) -> None:
        self._failure = error
        raise ValueError("refused")  # stops llhttp: nothing after this byte is trusted

    def on_message_begin(self) -> None:
        if self._phase is _Phase.IDLE:
            self._deadline.set(self._limits.header_timeout_s)
        self._reset_message()
        self._phase = _Phase.HEAD

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value) + 4)
        self._header_count += 1
        if self._header_count > self._limits.max_headers:
            self._refuse(HeadersTooLarge(f"more than {self._limits.max_headers} request headers"))
        if self._phase is _Phase.HEAD:  # trailers are counted and dropped
            self._headers.append((name.lower(), value))

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self._limits.max_header_bytes:
            self._refuse(HeadersTooLarge("request headers are too large"))

    def on_headers_complete(self) -> None:
        parser = self._parser
        method: bytes = parser.get_method()
        version: str = parser.get_http_version()
        if parser.should_upgrade() or method not in _METHODS:
            self._refuse(BadRequest("method or protocol upgrade is not supported"))
        if not self._target.startswith(b"/"):
            self._refuse(BadRequest("request target must be a path"))
        if version not in ("1.1", "1.0"):
            self._refuse(BadRequest("HTTP version is not supported"))
        expects_continue = self._check_framing(is_http10=version == "1.0")
        self._incoming = Request(
            method,
            self._target,
            self._headers,
            is_http10=version == "1.0",
            keep_alive=parser.should_keep_alive(),
        )
        self._phase = _Phase.BODY
        if self._request is None and not self._ready:
            self._deadline.set(self._limits.body_timeout_s)
            if expects_continue:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _check_framing(self, *, is_http10: bool) -> bool:
        """Header rules llhttp leaves to us. Returns whether the client waits for `100 Continue`."""
        hosts = lengths = codings = 0
        expects_continue = False
        for name, value in self._headers:
            if name == b"host":
                hosts += 1
            elif name == b"content-length":
                lengths += 1
                if not value or not _DIGITS.issuperset(value):
                    self._refuse(BadRequest("malformed content-length"))
                if len(value) > 18 or int(value) > self._limits.max_body_bytes:
                    self._refuse(PayloadTooLarge(f"request body exceeds {self._limits.max_body_bytes} bytes"))
            elif name == b"transfer-encoding":
                codings += 1
                if value.lower() != b"chunked":
                    self._refuse(BadRequest("transfer-encoding must be chunked"))
            elif name == b"upgrade":
                self._refuse(BadRequest("protocol upgrade is not supported"))
            elif name == b"expect":
                expects_continue = value.lower() == b"100-continue"
                if not expects_continue:
                    self._refuse(BadRequest("expectation is not supported"))
        if hosts > 1 or (hosts == 0 and not is_http10):
            self._refuse(BadRequest("exactly one host header is required"))
        if lengths > 1 or codings > 1 or (lengths and codings) or (codings and is_http10):
            self._refuse(BadRequest("ambiguous message length"))
        return expects_continue

    def on_body(self, data: bytes) -> None:
        self._body_bytes += len(data)
        if self._body_bytes > self._limits.max_body_bytes:
            self._refuse(PayloadTooLarge(f"request body exceeds {self._limits.max_body_bytes} bytes"))
        self._body.append(data)

    def on_message_complete(self) -> None:
        request = self._incoming
        if request is None or self._failure is not None:
            return
        body = self._body
        request.body = body[0] if len(body) == 1 else b"".join(body)
        self._ready.append(request)
        self._reset_message()
        self._wire_bytes = 0
        self._phase = _Phase.IDLE

    # turns

    def _turn(self) -> None:
        """Hands over requests until one is left to be answered later."""
        if self._is_turning:
            return
        self._is_turning = True
        try:
            while self._request is None and self._phase is not _Phase.CLOSING:
                if self._ready:
                    self._deadline.clear()
                    self._request = request = self._ready.pop(0)
                    self._application.on_request(self, request)
                elif self._failure is not None:
                    self._reject(self._failure)
                elif self._held:
                    held = bytes(self._held)
                    self._held.clear()
                    self._transport.resume_reading()
                    self._feed(held)
                else:
                    self._wait()
                    return
        finally:
            self._is_turning = False

    def _wait(self) -> None:
        """Arms the deadline of what the client has to do next."""
        if self._phase is _Phase.IDLE:
            if self._is_draining:
                self._close()
            else:
                self._deadline.set(self._limits.keep_alive_s)
        elif not self._deadline.is_set:
            head = self._phase is _Phase.HEAD
            self._deadline.set(self._limits.header_timeout_s if head else self._limits.body_timeout_s)

    def _on_deadline(self) -> None:
        if self._is_write_paused or self._phase is _Phase.CLOSING:
            self._transport.abort()
        elif self._phase is _Phase.IDLE:
            self._close()
        elif self._phase is _Phase.BODY and self._is_body_on_time():
            self._deadline.set(self._limits.body_timeout_s)
        else:
            self._reject(RequestTimeout("the request was sent too slowly"))

    def _is_body_on_time(self) -> bool:
        delivered = self._body_bytes - self._body_mark
        self._body_mark = self._body_bytes
        return delivered >= self._limits.min_body_rate * self._limits.body_timeout_s

    def _reject(self, error: ApiError) -> None:
        """Answers a request that cannot be trusted to end where we think, and closes without reading on."""
        body = error.body()
        self._transport.write(
            b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (status_line(error.http_status), len(body), body)
        )
        self._linger()

    def _linger(self) -> None:
        self._phase = _Phase.CLOSING
        self._held.clear()
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._deadline.set(self._limits.linger_s)
        else:
            self._transport.close()

    def _close(self) -> None:
        self._phase = _Phase.CLOSING
        self._deadline.set(self._limits.write_stall_s)  # a peer that reads nothing must not keep the socket
        self._transport.close()

    def _leave(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.on_client_lost()

    # responses

    @property
    def peer(self) -> str:
        address = self._transport.get_extra_info("peername")
        return str(address[0]) if address else ""

    @property
    def is_closing(self) -> bool:
        return self._phase is _Phase.CLOSING

    def attach(self, exchange: Exchange) -> None:
        """`exchange` answers the current request and hears about the client until it has."""
        self._exchange = exchange
        if self._is_write_paused:
            exchange.on_client_paused()

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """The whole response. `headers` are rendered lines without length, connection and the empty line."""
        request = self._request
        assert request is not None
        close = b"" if self._keeps_alive() else b"connection: close\r\n"
        if request.method == b"HEAD":
            head = b"%b%bcontent-length: %d\r\n%b\r\n" % (status_line(status), headers, len(body), close)
            self._transport.write(head)
        else:
            self._transport.write(
                b"%b%bcontent-length: %d\r\n%b\r\n%b" % (status_line(status), headers, len(body), close, body)
            )
        self._done()

    def start(self, status: int, headers: bytes, first: bytes) -> None:
        """Begins a response of unknown length with its first bytes."""
        request = self._request
        assert request is not None
        self._is_chunked = not request.is_http10
        if self._is_chunked:
            close = b"" if self._keeps_alive() else b"connection: close\r\n"
            self._transport.write(
                b"%b%btransfer-encoding: chunked\r\n%b\r\n%x\r\n%b\r\n"
                % (status_line(status), headers, close, len(first), first)
            )
        else:
            self._transport.write(b"%b%bconnection: close\r\n\r\n%b" % (status_line(status), headers, first))

    def send(self, data: bytes) -> None:
        """More bytes of a started response; `data` must not be empty."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def finish(self) -> None:
        """Ends a started response."""
        if self._is_chunked:
            self._transport.write(b"0\r\n\r\n")
        self._done()

    def abort(self) -> None:
        """Cuts the connection: the only way left to say that a started response is incomplete."""
        self._exchange = None
        self._phase = _Phase.CLOSING
        self._transport.abort()

    @property
    def is_answering(self) -> bool:
        return self._request is not None

    def cut(self) -> None:
        """Ends the connection and the exchange on it, as if the client had left."""
        self._transport.abort()
        self._leave()

    def drain(self) -> None:
        """No further requests: closes now if idle, else after the current answer."""
        self._is_draining = True
        if self._request is None and self._phase is _Phase.IDLE and not self._ready:
            self._close()

    def _keeps_alive(self) -> bool:
        request = self._request
        return request is not None and request.keep_alive and not request.is_http10 and not self._is_draining

    def _done(self) -> None:
        keeps_alive = self._keeps_alive()
        self._exchange = None
        self._request = None
        if self._phase is _Phase.CLOSING:
            return
        if keeps_alive:
            self._turn()
        else:
            self._close()
