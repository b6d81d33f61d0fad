"""BoundedProtocol: uvicorn's HTTP protocol with bounds on what clients send and on how long they take for it.

uvicorn bounds headers only with h11, and never the time of a request; llhttp collects a header of any length before it
reports it, and accepts any number of Host headers and HTTP versions from 0.9 to 2.0. Here it is decided which requests
are rejected before the application sees them (RFC 9112), and how. Keys, routes and limits on bodies are the layers'.

A server that must answer some requests whatever else is connected sets `HttpLimits.max_silent`: uvicorn counts silent
connections for `limit_concurrency`, beyond which it answers 503 to everybody.

Invariants: while a part of a request is outstanding, or the client does not read its response, a timer runs; uvicorn
has one of its own for idle connections. A client that is rejected while it sends can read the response
(`LingeringTransport`). Clients never take the last descriptor (`ConnectionLimit`), so that there are some for what the
process cannot do without: the connection to its core, the model's files, the processes that it starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from argosy_protocol.anthropic import error_body as anthropic_error_body
from argosy_protocol.anthropic import is_messages_path
from argosy_protocol.errors import (
    ApiError,
    BadRequest,
    HeadersTooLarge,
    PayloadTooLarge,
    RequestTimeout,
    Unavailable,
)
from argosy_protocol.program.http_upgrade import Head, UpgradeIgnoringParser
from argosy_protocol.program.listen import has_unsent

_CONNECTION = "argosy.client_connection"


class ClientConnection:
    """The connection of one request, past the layers between the server and the endpoint.

    It tells when its client has left. ASGI tells of it by `receive` alone, which takes a task of its own beside each
    answer. The request's body must have been received before `watch`.

    It takes pieces of the response's body from wherever they arise, without a task's turn: a piece that is sent as
    usual wakes the request's task, which resumes through every layer, once for each token of each stream. The owner of
    the response sends its status, its first piece and its end as usual, and writes here only while it is sending
    nothing itself, so the order of the pieces is kept.

    A layer that is to see all messages of a response takes this out of the scope (`without_client_connection`).

    Args:
        cycle: of the request in uvicorn's protocol.
    """

    __slots__ = ("_cycle", "_on_left")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._on_left: Callable[[], None] | None = None

    def watch(self, on_left: Callable[[], None]) -> None:
        """Call `on_left` once, when the client leaves, or at once if it has left."""
        if self._cycle.disconnected:
            on_left()
            return
        self._on_left = on_left
        self._cycle.flow.resume_reading()  # which a request behind this one has paused, or the end would not be seen

    def unwatch(self) -> None:
        self._on_left = None

    def tell(self) -> None:
        """Tell that the client has left; the protocol calls this."""
        on_left, self._on_left = self._on_left, None
        if on_left is not None:
            on_left()

    @property
    def is_ready(self) -> bool:
        """Whether a piece can be written now: the status is sent, the client is there and reads, and the body has no
        length that was announced."""
        cycle = self._cycle
        return bool(
            cycle.response_started
            and cycle.chunked_encoding
            and not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)
            and cycle.scope["method"] != "HEAD"
        )

    def write(self, piece: bytes) -> None:
        """Write a piece, which is not empty, if `is_ready`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


def offer_client_connection(scope: Any, cycle: RequestResponseCycle) -> None:
    """Put the connection of a request into its scope."""
    scope[_CONNECTION] = ClientConnection(cycle)


def client_connection(scope: Mapping[str, Any]) -> ClientConnection | None:
    """Return the connection of a request; None if a layer has taken it out, or the request was relayed."""
    connection: ClientConnection | None = scope.get(_CONNECTION)
    return connection


