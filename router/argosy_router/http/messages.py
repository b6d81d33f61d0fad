"""Requests and their parser, and the header rules that every hop needs; the interfaces between a server, its
application and whatever answers a request; and which web pages of other origins may read answers (CORS).

Must not know: connections, deadlines, routes, keys, what a request asks for.
Invariants: header names are lower-case bytes, and values are as received. Nothing is parsed after a failure. Body bytes
count in the server's `BodyMemory` from their arrival until `release` or `close`, unless they go to a sink, which bounds
its own memory; a sink whose body is not complete is aborted. Credentials of a browser (cookies, client
certificates) never count, so a page gets no further than anyone who knows a key: `access-control-allow-credentials` is
never sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from http import HTTPStatus
from typing import Final, Protocol

import httptools

from argosy_protocol.errors import ApiError, BadRequest, HeadersTooLarge, InternalError, PayloadTooLarge
from argosy_protocol.program.http_upgrade import Head, UpgradeIgnoringParser
from argosy_router.config import ServerLimits
from argosy_router.http.limits import BodyMemory

Headers = list[tuple[bytes, bytes]]

_REASONS = {status.value: status.phrase.encode("ascii") for status in HTTPStatus}


class BodySink(Protocol):
    """Takes a request's body in pieces as it arrives, instead of `Request.body`."""

    max_bytes: int
    """Limit of the body."""

    def write(self, data: bytes) -> None:
        """Take a piece.

        Raises:
            ApiError: the request is refused, and the rest of its body not read.
        """
        ...

    def is_full(self, resume: Callable[[], None]) -> bool:
        """Return whether the next piece should wait; `resume` is then called when it need not wait any longer."""
        ...

    def abort(self) -> None:
        """Drop the body, which is incomplete or will not be used. May be called more than once."""
        ...


class Request:
    """One request: its head, and its body once that is complete."""

    def __init__(
        self, method: bytes, target: bytes, headers: Headers, *, is_http10: bool, keep_alive: bool
    ) -> None:
        self.method = method
        self.target = target
        self.path = target.partition(b"?")[0]
        """The target without a query; as received, never normalised."""
        self.headers = headers
        self.is_http10 = is_http10
        self.keep_alive = keep_alive
        self.body = b""
        self.body_bytes = 0
        """Size of the body as received; the application may have dropped `body` itself."""
        self.id = b""
        """The application's, for the answer and logs; empty before it has one."""
        self.account: object = None
        """Whose shares of the server's memory and connections the request takes, as the application names it; None for
        a client that cannot be told from others."""
        self.grant: object = None
        """The application's own result of authorizing the head; None if it granted nothing."""
        self.is_charged = False
        """Whether the application has charged the request to its client's limits."""
        self.is_background = False
        """Whether it is a request of a batch, which no client waits for."""
        self.refusal: ApiError | None = None
        """Why the application refuses the request, whose body is received all the same."""
        self.answer_lines = b""
        """Header lines that the application wants in every answer to this request, whoever gives it."""
        self.is_from_allowed_page = False
        """Whether a web page sent it that may, by its origin."""
        self.is_from_gateway = False
        """Whether a gateway forwards it, which need not show the answer."""
        self.sink: BodySink | None = None
        """Set by the application to get the body in pieces; `body` then stays empty."""

    def header(self, name: bytes) -> bytes | None:
        """First value of a header (`name` in lower case), or None."""
        return first_value(self.headers, name)


