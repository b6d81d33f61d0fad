"""Connections to replicas: sending requests, reporting each response as it arrives, and keeping connections for reuse.

Owns: one connection to a replica and its deadlines; the pool of keep-alive connections to one replica, last in first
out; small GET requests with bounded responses (health polls, metrics, `/v1/models`).
Must not know: why a request is sent, retries, metrics.
Invariants: every `send` ends in exactly one `on_end` or `on_failed`, unless the caller aborts first; of requests that
fail at once, a few are told in each turn of the event loop, as they are sent again then; a connection is offered for
reuse only if the response's framing said where it ends and nothing followed, and if the replica has taken all of the
request: what it has not read would wait in memory, and requests behind it. A connection is idle in the pool, in use by
one caller, or closed; connecting tasks belong to the pool and end with it.

Last in first out keeps the working set small: after a burst, surplus connections stay unused and expire instead of
being rotated.

UpstreamError
├── ConnectFailed       no connection: refused, unreachable, or the connect deadline passed
├── ConnectionLost      the connection ended before the response did
├── FirstByteTimeout    connected, but no response in time
├── IdleTimeout         the response stalled
├── MalformedResponse   not HTTP, over our limits, or a status no proxy may forward
└── RequestUnsendable   the router could not write the request for this replica

Their messages are for the log; clients get errors of `argosy_protocol.errors`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools

from argosy_router.config import UpstreamLimits
from argosy_router.http.deadlines import Deadline, TimerWheel
from argosy_router.http.messages import Headers


class UpstreamError(Exception):
    """Base of the tree."""

    reason: ClassVar[str] = "error"
    """Label value in metrics and the log."""


class ConnectFailed(UpstreamError):
    reason = "connect"

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused
        """The host is up but nothing listens on the port: the process is gone, and a second attempt would tell no
        more."""


class ConnectionLost(UpstreamError):
    reason = "reset"

    def __init__(self, message: str, *, stale: bool = False) -> None:
        super().__init__(message)
        self.stale = stale
        """A reused connection closed before the first byte of the response: the usual race with the replica's own
        keep-alive timeout, which says nothing about its health."""


class FirstByteTimeout(UpstreamError):
    reason = "first_byte_timeout"


class IdleTimeout(UpstreamError):
    reason = "idle_timeout"


class MalformedResponse(UpstreamError):
    reason = "malformed"


class RequestUnsendable(UpstreamError):
    """Nothing was sent: the router has a flaw that this request meets."""

    reason = "unsendable"


_JOIN_BELOW_BYTES: Final = 16 * 1024
"""Below this, copying costs less than a second buffer in the system call."""


class ResponseSink(Protocol):
    """Receiver of a response: the caller of `send`."""

    def on_response(self, status: int, headers: Headers) -> None: ...

    def on_data(self, data: bytes) -> None:
        """Called with body bytes, joined per read; never empty."""
        ...

    def on_end(self) -> None: ...

    def on_failed(self, error: UpstreamError) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """One connection to a replica."""

    def __init__(
        self,
        limits: UpstreamLimits,
        wheel: TimerWheel,
        on_idle: Callable[[UpstreamConnection], None],
        on_closed: Callable[[UpstreamConnection], None],
    ) -> None:
        self._limits = limits
        self._on_idle = on_idle
        self._on_closed = on_closed
        self._deadline = Deadline(wheel, self._on_deadline)
        self._turns = wheel.turns
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self._sink: ResponseSink | None = None
        self._idle_timeout_s = limits.idle_timeout_s
        self._first_byte_timeout_s = 0.0
        self._has_begun = False
        self._is_paused = False
        self.is_closed = False
        self.is_reused = False
        self._reset()

    def _reset(self) -> None:
        self._headers: Headers = []
        self._header_bytes = 0
        self._status = 0
        self._parts: list[bytes] = []
        self._has_head = False
        self._is_head_reported = False
        self._is_complete = False
        self._keeps_alive = False
        self._ends_with_connection = False
        self._wire_bytes = 0
        self._refusal = ""

    # called by the owner

    def send(
        self,
        sink: ResponseSink,
        head: bytes,
        first_byte_timeout_s: float,
        idle_timeout_s: float | None = None,
        *,
        body: bytes = b"",
    ) -> None:
        """Send one request; `sink` receives the response.

        The first-byte deadline holds until the caller calls `begun`, not until the head arrives: many servers send a
        stream's head at once, and its first event only when there is one.
        """
        assert self._sink is None, "one request at a time"
        self._sink = sink
        self._has_begun = False
        self._first_byte_timeout_s = first_byte_timeout_s
        self._idle_timeout_s = self._limits.idle_timeout_s if idle_timeout_s is None else idle_timeout_s
        self._deadline.set(first_byte_timeout_s)
        if len(body) < _JOIN_BELOW_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def begun(self) -> None:
        """Declare that the response has begun: from now on the idle deadline holds instead of the first-byte one."""
        if not self._has_begun and self._sink is not None:
            self._has_begun = True
            if not self._is_paused:
                self._deadline.set(self._idle_timeout_s)

    def pause_reading(self) -> None:
        """Pause reading because the client cannot keep up (back-pressure). The deadline is suspended meanwhile."""
        if not self._is_paused and not self.is_closed:
            self._is_paused = True
            self._deadline.clear()
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_paused and not self.is_closed:
            self._is_paused = False
            self._deadline.set(self._idle_timeout_s if self._has_begun else self._first_byte_timeout_s)
            self.transport.resume_reading()

    def abort(self) -> None:
        """Drop the connection and the sink: the replica sees the disconnect and aborts the request."""
        self._sink = None
        self._shut()

    @property
    def sink(self) -> ResponseSink | None:
        """Receives the response of the request that it carries, or its failure; None between requests."""
        return self._sink

    def fail_request(self, sink: ResponseSink, error: UpstreamError, *, include_begun: bool) -> None:
        """Fail the request of `sink` if the connection still carries it and its response has not begun; with
        `include_begun` in any case."""
        if self._sink is sink and (include_begun or not self._has_begun):
            self._shut()
            self._sink = None
            sink.on_failed(error)

    def expire_after(self, seconds: float) -> None:
        """Close the idle connection after `seconds` unless it is used before."""
        self._deadline.set(seconds)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's does not inherit from it

    def connection_lost(self, exc: Exception | None) -> None:
        if self._sink is not None and self._ends_with_connection and exc is None and not self.is_closed:
            self._complete()
        stale = self.is_reused and not self._wire_bytes
        self._fail(ConnectionLost(str(exc or "closed by the replica"), stale=stale))

    def data_received(self, data: bytes) -> None:
        if self._sink is None or self.is_closed:
            self._shut()  # a response without a request, or what follows a failure
            return
        self._wire_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(MalformedResponse(self._refusal or str(error)))
            return
        if not self._has_head and self._wire_bytes > self._limits.max_header_bytes:  # a line without an end
            self._fail(MalformedResponse("response headers are too large"))
            return
        self._report()

    # parser callbacks: an exception raised here stops llhttp and fails the request

    def _refused(self, reason: str) -> ValueError:
        """The exception to raise from a callback. The reason is kept in `_refusal`, because the context of the error
        that httptools raises may be another exception that was being handled."""
        self._refusal = reason
        return ValueError(reason)

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise self._refused("bytes after the response")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes > self._limits.max_header_bytes:
            raise self._refused("response headers are too large")
        if not self._has_head:  # trailers are dropped
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        version: str = self._parser.get_http_version()
        status: int = self._parser.get_status_code()
        if version not in ("1.1", "1.0"):
            raise self._refused(f"HTTP/{version} is not supported")
        if not 100 <= status <= 599 or status == 101:
            raise self._refused(f"status {status} cannot be forwarded")
        may_have_body = status >= 200 and status not in (204, 304)
        is_framed = self._is_framed(is_http10=version == "1.0", may_have_body=may_have_body)
        self._status = status
        if status >= 200:
            self._has_head = True
            self._keeps_alive = self._parser.should_keep_alive()
            self._ends_with_connection = may_have_body and not is_framed

    def _is_framed(self, *, is_http10: bool, may_have_body: bool) -> bool:
        """Whether the head says where the body ends. Checks the framing rules that llhttp does not."""
        is_framed = False
        for name, value in self._headers:
            if name == b"transfer-encoding":
                if is_framed or is_http10 or not may_have_body or value.lower() != b"chunked":
                    raise self._refused("transfer-encoding must be chunked, once, where a body may be")
                is_framed = True
            elif name == b"content-length":  # llhttp checks: once, digits only, no transfer-encoding
                if not may_have_body and int(value):
                    raise self._refused("a body with a status that forbids one")
                is_framed = True
        return is_framed

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._has_head:
            self._is_complete = True
        else:  # an interim response (100, 103): the real one follows
            self._headers = []

    # reporting: after the parser has returned, so that the sink may abort, or send again, from its callbacks

    def _report(self) -> None:
        sink = self._sink
        if sink is None or not self._has_head:
            return
        if self._has_begun and not self._is_paused and not self._is_complete:
            self._deadline.set(self._idle_timeout_s)
        if not self._is_head_reported:
            self._is_head_reported = True
            sink.on_response(self._status, self._headers)
        parts = self._parts
        if parts and self._sink is sink:
            self._parts = []
            sink.on_data(parts[0] if len(parts) == 1 else b"".join(parts))
        if self._is_complete and self._sink is sink:
            self._complete()

    def _complete(self) -> None:
        sink, self._sink = self._sink, None
        self._deadline.clear()
        reusable = self._keeps_alive and not self._ends_with_connection and not self.is_closed
        reusable = reusable and not self.transport.get_write_buffer_size()
        self._reset()
        if reusable:
            if self._is_paused:
                self._is_paused = False
                self.transport.resume_reading()
            self.is_reused = True
            self._on_idle(self)
        else:
            self._shut()
        if sink is not None:
            sink.on_end()

    def _on_deadline(self) -> None:
        if self._sink is None:
            self._shut()
        elif self._has_begun:
            self._fail(IdleTimeout(f"no data for {self._idle_timeout_s:g} s"))
        else:
            self._fail(FirstByteTimeout("no response in time"))

    def _fail(self, error: UpstreamError) -> None:
        """Close, and tell the sink when its turn has come, unless it aborts before."""
        is_told = self.is_closed
        self._shut()
        if self._sink is not None and not is_told:
            self._turns.run(partial(self.fail_request, self._sink, error, include_begun=True))

    def _shut(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._deadline.end()
            self.transport.abort()
            self._on_closed(self)


class Waiter(Protocol):
    """Callbacks of a caller of `acquire`. Exactly one of the two is called, perhaps before `acquire` returns."""

    def on_connected(self, connection: UpstreamConnection) -> None: ...

    def on_connect_failed(self, error: ConnectFailed) -> None: ...


class ConnectionPool:
    """Connections to one `http://host:port` or `https://host:port`.

    `hostname` is the replica's name in `Host` and on its certificate, where that differs from its address.
    """

    def __init__(
        self, url: str, limits: UpstreamLimits, wheel: TimerWheel, tls: UpstreamTls, hostname: str = ""
    ) -> None:
        self.is_tls, self.host, self.port = split_url(url)
        self._tls = tls
        self._hostname = hostname or self.host
        self.authority = (
            f"[{self._hostname}]:{self.port}" if ":" in self._hostname else f"{self._hostname}:{self.port}"
        )
        self.authority_bytes = self.authority.encode("latin-1")
        self._limits = limits
        self._wheel = wheel
        self._turns = wheel.turns
        self._idle: list[UpstreamConnection] = []
        self.connections: set[UpstreamConnection] = set()
        """Idle or carrying a request; connections from `connect` are not included."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def acquire(self, waiter: Waiter, *, fresh: bool = False) -> None:
        """Give `waiter` an idle connection at once, or a new one later (always a new one if `fresh`)."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if not connection.is_closed:
                waiter.on_connected(connection)
                return
        task = asyncio.ensure_future(self._connect_for(waiter))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._on_task_done(task, waiter))

    def _on_task_done(self, task: asyncio.Task[None], waiter: Waiter) -> None:
        """Fail a cancelled task's waiter. The task cannot do so itself: cancelled before it began, it never runs."""
        self._tasks.discard(task)
        if task.cancelled():
            self._turns.run(partial(waiter.on_connect_failed, ConnectFailed("replica was removed")))

    async def connect(
        self, on_idle: Callable[[UpstreamConnection], None] | None = None
    ) -> UpstreamConnection:
        """Open a connection that belongs to the caller and never enters the pool.

        Args:
            on_idle: receives the connection when a response has ended and it can be reused; by default it closes then.

        Raises:
            ConnectFailed: refused, unreachable, or slower than the connect deadline.
        """
        return await self._open(on_idle or UpstreamConnection.abort)

    async def _open(self, on_idle: Callable[[UpstreamConnection], None]) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as timeout:
                deadline = Deadline(self._wheel, lambda: timeout.reschedule(0.0))
                deadline.set(self._limits.connect_timeout_s)
                try:
                    _, connection = await loop.create_connection(
                        lambda: UpstreamConnection(self._limits, self._wheel, on_idle, self._on_closed),
                        self.host,
                        self.port,
                        ssl=self._tls.context if self.is_tls else None,
                        server_hostname=self._hostname if self.is_tls else None,
                    )
                finally:
                    deadline.end()
        except TimeoutError:
            raise ConnectFailed("connect deadline passed") from None
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            raise ConnectFailed(f"connect failed: {error.strerror or error}", refused=refused) from None
        except ValueError as error:  # an invalid host name (UnicodeError), for DNS or for TLS
            raise ConnectFailed(f"connect failed: {error}") from None
        return connection

    def release(self, connection: UpstreamConnection) -> None:
        """Return a connection to the pool between two requests."""
        if self._is_closed or len(self._idle) >= self._limits.max_idle_connections:
            connection.abort()
            return
        self._idle.append(connection)
        connection.expire_after(self._limits.keep_alive_s)

    def fail_requests(self, error: UpstreamError, *, include_begun: bool) -> None:
        """Fail the requests without a response; with `include_begun` also those whose response has begun. Each of them
        is sent again at once, so of many a few fail in each turn of the event loop."""
        for connection in list(self.connections):
            if (sink := connection.sink) is not None:
                failing = partial(connection.fail_request, sink, error, include_begun=include_begun)
                self._turns.run(failing)

    def close(self) -> None:
        """Close idle and connecting connections; connections in use finish their request and close then."""
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        for connection in self._idle[:]:
            connection.abort()

    @property
    def idle(self) -> int:
        return len(self._idle)

    def _on_closed(self, connection: UpstreamConnection) -> None:
        self.connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def _connect_for(self, waiter: Waiter) -> None:
        try:
            connection = await self._open(self.release)
        except ConnectFailed as error:
            self._turns.run(partial(waiter.on_connect_failed, error))
        else:
            if not connection.is_closed:
                self.connections.add(connection)
            self._turns.run(partial(self._hand_over, connection, waiter))

    def _hand_over(self, connection: UpstreamConnection, waiter: Waiter) -> None:
        """Give a new connection to its waiter, unless it was closed before it was its turn: sending a request takes as
        long as other steps."""
        if self._is_closed:
            connection.abort()
            waiter.on_connect_failed(ConnectFailed("replica was removed"))
        elif connection.is_closed:
            waiter.on_connect_failed(ConnectFailed("the replica closed the connection at once"))
        else:
            waiter.on_connected(connection)


