"""Upstream connection: sends requests to a replica, and reports each response as it arrives.

Owns: one connection to a replica and its deadlines.
Must not know: why the request is sent, retries, metrics.
Invariant: every `send` ends in exactly one `on_end` or `on_failed`, unless the caller aborts first; of requests that
fail at once, a few are told in each turn of the event loop, as they are sent again then; a connection is offered for
reuse only if the response's framing said where it ends and nothing followed, and if the replica has taken all of the
request: what it has not read would wait in memory, and requests behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, cast

import httptools

from argosy_router.config import UpstreamLimits
from argosy_router.http.deadlines import Deadline, TimerWheel
from argosy_router.http.messages import Headers
from argosy_router.http.upstream_errors import (
    ConnectionLost,
    FirstByteTimeout,
    IdleTimeout,
    MalformedResponse,
    UpstreamError,
)

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