def without_client_connection(scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the scope for layers that see all messages."""
    return {name: value for name, value in scope.items() if name != _CONNECTION}


class LingeringTransport:
    """Closes a connection so that a client that is still sending can read the last response.

    Closing a socket with unread input resets the connection, and the reset overtakes the response: the client gets a
    broken pipe instead of the 413. So our side is closed first, and input is read and discarded for a bounded time and
    number of bytes (RFC 9112, 9.6). It has the methods of a transport that uvicorn's protocol uses.

    TLS ends both sides at once: it delivers what is written and then its end, discards input meanwhile, and waits for
    the client's end. A client that does not end its side is cut after the same time, or, unless it is sending, once it
    has all that was written.

    Args:
        seconds, max_bytes: limits on the input that is discarded; of TLS on the time alone.
        stall_s: how long a closed connection may take to deliver what is written.
        is_owed: whether the client is still sending, asked when the connection is to be closed.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        max_bytes: int,
        is_owed: Callable[[], bool],
        stall_s: float,
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._seconds = seconds
        self._bytes_left = max_bytes
        self._is_owed = is_owed
        self._stall_s = stall_s
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = self._is_paused = False

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        if not self._is_closing:
            self._is_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def close(self) -> None:
        """Close at once, or linger if a part of the request is outstanding."""
        if self._is_owed():
            self.linger()
        elif not self.is_closing():
            self._is_closing = True
            self._transport.close()
            if not self._transport.can_write_eof():  # TLS, whose own deadline is for clients that read slowly
                self._timer = self._loop.call_later(self._seconds, self._cut_delivered)
            elif self._transport.get_write_buffer_size():
                self._timer = self._loop.call_later(self._stall_s, self._end)

    def abort(self) -> None:
        """Close at once, without delivering what is written."""
        self.lost()
        self._transport.abort()

    def linger(self) -> None:
        """Close our side, and the connection a moment later."""
        if self.is_closing():
            return
        self._is_closing = True
        end = self._end
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self.resume_reading()
        else:  # TLS
            self._transport.close()
            end = self.abort
        self._timer = self._loop.call_later(self._seconds, end)

    def discard(self, data: bytes) -> None:
        """Discard input received after our side was closed."""
        self._bytes_left -= len(data)
        if self._bytes_left < 0 and self._timer is not None:
            self._end()

    def lost(self) -> None:
        """Clean up after the connection was lost."""
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut_delivered(self, was_sent: bool = False) -> None:
        """Cut the connection once the client has all that was written.

        Nothing is on the way now, nor a few turns of the event loop ago: after a standstill of the loop TLS may have
        something left to hand on.
        """
        is_sent = not has_unsent(self._transport)
        if is_sent and was_sent:
            self.abort()
        else:
            self._timer = self._loop.call_later(GRACE_S, self._cut_delivered, is_sent)

    def _end(self) -> None:
        self.lost()
        if self._transport.get_write_buffer_size():  # it does not read either
            self._transport.abort()
        else:
            self._transport.close()


MAX_HEAD_BYTES = 64 * 1024
"""Limit on request line, headers and trailers. Twice the router's, because the router adds headers."""
MAX_HEADERS = 256
"""h11's and vLLM's limit; the router forwards at most 100 headers and adds a few."""

MAX_PIPELINED = 16
"""Requests that wait behind the one that is being answered; uvicorn takes all that come in one read, and a read more
each answer. Of a client that sends more ahead the last of these is the last one on its connection."""

MAX_PIECES = 4096
PIECE_BYTES = 256
"""Chunks of a body that come together, and one more for each so many bytes. Each takes a microsecond and more, and
uvloop reads 32 times 256 KiB of a connection in one turn."""

GRACE_S = 0.1
"""Time granted after a deadline: several turns of the event loop."""

_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    413: b"Content Too Large",
    431: b"Request Header Fields Too Large",
}


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of one connection. Sizes in bytes, times in seconds."""

    max_head_bytes: int = MAX_HEAD_BYTES
    max_headers: int = MAX_HEADERS
    header_timeout_s: float = 10.0
    """Limit from the connection, or a later request's first byte, to the end of the headers. Equals the router's."""
    body_timeout_s: float = 30.0
    """Period in which a client must send `min_body_rate` bytes per second, or the rest of the body."""
    min_body_rate: int = 1024
    write_stall_s: float = 60.0
    """How long a client may leave the write buffer full, or the rest of it after the end. Equals the router's."""
    linger_s: float = 1.0
    """How long a rejected client's input is discarded before the connection is closed. Equals the router's."""
    unwanted_bytes: int = 64 << 20
    """Limit on the bytes of a body that are discarded after its request has been answered. Clients that send everything
    before they read thus get the response to a body of up to twice an engine's limit on bodies."""
    max_silent: int | None = None
    """Limit on a server's connections on which no whole request is being answered to a client that reads; beyond it the
    one that has been silent for longest is cut. None: no limit."""
    slow_are_kept: bool = False
    """Whether connections do not count as silent whose body comes, or whose answer is read, slowly."""


class _Refused(Exception):
    """Raised in a callback to stop the parser."""


async def _send_until_close(
    cycle: RequestResponseCycle, send: Callable[[Any], Awaitable[None]], message: Any
) -> None:
    """Send a message of a response whose body ends with the connection: each piece is as long as it is to be."""
    cycle.expected_content_length = len(message.get("body", b""))
    await send(message)