def split_url(url: str) -> tuple[bool, str, int]:
    """Split a replica's `http://host:port` or `https://host:port` into (is TLS, host, port).

    Raises:
        ValueError: another scheme, a path, credentials, or no host.
    """
    parts = urlsplit(url)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.path not in ("", "/")
        or parts.query
        or parts.username
    ):
        raise ValueError(f"replica URL must look like http://HOST:PORT or https://HOST:PORT, not {url!r}")
    is_tls = parts.scheme == "https"
    return is_tls, parts.hostname, parts.port or (443 if is_tls else 80)


KEEP_S = 4.0
"""Shorter than the shortest keep-alive timeout among engines' servers (uvicorn: 5 s)."""


class Response(NamedTuple):
    status: int
    headers: Headers
    body: bytes


class _Stale(ConnectionLost):
    """The replica had closed the kept connection, which says nothing about its health."""


class Collector:
    """Response sink that collects a body up to a limit; `done` resolves to the response."""

    def __init__(self, limit: int) -> None:
        self.done: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._limit = limit
        self._status = 0
        self._headers: Headers = []
        self._body = bytearray()
        """Grows in place: a replica may send a byte at a time, and the whole body would be copied for each."""

    def on_response(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers

    def on_data(self, data: bytes) -> None:
        if len(self._body) < self._limit:
            self._body += data

    def on_end(self) -> None:
        if len(self._body) >= self._limit:
            self.on_failed(MalformedResponse(f"response is longer than {self._limit} bytes"))
        elif not self.done.done():
            self.done.set_result(Response(self._status, self._headers, bytes(self._body)))

    def on_failed(self, error: UpstreamError) -> None:
        if not self.done.done():
            is_stale = isinstance(error, ConnectionLost) and error.stale
            self.done.set_exception(_Stale(str(error)) if is_stale else error)


async def fetch(
    pool: ConnectionPool, path: str, key: str, timeout_s: float, limit: int = 1 << 20
) -> Response:
    """GET `path` on a connection of its own.

    Raises:
        UpstreamError: no connection, no answer in time, or not HTTP.
    """
    return await _get(await pool.connect(), pool, path, key, timeout_s, limit)


class Fetcher:
    """Sequential requests to one replica on a connection that is kept between them.

    `keep_s` is how long an idle connection is kept: less than the replica's own keep-alive timeout.
    """

    def __init__(self, pool: ConnectionPool, key: str = "", keep_s: float = KEEP_S) -> None:
        self._pool = pool
        self.key = key
        """The bearer key to send; empty for none."""
        self._keep_s = keep_s
        self._kept: UpstreamConnection | None = None

    async def get(self, path: str, timeout_s: float, limit: int = 1 << 20) -> Response:
        """GET `path`.

        Raises:
            UpstreamError: no connection, no answer in time, or not HTTP.
        """
        connection, self._kept = self._kept, None
        if connection is not None and not connection.is_closed:
            with contextlib.suppress(_Stale):
                return await self._get(connection, path, timeout_s, limit)
        return await self._get(await self._pool.connect(self._keep), path, timeout_s, limit)

    def close(self) -> None:
        """Close the kept connection, if there is one."""
        connection, self._kept = self._kept, None
        if connection is not None:
            connection.abort()

    def _keep(self, connection: UpstreamConnection) -> None:
        self._kept = connection
        connection.expire_after(self._keep_s)

    async def _get(self, connection: UpstreamConnection, path: str, timeout_s: float, limit: int) -> Response:
        return await _get(connection, self._pool, path, self.key, timeout_s, limit, lambda: self._kept)


async def _get(
    connection: UpstreamConnection,
    pool: ConnectionPool,
    path: str,
    key: str,
    timeout_s: float,
    limit: int,
    kept: Callable[[], UpstreamConnection | None] = lambda: None,
) -> Response:
    """Send one request; afterwards close the connection, unless it is the one that `kept` returns."""
    collector = Collector(limit)
    connection.send(collector, request_head(pool, path, key), timeout_s)
    try:
        return await collector.done
    finally:
        if kept() is not connection:
            connection.abort()


def request_head(pool: ConnectionPool, path: str, key: str) -> bytes:
    """Render a GET request; `key` is the bearer key, empty for none."""
    authorization = f"authorization: Bearer {key}\r\n" if key else ""
    return f"GET {path} HTTP/1.1\r\nhost: {pool.authority}\r\n{authorization}accept: */*\r\n\r\n".encode(
        "latin-1"
    )


class UpstreamTls:
    """How replicas' certificates are verified: by the authorities in `ca_certs`, else by the system's; not at all if
    `verifies` is false.

    Raises:
        OSError: the file cannot be read (ssl.SSLError: it holds no certificate).
    """

    def __init__(self, ca_certs: Path | None = None, *, verifies: bool = True) -> None:
        self._ca_certs = ca_certs
        self._verifies = verifies
        self.files = [] if ca_certs is None else [ca_certs]
        self._context = None if ca_certs is None else self._load()

    @property
    def context(self) -> ssl.SSLContext:
        """Context for new connections. The system's authorities are loaded on first use, which takes 0.1 s."""
        if self._context is None:
            self._context = self._load()
        return self._context

    def reload(self) -> None:
        """Read the file again.

        Raises:
            OSError: as the constructor; the last good one stays in use.
        """
        self._context = self._load()

    def _load(self) -> ssl.SSLContext:
        if self._verifies:
            context = ssl.create_default_context(cafile=self._ca_certs)
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        return context