def first_value(headers: Headers, name: bytes) -> bytes | None:
    """First value of a header (`name` in lower case), or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


def connection_options(headers: Headers) -> frozenset[bytes]:
    """Header names that the `Connection` header declares hop-by-hop, in lower case."""
    options: frozenset[bytes] = frozenset()
    for name, value in headers:
        if name == b"connection":
            options |= {option.strip().lower() for option in value.split(b",")}
    return options


def status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def render_headers(headers: Headers) -> bytes:
    """Render header lines, each with its line end."""
    return b"".join([b"%b: %b\r\n" % (name, value) for name, value in headers])


_STATUS_LINES = {status: b"HTTP/1.1 %d %b\r\n" % (status, reason) for status, reason in _REASONS.items()}


class ClientListener(Protocol):
    """Receiver of a client's events while it answers the client's request."""

    def on_client_lost(self) -> None:
        """Called when the client has disconnected; no further call follows."""
        ...

    def on_client_paused(self) -> None:
        """Called when the client reads too slowly: the write buffer is full."""
        ...

    def on_client_resumed(self) -> None:
        """Called when the client has read the write buffer."""
        ...


class Client(Protocol):
    """The client of a request, as seen by whatever answers it (see `ServerConnection`)."""

    def attach(self, listener: ClientListener) -> None: ...

    def respond(self, status: int, headers: bytes, body: bytes) -> None: ...

    def start(self, status: int, headers: bytes, first: bytes) -> None: ...

    def send(self, data: bytes) -> None: ...

    def finish(self) -> None: ...

    def abort(self) -> None: ...


class Application(Protocol):
    """Answers the requests of a server."""

    def on_head(self, request: Request) -> bool:
        """Check a request's head; return whether its body will be used. A body that will not be used must be small.

        Raises:
            ApiError: the request is refused before its body is read, and the connection closed.
        """
        ...

    def on_request(self, client: Client, request: Request) -> None:
        """Answer now (`respond`), or later (`attach` a listener first). Must not raise."""
        ...

    def on_refused(self, error: ApiError, request: Request | None) -> tuple[bytes, bytes]:
        """Note a request that is refused before `on_request`; `request` is None if not even its head was valid.

        Returns:
            Header lines and body of the refusal.
        """
        ...


_ASKED_METHOD: Final = b"access-control-request-method"
_ASKED_HEADERS: Final = b"access-control-request-headers"
_PREFLIGHT: Final = (
    b"access-control-allow-methods: GET, HEAD, POST, DELETE\r\n"
    b"access-control-max-age: 600\r\n"
    b"vary: Access-Control-Request-Headers\r\n"
)
_VARIES: Final = b"vary: Origin\r\n"
_ANSWER: Final = b"access-control-expose-headers: *\r\n" + _VARIES


class CrossOrigin:
    """The origins whose pages may read answers; `*` among them stands for all, and none turns CORS off."""

    def __init__(self, origins: Iterable[str] = ()) -> None:
        self._origins: Final = frozenset(origin.encode() for origin in origins)

    def mark(self, request: Request) -> None:
        """Note in a request whether a page of an allowed origin has sent it, and the header lines of every answer to
        it, errors included."""
        if not self._origins:
            return
        request.answer_lines = _VARIES
        origin = request.header(b"origin")
        if origin is not None and (b"*" in self._origins or origin in self._origins):
            request.is_from_allowed_page = True
            request.answer_lines = b"access-control-allow-origin: %b\r\n" % origin + _ANSWER

    def is_preflight(self, request: Request) -> bool:
        """Whether a browser asks, without a key, if a page may send a request."""
        return (
            request.method == b"OPTIONS"
            and bool(self._origins)
            and request.header(b"origin") is not None
            and request.header(_ASKED_METHOD) is not None
        )

    def preflight_lines(self, request: Request) -> bytes:
        """Header lines of the answer to a preflight request that was marked, besides its `answer_lines`.

        Raises:
            BadRequest: pages of this origin may not send requests.
        """
        if not request.is_from_allowed_page:
            raise BadRequest("the page's origin is not in --allowed-origins")
        headers = request.header(_ASKED_HEADERS)
        # Named one by one: a `*` would not stand for `authorization`.
        asked = b"" if headers is None else b"access-control-allow-headers: %b\r\n" % headers
        return _PREFLIGHT + asked


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
                if value.lower() != b"100-continue":
                    self._refuse(BadRequest("expectation is not supported"))
                self.wants_continue = not is_http10  # which knows no interim responses (RFC 9110, 10.1.1)
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