async def _send_to_who_may_wait(
    cycle: RequestResponseCycle, send: Callable[[Any], Awaitable[None]], message: Any
) -> None:
    """Send a message of a response to a client that waits for `100 Continue`. If it was not told to continue, nobody
    knows whether its body will follow (RFC 9110, 10.1.1): the connection is closed after the response."""
    if cycle.waiting_for_100_continue and cycle.more_body and not cycle.body:
        cycle.keep_alive = False
    await send(message)


class BoundedProtocol(HttpToolsProtocol):
    """Protocol that answers a request beyond a bound with an error and closes the connection, before the request's end.

    Input for a request that has been answered is discarded, for at most two periods of `body_timeout_s`.
    """

    limits: ClassVar[HttpLimits] = HttpLimits()
    on_slow_client: ClassVar[Callable[[], None]] = staticmethod(lambda: None)
    """Called when a client is disconnected because it does not read its response."""
    silent: ClassVar[dict[BoundedProtocol, None]]
    """Silent connections of the server, the one that has been so for longest first."""

    @classmethod
    def for_server(cls, **bounds: object) -> type[Self]:
        """Make a class for the connections of one server, which are counted together.

        Args:
            bounds: values of class variables.
        """
        return cast("type[Self]", type(cls.__name__, (cls,), {"silent": {}, **bounds}))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._requests = UpgradeIgnoringParser(self._new_parser, self._reported_head)
        self.parser = cast("httptools.HttpRequestParser", self._requests)
        self._head_bytes = 0
        """Bytes of the current request's head that the parser has reported so far."""
        self._num_headers = 0
        self._num_hosts = 0
        self._untold_bytes = 0
        """Received since the last byte of a body, or end of a request: what the parser may be holding. What came in
        one read with those is not counted, so it may hold a read's size more."""
        self._is_in_head = False
        self._is_in_body = False
        self._period_bytes = 0
        """Bytes of the body received in the current period."""
        self._pieces_left = 0.0
        """Further chunks that may come together with others."""
        self._is_first_piece = True
        """Whether no part of a body was in the current read yet."""
        self._deadline: asyncio.TimerHandle | None = None
        self._is_parsing = False
        """Whether a read is being parsed, during which the deadline changes several times. It starts after that."""
        self._seconds_left: float | None = None
        """Of the deadline that is to start."""
        self._stall: asyncio.TimerHandle | None = None
        """Deadline for the client to read from a full write buffer."""
        self._refusal: ApiError | None = None
        self._unwanted_bytes = 0
        """Bytes of the current request's body received after its response."""
        self._is_unread = False
        """Whether input is discarded because it cannot be a request."""
        self._running: RequestResponseCycle | None = None
        """The request that is being answered; pipelined ones wait behind it."""
        self._lingering: LingeringTransport | None = None
        """The transport, as uvicorn's protocol has it."""
        self._is_lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast("asyncio.Transport", self._linger_on(transport)))
        self._expect_head()
        self._note_silence()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._note_silence()
        self._cancel_deadline()
        self._cancel_stall()
        if self._lingering is not None:
            self._lingering.lost()
        if self._running is not None and not self._running.response_complete:
            # uvicorn tells the request that came last, behind which nothing runs yet.
            self._running.disconnected = True
            self._running.message_event.set()
            connection = client_connection(self._running.scope)
            if connection is not None:
                connection.tell()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cancel_stall()
        self._stall = self.loop.call_later(self.limits.write_stall_s, self._grant_stall_grace)
        self._note_silence()

    def resume_writing(self) -> None:
        self._cancel_stall()
        super().resume_writing()
        self._note_silence()

    def data_received(self, data: bytes) -> None:
        if self._lingering is not None and self._lingering.is_closing():
            self._lingering.discard(data)
            return
        if self._is_unread:
            self._unwanted_bytes += len(data)
            if self._unwanted_bytes > self.limits.unwanted_bytes and self._lingering is not None:
                self._lingering.abort()
            return
        self._untold_bytes += len(data)
        self._is_parsing = self._is_first_piece = True
        if self._deadline is None:
            self._expect_head()
        try:
            super().data_received(data)
        finally:
            self._is_parsing = False
        if self._seconds_left is not None:
            self._start_deadline(self._seconds_left)
        if self._untold_bytes > self.limits.max_head_bytes:
            self._refuse(self._too_large())

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # As uvicorn's parser: what follows the last request of a connection is no error.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _reported_head(self) -> Head:
        return self.url, self.headers

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        self._head_bytes = self._num_headers = self._num_hosts = self._unwanted_bytes = 0
        self._is_in_head = True
        self._unset_keepalive_if_required()  # set by a body that ended behind its answer, in the same read
        super().on_message_begin()
        self._expect_head()
        self._note_silence(from_now=True)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        self._num_headers += 1
        if self._num_headers > self.limits.max_headers:
            self._stop(HeadersTooLarge(f"the request has more than {self.limits.max_headers} headers"))
        if self._is_in_head:  # trailers are counted and dropped: uvicorn would add them to the headers
            self._num_hosts += name.lower() == b"host"
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._requests.offers_upgrade:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(BadRequest("too many requests were sent ahead"))
        if self.parser.should_upgrade():
            self._stop(BadRequest("CONNECT is not supported"))
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._stop(BadRequest(f"HTTP/{version} is not supported, only HTTP/1.1 and 1.0"))
        if self._num_hosts > 1 or (version == "1.1" and not self._num_hosts):
            self._stop(BadRequest("a request has one Host header"))
        if version == "1.0" and any(name.lower() == b"transfer-encoding" for name, _ in self.headers):
            # A proxy of HTTP/1.0 would see other requests behind it (RFC 9112, 6.1).
            self._stop(BadRequest("transfer-encoding is not supported in HTTP/1.0"))
        super().on_headers_complete()
        if self._running is None or self._running.response_complete:
            self._running = self.cycle
        if version == "1.0":
            # It knows no chunks (RFC 9112, 6.1); the connection is closed after the response.
            self.cycle.chunked_encoding = False
            self.cycle.send = partial(_send_until_close, self.cycle, self.cycle.send)  # type: ignore[method-assign]
            self.cycle.waiting_for_100_continue = False  # which it does not know either (RFC 9110, 10.1.1)
        elif self.cycle.waiting_for_100_continue:
            self.cycle.send = partial(_send_to_who_may_wait, self.cycle, self.cycle.send)  # type: ignore[method-assign]
        offer_client_connection(self.scope, self.cycle)
        self._is_in_head = False
        self._is_in_body = True
        self._pieces_left = float(MAX_PIECES)
        self._expect_body()
        self._note_silence()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()
        self._note_silence()

    def on_body(self, body: bytes) -> None:
        self._untold_bytes = 0
        self._period_bytes += len(body)
        if not self._is_first_piece:
            self._pieces_left += len(body) / PIECE_BYTES - 1
            if self._pieces_left < 0:
                self._stop(BadRequest("the body comes in too many small chunks"))
        self._is_first_piece = False
        if self.cycle.response_complete:
            self._unwanted_bytes += len(body)
            if self._unwanted_bytes > self.limits.unwanted_bytes:
                self._stop(PayloadTooLarge("the request was answered long ago"))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._untold_bytes = 0
        if self._requests.offers_upgrade:
            return
        self._is_in_body = False
        super().on_message_complete()
        self._cancel_deadline()
        if (
            self.cycle.response_complete
        ):  # uvicorn's timer for idle connections has ended with the body's bytes
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        self._note_silence()

    # Silent connections

    def _note_silence(self, *, from_now: bool = False) -> None:
        """Count the connection among the silent ones if it is one, else not.

        Args:
            from_now: its silence begins now, also if it was silent before.
        """
        if self.limits.max_silent is None:
            return
        is_whole = not self._is_in_head and (self.limits.slow_are_kept or not self._is_in_body)
        is_answering = is_whole and self.cycle is not None and not self.cycle.response_complete
        is_slow = self.flow.write_paused and not self.limits.slow_are_kept
        is_silent = not self._is_lost and (not is_answering or is_slow)
        if from_now or not is_silent:
            self.silent.pop(self, None)
        if is_silent:
            self.silent.setdefault(self)
            if len(self.silent) > self.limits.max_silent:
                next(iter(self.silent))._give_way()

    def _give_way(self) -> None:
        del self.silent[self]
        if self._running is not None:
            self._running.disconnected = True  # else what it writes before it is told is an error
        if self._lingering is not None:
            self._lingering.abort()

    # Deadlines

    def _expect_head(self) -> None:
        self._start_deadline(self.limits.header_timeout_s)

    def _expect_body(self) -> None:
        self._period_bytes = 0
        self._start_deadline(self.limits.body_timeout_s)

    def _cancel_deadline(self) -> None:
        self._seconds_left = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _start_deadline(self, seconds: float) -> None:
        self._cancel_deadline()
        if self._is_parsing:
            self._seconds_left = seconds
        else:
            self._deadline = self.loop.call_later(seconds, self._grant_grace)

    def _grant_grace(self) -> None:
        """Wait for a few more turns of the event loop.

        Loops run their timers before they read, so after a standstill the data received meanwhile must be read first.
        """
        self._deadline = self.loop.call_later(GRACE_S, self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline = None
        limits = self.limits
        if self.flow.read_paused:  # we have paused reading
            self._start_deadline(limits.body_timeout_s if self._is_in_body else limits.header_timeout_s)
        elif not self._is_in_body:
            is_answering = self.cycle is not None and not self.cycle.response_complete
            if self._is_in_head or not is_answering:  # otherwise these were empty lines after a request
                self._refuse(RequestTimeout(f"no complete headers within {limits.header_timeout_s:g} s"))
        elif (
            self.cycle.response_complete or self._period_bytes < limits.min_body_rate * limits.body_timeout_s
        ):
            self._refuse(RequestTimeout(f"the body came slower than {limits.min_body_rate} bytes per second"))
        else:
            self._expect_body()

    def _cancel_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _grant_stall_grace(self) -> None:
        """As `_grant_grace`: what the client could read meanwhile must be written first."""
        self._stall = self.loop.call_later(GRACE_S, self._on_stall)

    def _on_stall(self) -> None:
        self._stall = None
        if self._lingering is not None:
            self.on_slow_client()
            self._lingering.abort()

    # Rejections

    def send_400_response(self, msg: str) -> None:
        """Send an error response; uvicorn calls this when the parser stops."""
        self._refuse(self._refusal or BadRequest("this is not HTTP/1.1"))

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.limits.max_head_bytes:
            self._stop(self._too_large())

    def _too_large(self) -> ApiError:
        return HeadersTooLarge(f"request line and headers exceed {self.limits.max_head_bytes} bytes")

    def _stop(self, refusal: ApiError) -> None:
        self._refusal = refusal
        raise _Refused

    def _refuse(self, error: ApiError) -> None:
        """Send an error response, unless a response has begun, and close the connection.

        What follows a request that is still being answered is discarded: the connection is closed after the answer.
        """
        self._cancel_deadline()
        if self.transport.is_closing():
            return
        if self._is_in_body and self.pipeline:  # it waits behind an answer, which goes on
            self.pipeline.popleft()
            before = self.pipeline[0][0] if self.pipeline else self._running
            assert before is not None  # the pipeline waits for it
            self.cycle = before
            self._is_in_body = False
        cycle = self.cycle
        is_own = self._is_in_body and cycle is not None  # the application has only a part of the request
        if not is_own and cycle is not None and not cycle.response_complete:
            cycle.keep_alive = False
            self._is_unread = True
            return
        if is_own:
            cycle.disconnected = True
            cycle.message_event.set()
        if not is_own or not cycle.response_started:
            body = error_body(error, self.scope["path"] if is_own else "")
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n%b"
                % (error.http_status, _REASONS[error.http_status], len(body), body)
            )
        self._hang_up()

    def _linger_on(self, transport: asyncio.Transport) -> LingeringTransport:
        limits = self.limits
        self._lingering = LingeringTransport(
            transport,
            self.loop,
            limits.linger_s,
            limits.unwanted_bytes,
            lambda: self._is_in_body or self._is_unread,
            limits.write_stall_s,
        )
        return self._lingering

    def _hang_up(self) -> None:
        """Close the connection, after discarding the client's input for a moment."""
        assert self._lingering is not None
        self._lingering.linger()


