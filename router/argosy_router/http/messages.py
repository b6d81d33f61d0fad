"""Parsed requests and the header rules that every hop needs; the interfaces between a server, its application and
whatever answers a request; and which web pages of other origins may read answers (CORS).

Must not know: connections, routes, keys.
Invariants: header names are lower-case bytes, and values are as received. Credentials of a browser (cookies, client
certificates) never count, so a page gets no further than anyone who knows a key: `access-control-allow-credentials` is
never sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Final, Protocol

from argosy_protocol.errors import ApiError, BadRequest

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""RFC 9110, 7.6.1. Names listed in `Connection` join them per message (`connection_options`)."""

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

    __slots__ = (
        "account",
        "answer_lines",
        "body",
        "body_bytes",
        "grant",
        "headers",
        "is_background",
        "is_charged",
        "is_from_allowed_page",
        "is_from_gateway",
        "is_http10",
        "keep_alive",
        "method",
        "path",
        "refusal",
        "sink",
        "target",
    )

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
