"""Parser of the requests on one connection.

Owns: framing: where a request ends, and the limits on its parts.
Must not know: deadlines, responses, what a request asks for.
Invariants: nothing is parsed after a failure; body bytes count in the server's `BodyMemory` from their arrival until
`release` or `close`, unless they go to a sink, which bounds its own memory; a sink whose body is not complete is
aborted.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

import httptools

from argosy_protocol.errors import (
    ApiError,
    BadRequest,
    HeadersTooLarge,
    InternalError,
    PayloadTooLarge,
)
from argosy_protocol.program.http_upgrade import Head, UpgradeIgnoringParser
from argosy_router.config import ServerLimits
from argosy_router.http.limits import BodyMemory
from argosy_router.http.messages import Headers, Request

_METHODS: Final = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"PATCH", b"OPTIONS"))


class Phase(Enum):
    """Where in the message the bytes read so far end."""

    IDLE = "between requests"
    HEAD = "in a request's head"
    BODY = "in a request's body"


class RequestReader:
    """Feeds llhttp. Complete requests are queued in `ready`; the error that stopped parsing is in `failure`."""

    def __init__(self, limits: ServerLimits, memory: BodyMemory, on_head: Callable[[Request], bool]) -> None:
        """`on_head` is `Application.on_head`."""
        self._limits = limits
        self._memory = memory
        self._on_head = on_head
        self._parser = UpgradeIgnoringParser(self._new_parser, self._reported_head)
        self.ready: list[Request] = []
        self.failure: ApiError | None = None
        self.phase = Phase.IDLE
        self.wants_continue = False
        """Whether the client sends the body only when told to (`Expect: 100-continue`)."""
        self._wire_bytes = 0
        self._reserved: dict[object, int] = {}
        """Account -> bytes of its bodies in `BodyMemory`; a proxy may send requests of several on one connection."""
        self._reset()

    def _reset(self) -> None:
        self._target = b""
        self._headers: Headers = []
        self._header_bytes = 0
        self._body: bytes | bytearray = b""
        self._max_body_bytes = 0
        self.is_body_read = False
        """Whether the application will use the body of the request being read."""
        self.body_bytes = 0
        """Body bytes received of the request being read."""
        self.incoming: Request | None = None
        """The request being read, once its head is complete and valid."""

    def feed(self, data: bytes) -> None:
        """Parse more bytes."""
        self._wire_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            self.failure = self.failure or InternalError("internal error")
        except httptools.HttpParserError:
            self.failure = self.failure or BadRequest("malformed HTTP request")
        if self.failure is None:
            self.failure = self._wire_failure()
        if self.failure is not None:
            self._abort_sink()

    def release(self, request: Request) -> None:
        """Release the memory of an answered request's body."""
        size, account = request.body_bytes, request.account
        if size:
            self._reserved[account] -= size
            if not self._reserved[account]:
                del self._reserved[account]
            self._memory.release(size, account)

    def close(self) -> None:
        """Discard everything received; the connection is gone."""
        for account, size in self._reserved.items():
            self._memory.release(size, account)
        self._reserved.clear()
        self._abort_sink()
        for request in self.ready:
            if request.sink is not None:
                request.sink.abort()
        self.ready.clear()
        self._reset()

    def _abort_sink(self) -> None:
        request = self.incoming
        if request is not None and request.sink is not None:
            request.sink.abort()

    def is_sink_full(self, resume: Callable[[], None]) -> bool:
        """Return whether reading should pause for the body's sink, which then calls `resume`."""
        request = self.incoming
        return (
            request is not None
            and request.sink is not None
            and self.failure is None
            and request.sink.is_full(resume)
        )

    def _wire_failure(self) -> ApiError | None:
        """Check bytes that no callback counts: an endless header line, chunk extensions, trailers."""
        limits = self._limits
        if self.phase is Phase.HEAD and self._wire_bytes > limits.max_header_bytes:
            return HeadersTooLarge("request headers are too large")
        max_body_bytes = max(limits.max_body_bytes, self._max_body_bytes)
        if self._wire_bytes > limits.max_header_bytes + 2 * max_body_bytes + limits.max_held_bytes:
            return PayloadTooLarge("request is too large")
        return None

    def _refuse(self, error: ApiError) -> None:
        self.failure = error
        raise ValueError("refused")  # stops llhttp: nothing after this byte is trusted

    def _new_parser(self) -> httptools.HttpRequestParser:
        return httptools.HttpRequestParser(self)

    def _reported_head(self) -> Head:
        return self._target, self._headers

    # llhttp's callbacks

    def on_message_begin(self) -> None:
        self._reset()
        self.phase = Phase.HEAD

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value) + 4)
        if self.phase is Phase.HEAD:  # trailers are counted and dropped
            self._headers.append((name.lower(), value.strip(b" \t")))  # llhttp leaves spaces behind a value
            if len(self._headers) > self._limits.max_headers:
                self._refuse(HeadersTooLarge(f"more than {self._limits.max_headers} request headers"))

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self._limits.max_header_bytes:
            self._refuse(HeadersTooLarge("request headers are too large"))

    def on_headers_complete(self) -> None:
        parser = self._parser
        if parser.offers_upgrade:
            return
        method, version = parser.get_method(), parser.get_http_version()
        if method not in _METHODS:
            self._refuse(BadRequest("method is not supported"))
        if not self._target.startswith(b"/"):
            self._refuse(BadRequest("request target must be a path"))
        if version not in ("1.1", "1.0"):
            self._refuse(BadRequest("HTTP version is not supported"))
        length = self._check_framing(is_http10=version == "1.0")
        self.incoming = request = Request(
            method,
            self._target,
            self._headers,
            is_http10=version == "1.0",
            keep_alive=parser.should_keep_alive(),
        )
        try:
            self.is_body_read = self._on_head(request)
        except ApiError as error:
            self._refuse(error)
        limits = self._limits
        self._max_body_bytes = limits.max_body_bytes if self.is_body_read else limits.max_unread_body_bytes
        if request.sink is not None:
            self._max_body_bytes = request.sink.max_bytes
        self._check_size(length)
        self.phase = Phase.BODY

    def _check_framing(self, *, is_http10: bool) -> int:
        """Check the header rules that llhttp does not. Returns the declared content length, or zero."""
        hosts = lengths = codings = length = 0
        self.wants_continue = False
        for name, value in self._headers:
            if name == b"host":
                hosts += 1
            elif name == b"content-length":
                lengths += 1
                if not value.isdigit():
                    self._refuse(BadRequest("malformed content-length"))
                length = int(value.lstrip(b"0")[:19] or b"0")
            elif name == b"transfer-encoding":
                codings += 1
                if value.lower() != b"chunked":
                    self._refuse(BadRequest("transfer-encoding must be chunked"))
            elif name == b"expect":
                self.wants_continue = value.lower() == b"100-continue"
                if not self.wants_continue:
                    self._refuse(BadRequest("expectation is not supported"))
        if hosts > 1 or (hosts == 0 and not is_http10):
            self._refuse(BadRequest("exactly one host header is required"))
        if lengths > 1 or codings > 1 or (lengths and codings) or (codings and is_http10):
            self._refuse(BadRequest("ambiguous message length"))
        return length

    def _check_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            self._refuse(
                PayloadTooLarge(f"the request body exceeds the limit of {self._max_body_bytes} bytes")
            )

    def on_body(self, data: bytes) -> None:
        self._check_size(self.body_bytes + len(data))
        sink = None if self.incoming is None else self.incoming.sink
        if sink is not None:
            self.body_bytes += len(data)
            try:
                sink.write(data)
            except ApiError as error:
                self._refuse(error)
            return
        account = None if self.incoming is None else self.incoming.account
        try:
            self._memory.reserve(len(data), account, self.body_bytes)
        except ApiError as error:
            self._refuse(error)
        self._reserved[account] = self._reserved.get(account, 0) + len(data)
        self.body_bytes += len(data)
        if not self._body:
            self._body = data  # nearly always the whole body
            return
        if isinstance(self._body, bytes):
            self._body = bytearray(self._body)
        self._body += data

    def on_message_complete(self) -> None:
        request = self.incoming
        if request is None or self.failure is not None or self._parser.offers_upgrade:
            return
        request.body = bytes(self._body)
        request.body_bytes = self.body_bytes if request.sink is None else 0
        self.ready.append(request)
        self._reset()
        self._wire_bytes = 0
        self.phase = Phase.IDLE