def error_body(error: ApiError, path: str) -> bytes:
    """Encode an error in Anthropic's shape if `path` is of its API, else in OpenAI's."""
    return anthropic_error_body(error) if is_messages_path(path) else error.body()


MAX_TURNED_AWAY = 16
"""Limit on excess connections that get time to read the 503; each uses a descriptor that is not for clients."""


class ConnectionLimit(BoundedProtocol):
    """Protocol that answers 503 on excess connections and closes them.

    While there are few excess connections, it discards their input for a moment first, so that the client can read the
    response. Connections count from the end of their TLS handshake on; `TlsAcceptor` counts those before it.
    """

    max_connections: ClassVar[int]
    num_turned_away: ClassVar[int] = 0
    """Excess connections that are still open, counted per class, because each server has a class of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_turned_away = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) < self.max_connections:
            super().connection_made(transport)
            return
        self._is_turned_away = True
        type(self).num_turned_away += 1
        error = Unavailable("this engine has as many connections as it takes", code="too_many_connections")
        body = error.body()
        transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(body), body)
        )
        if self.num_turned_away > MAX_TURNED_AWAY:
            if transport.get_extra_info("sslcontext") is None:
                transport.close()
            else:
                transport.abort()  # TLS waits for the client's part of the end
            return
        self._linger_on(transport)
        self._hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_turned_away:
            super().connection_lost(exc)
            return
        type(self).num_turned_away -= 1
        if self._lingering is not None:
            self._lingering.lost()
