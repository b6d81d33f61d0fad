"""Parsed requests, and the header rules that every hop needs.

Owns: the shape of a parsed request, hop-by-hop header names, status lines.
Must not know: connections.
Invariant: header names are lower-case bytes; values are as received.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from argosy_protocol.errors import ApiError

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
