"""Server side of a client connection: request order, deadlines and response writing.

Owns: one accepted connection from its first byte to its close.
Must not know: routes, keys, replicas. It hands requests to an `Application`, and tells the `ClientListener` that
answers one when the client disconnects or reads too slowly.
Invariants: requests are answered one at a time and in order; a disconnect is noticed at once, whatever the client has
pipelined, and of many that come at once a few are told in each turn of the event loop; while a client does not read its
responses, the server starts no further one and stops reading from it. Its transport has little of them then; the rest
waits here, and all of it counts in the server's `BodyMemory`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from ipaddress import ip_network
from typing import Final, cast

from argosy_protocol.errors import ApiError, RequestTimeout, Unavailable
from argosy_protocol.program.listen import has_unsent
from argosy_router.config import ServerLimits
from argosy_router.http.deadlines import Deadline, TimerWheel
from argosy_router.http.limits import AddressGroups, BodyMemory, BodyReservation, ConnectionLimit
from argosy_router.http.messages import (
    Application,
    ClientListener,
    Phase,
    Request,
    RequestReader,
    status_line,
)

MANY: Final = 8
"""Streams active within one interval from which on the loop pauses. Fewer are faster without a pause, which costs as
much as two or three events."""


class ReadCoalescer:
    """Slows the event loop down to one turn per interval while at least `MANY` streams are active in each, as in
    interrupt moderation.

    Invariants: there is no pause while few streams are sending; a pause ends with the interval, and a loop that was
    busy for the whole interval does not pause at all.

    Each event of a stream costs a read, a write and a share of a turn of the loop, most of it in the kernel. When many
    streams are fast, one turn per interval finds several events of a stream in one read, and sends them in one write.
    """

    def __init__(
        self,
        interval_s: float,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`interval_s` in seconds; 0 never waits."""
        self._interval_s = interval_s
        self._now = now
        self._sleep = sleep
        self._begun = 0.0
        self._streams = 0
        self._is_due = False
        self.interval = 0
        """Number of the current interval; a stream counts once in each."""
        self.pauses = 0

    def count_stream(self) -> None:
        """Count a stream that has sent something in this interval."""
        self._streams += 1
        if self._streams < MANY or self._is_due:
            return
        now = self._now()
        if now - self._begun < self._interval_s:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._pause)
        else:
            self._begin(now)

    def _pause(self) -> None:
        """Sleep until the interval is over; runs after this turn's writes and before the next poll."""
        self._is_due = False
        now = self._now()
        left_s = self._begun + self._interval_s - now
        if left_s > 0.0:
            self._sleep(left_s)
            self.pauses += 1
            now = self._now()
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._begun = now
        self._streams = 0
        self.interval += 1


REQUESTS_PER_TURN = 16
"""Requests answered on one connection per turn of the event loop (some 50 us each). Further pipelined requests wait
until other connections have had their turn."""
FEED_BYTES = 16 * 1024
"""Bytes that are parsed at once: some hundred requests of the shortest kind, which take a few milliseconds."""
PIECE_BYTES = 16 * 1024
"""Bytes that TLS is given at once, the size of its records. It encrypts all that it is given at once, and hands it to a
transport of its own without telling how much of it is sent."""
PLAIN_PIECE_BYTES = 256 * 1024
"""Bytes that a transport without TLS is given at once. It tells what it has of them; an answer of a megabyte in pieces
of 16 KiB takes the event loop twice the time."""
TLS_BUFFER_BYTES = 64 * 1024
"""What that transport has taken when TLS tells that it is full."""


class ServerState:
    """State shared by all connections of one server."""

    def __init__(self, application: Application, limits: ServerLimits, wheel: TimerWheel) -> None:
        self.application = application
        self.limits = limits
        self.wheel = wheel
        self.body_memory = BodyMemory(limits.max_inflight_bytes)
        self.connection_limit = ConnectionLimit(limits.max_connections, limits.max_silent_per_address)
        self.addresses = AddressGroups([ip_network(network) for network in limits.trusted_proxies])
        self.read_coalescer = ReadCoalescer(limits.stream_moderation_us * 1e-6)
        self.unread_cut = 0
        """Connections aborted so far because there was no memory for responses that their clients do not read."""
        self.connections: set[ServerConnection] = set()
        self.is_draining = False
        """Whether responses carry `connection: close`, so that clients send their next request elsewhere."""
        self._changed = asyncio.Event()

    def remove(self, connection: ServerConnection) -> None:
        """Forget a connection that has ended."""
        self.connections.discard(connection)
        self._changed.set()

    @property
    def busy(self) -> int:
        """Number of connections with a request being received or answered."""
        return sum(connection.is_busy for connection in self.connections)

    async def emptied(self) -> None:
        """Wait until no connection is left."""
        while self.connections:
            self._changed.clear()
            await self._changed.wait()


class ServerConnection(asyncio.Protocol):
    """One client connection."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._limits = state.limits
        self._application = state.application
        self.reader = RequestReader(state.limits, state.body_memory, state.application.on_head)
        self._deadline = Deadline(state.wheel, self._on_deadline)
        """Deadline for the client's next input, or for the connection to close."""
        self._stall = Deadline(state.wheel, self._on_stall)
        """Deadline for the client to read from a full write buffer."""
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.listener: ClientListener | None = None
        """What answers the current request, if that takes time."""
        self.request: Request | None = None
        """The request being answered."""
        self._held = bytearray()
        """Pipelined bytes, received while `request` was being answered."""
        self._awaited: Phase | None = None
        """The phase that the deadline is armed for."""
        self._body_mark = 0
        self._is_serving = False
        self._is_full = False
        """Whether the transport takes nothing more."""
        self._is_write_paused = False
        """Whether the client reads too slowly: the transport is full, or the output waits for it."""
        self._output: deque[bytes] = deque()
        """What the transport has not been given of the responses."""
        self._output_bytes = 0
        self._output_begin = 0
        """Bytes that it has been given of the first piece."""
        self._is_lingering = False
        """Whether input is read on for a moment once the output has been written."""
        self._is_tls = False
        self._was_sent = False
        """Whether nothing was on the way to the client when the deadline of the end of TLS passed last."""
        self._piece_bytes = PLAIN_PIECE_BYTES
        self._unread: BodyReservation | None = None
        """Memory of what the client has not read, while it is behind."""
        self._unread_mark = 0
        """Bytes that the client had not read when `_stall` was set, and those written since."""
        self._is_read_paused = False
        """Whether reading pauses: between two requests, until the client has read the earlier responses or other
        connections have had their turn; within one, until its body's sink has room."""
        self._is_lost = False
        """Whether the client has disconnected, and what answers it is told so, perhaps in a later turn."""
        self._is_known = True
        """Whether the application authorized the last request (set its `grant`)."""
        self.is_discarding = False
        """Whether input is discarded, because the client has pipelined more than `max_held_bytes`."""
        self._is_closing = False
        self._is_chunked = False
        self.is_admitted = True
        """Whether the connection limit admitted it; one over the limit stays open to be refused."""
        self._is_counted = False
        self._end_handshake: Callable[[], None] | None = None
        self.is_made = False
        self.address = ""
        """The client's address group (`AddressGroups`); empty where many clients share an address."""
        self.is_silent = False
        """Whether the connection may be closed to admit others: its client has not sent a whole request head, or not
        the body of a request that needs no key."""
        self.is_receiving = False
        """Whether the connection may be closed to admit others because of what its account receives: its client has
        not sent the whole body of an authorized request."""
        self._idle = state.connection_limit.idle
        self._coalescer = state.read_coalescer
        self._interval = -1
        """The coalescer's interval in which a stream on this connection last sent something."""

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's does not inherit from it
        self.transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        self._is_tls = transport.get_extra_info("sslcontext") is not None
        if self._is_tls:
            self._piece_bytes = PIECE_BYTES
        self._state.connections.add(self)
        self._awaited = Phase.IDLE
        self._deadline.set(self._limits.header_timeout_s)
        self.is_made = True
        if not self._is_counted:
            self.count_against_limit(transport.get_extra_info("peername"))
        if not self.is_admitted:
            self._refuse_next_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._deadline.end()
        self._stall.end()
        self._lose_client()
        self.reader.close()
        self._output.clear()
        self._output_bytes = self._output_begin = 0
        self._release_unread()
        self._state.connection_limit.release(self, is_admitted=self.is_admitted)
        self._state.remove(self)

    def eof_received(self) -> bool:
        # A half-closed connection counts as gone: it looks the same as one whose client has died.
        if self.listener is not None:
            self._is_closing = True  # what answers may go on for a turn
            self._lose_client()
            self.transport.abort()
        elif self._output and not self._is_tls:  # TLS closes in any case
            self._is_lingering = False
            self._close_when_written()
            return True
        return False

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        if self.request is None:
            self._feed(data)
            self._serve_requests()
            self._bound_held()
            if self.reader.incoming is not None and self.reader.is_sink_full(self._resume_reading):
                self._pause_reading()
        elif not self.is_discarding:
            self._held += data
            self._bound_held()

    def _bound_held(self) -> None:
        """Discard what the client has pipelined behind a request that is being answered if it is too much."""
        if self.request is not None and len(self._held) > self._limits.max_held_bytes:
            # Pausing reads instead would hide a disconnect.
            self.is_discarding = True
            self._held.clear()

    def _feed(self, data: bytes) -> None:
        """Parse bytes up to a piece in which a request ends; hold what follows until that one was answered.

        Parsed, many small requests take twenty times their bytes.
        """
        reader = self.reader
        begin = 0
        while begin < len(data) and not self._held:
            if reader.ready or reader.failure is not None:
                break
            reader.feed(data[begin : begin + FEED_BYTES])
            begin += FEED_BYTES
        self._held += data[begin:]

    def pause_writing(self) -> None:
        self._is_full = True
        if self._is_write_paused:
            return
        self._is_write_paused = True
        self._begin_stall()
        if self.listener is not None:
            self.listener.on_client_paused()

    def resume_writing(self) -> None:
        self._is_full = False
        self._write_output()
        if self._is_full:
            if self._unread is not None:
                self._unread.shrink(self._unread_size())
            return
        self._is_write_paused = False
        self._stall.clear()
        self._release_unread()
        if self._is_closing:
            self._end_output()
            return
        if self.listener is not None:
            self.listener.on_client_resumed()
        self._resume_reading()

    # connection limit

    def count_against_limit(self, peer: object, end_handshake: Callable[[], None] | None = None) -> None:
        """Count the connection against the limit: when it is made, or before its TLS handshake.

        Args:
            peer: the client's address as `getpeername` returns it.
            end_handshake: aborts the handshake, and with it the connection.
        """
        state = self._state
        now = state.wheel.time()
        self._is_counted = True
        self._end_handshake = end_handshake
        self.is_admitted = state.connection_limit.admit(now)
        if self.is_admitted:
            self.address = state.addresses.of(str(peer[0])) if isinstance(peer, tuple) else ""
            self._begin_silence(now)

    def on_handshake_failed(self) -> None:
        """Stop counting the connection: its handshake failed, so `connection_lost` will never be called."""
        self._state.connection_limit.release(self, is_admitted=self.is_admitted)

    def _begin_silence(self, now: float) -> None:
        if self.is_admitted and not self.is_silent:
            self.is_silent = True
            self._state.connection_limit.add_silent(self, now)

    def _begin_receiving(self, now: float) -> None:
        request = self.reader.incoming
        if self.is_admitted and not self.is_receiving and request is not None:
            self.is_receiving = True
            self._state.connection_limit.add_receiving(self, request.account, now)

    def _end_receiving(self) -> None:
        self.is_receiving = False
        self._state.connection_limit.remove_receiving(self)

    def _end_silence(self) -> None:
        self.is_silent = False
        self._state.connection_limit.remove_silent(self)

    # connections over the limit, and those closed to admit others

    def _refuse_next_request(self) -> None:
        """Refuse the first request once its head has arrived; a response before any request would confuse clients."""
        if self._state.connection_limit.is_surplus_full:
            self.transport.abort()
            return
        self.reader = RequestReader(self._limits, self._state.body_memory, self._on_surplus_head)
        self._deadline.set(self._limits.surplus_timeout_s)

    def _on_surplus_head(self, request: Request) -> bool:
        """Refuse what needs a body, such as completions; answer probes and metrics all the same."""
        request.keep_alive = False
        if self._application.on_head(request):
            raise Unavailable(
                "the connection limit (--max-connections) is reached; retry later", retry_after_s=1.0
            )
        return False

    def displace(self) -> bool:
        """Close the connection to admit another: at once if it is silent or receives a body; if it is idle, unless its
        client is authorized and has not read all of the last response. Return whether it was closed."""
        if self.is_silent or self.is_receiving:
            self.is_silent = self.is_receiving = False
            self._is_closing = True
            if self.is_made:
                self.transport.abort()
            elif self._end_handshake is not None:
                self._end_handshake()
            return True
        if self._is_closing:
            return False
        if not self._unread_bytes():
            self._close()
            return True
        if self._is_known:
            return False
        self._is_closing = True
        self.transport.abort()
        return True

    # request order

    def _serve_requests(self) -> None:
        """Hand requests to the application until one is not answered at once or none is left."""
        if self._is_serving:
            return
        reader = self.reader
        self._is_serving = True
        num_taken = 0
        try:
            while self.request is None and not self._is_closing:
                if self._is_write_paused and (reader.ready or self._held):
                    self._await_slow_client()
                    return
                if num_taken >= REQUESTS_PER_TURN and (reader.ready or self._held):
                    self._serve_next_turn()
                    return
                if reader.ready:
                    self._deadline.clear()
                    self._awaited = None
                    self._idle.pop(self, None)
                    if self.is_silent:
                        self._end_silence()
                    if self.is_receiving:
                        self._end_receiving()
                    self.request = request = reader.ready.pop(0)
                    self._is_known = request.grant is not None
                    num_taken += 1
                    self._application.on_request(self, request)
                elif reader.failure is not None:
                    self._reject(reader.failure)
                elif self._held:
                    piece = bytes(self._held[:FEED_BYTES])
                    del self._held[:FEED_BYTES]
                    reader.feed(piece)
                else:
                    self._arm_deadline()
                    return
        finally:
            self._is_serving = False

    def _serve_next_turn(self) -> None:
        """Go on in the next turn of the event loop, without reading before."""
        self._pause_reading()
        asyncio.get_running_loop().call_soon(self._resume_reading)

    def _await_slow_client(self) -> None:
        """Leave pipelined requests unanswered until the client has read earlier responses; `_stall` bounds the time."""
        self._pause_reading()
        self._become_displaceable()

    def _pause_reading(self) -> None:
        if not self._is_read_paused:
            self._is_read_paused = True
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        """Resume reading, and answer the requests that waited for it."""
        if self._is_read_paused and not self._is_write_paused and not self._is_closing:
            self._is_read_paused = False
            self.transport.resume_reading()
            self._serve_requests()
            self._bound_held()

    def _become_displaceable(self) -> None:
        """Let new connections displace this one unless its client is authorized."""
        if not self._is_known:
            self._begin_silence(self._state.wheel.time())

    def _arm_deadline(self) -> None:
        """Arm the deadline of the phase the client is in, once per phase."""
        phase, limits = self.reader.phase, self._limits
        if phase is self._awaited:
            return
        self._awaited = phase
        if phase is Phase.IDLE:
            self._deadline.set(limits.keep_alive_s)
            self._idle[self] = None
            return
        self._idle.pop(self, None)
        if phase is Phase.HEAD:
            self._begin_silence(self._state.wheel.time())
            self._deadline.set(limits.header_timeout_s)
        else:
            if not self.reader.is_body_read:  # a route without authentication: anybody can get this far
                self._begin_silence(self._state.wheel.time())
            else:
                if self.is_silent:
                    self._end_silence()
                self._begin_receiving(self._state.wheel.time())
            self._body_mark = 0
            self._deadline.set(limits.body_timeout_s)
            if self.reader.wants_continue:
                self._write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _on_deadline(self) -> None:
        if self._is_closing and self._is_tls and self.transport.is_closing():
            self._cut_delivered()
        elif self._is_closing and self._is_write_paused:
            self._deadline.set(self._limits.write_stall_s)  # meanwhile `_stall` holds
        elif self._is_closing:
            self.transport.abort()
        elif self.reader.phase is Phase.IDLE:
            self._close()
        elif self.reader.phase is Phase.BODY and self._is_body_on_time():
            self._deadline.set(self._limits.body_timeout_s)
        else:
            self._reject(RequestTimeout("the request was sent too slowly"))

    def _begin_stall(self) -> None:
        self._unread_mark = self._unread_bytes()
        # What is read of TLS shows in steps of more than `TLS_BUFFER_BYTES`.
        self._stall.set(self._limits.write_stall_s * (2 if self._is_tls else 1))

    def _on_stall(self) -> None:
        """Abort unless the client reads as fast as it would have to send a body."""
        read = self._unread_mark - self._unread_bytes()
        if read >= self._limits.min_body_rate * self._limits.write_stall_s:
            self._begin_stall()
        else:
            self.transport.abort()

    def _is_body_on_time(self) -> bool:
        delivered = self.reader.body_bytes - self._body_mark
        self._body_mark = self.reader.body_bytes
        return delivered >= self._limits.min_body_rate * self._limits.body_timeout_s

    def _reject(self, error: ApiError) -> None:
        """Answer a request whose rest is not read, because it is malformed or refused at its head, and close."""
        if self.is_receiving:
            self._end_receiving()
        now = self._state.wheel.time()
        self._begin_silence(now)  # a new connection need not wait until the refusal has been read
        request = self.reader.incoming
        lines, body = self._application.on_refused(error, request)
        self._write(
            b"%b%bcontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (
                status_line(error.http_status),
                lines if request is None else lines + request.answer_lines,
                len(body),
                b"" if request is not None and request.method == b"HEAD" else body,
            )
        )
        self._linger()

    def _linger(self) -> None:
        """Close, but go on discarding input for a moment: a reset would overtake the response."""
        self._held.clear()
        self._is_lingering = self.transport.can_write_eof()
        self._close_when_written()

    def _close(self) -> None:
        self._become_displaceable()
        self._close_when_written()

    def _close_when_written(self) -> None:
        self._is_closing = True
        self._deadline.set(self._limits.write_stall_s)  # a peer that reads nothing must not keep the socket
        if not self._output:
            self._end_output()

    def _end_output(self) -> None:
        """Close: the transport has been given all."""
        if not self._is_lingering:
            self.transport.close()
            if self._is_tls:
                self._deadline.set(self._limits.linger_s)
        elif not self.transport.is_closing():
            self.transport.write_eof()
            if not self.transport.get_write_buffer_size():
                self._deadline.set(self._limits.linger_s)

    def _cut_delivered(self) -> None:
        """Cut a TLS connection whose client has all that was written and does not end its side. A transport that closes
        tells no more what is read; it has a deadline of its own, for clients that read slowly.

        Nothing must be on the way twice in a row: after a standstill of the loop TLS may have something to hand on.
        """
        was_sent, self._was_sent = self._was_sent, not has_unsent(self.transport)
        if was_sent and self._was_sent:
            self.transport.abort()
        else:
            self._deadline.set(self._limits.linger_s)

    def _lose_client(self) -> None:
        if self.listener is not None and not self._is_lost:
            self._is_lost = True
            # One client may have thousands of streams, each of which takes up to half a millisecond.
            self._state.wheel.losses.run(self._tell_lost)

    def _tell_lost(self) -> None:
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.on_client_lost()

    # responses

    @property
    def is_behind(self) -> bool:
        """Whether the client reads too slowly: the write buffer is full."""
        return self._is_write_paused

    @property
    def held_bytes(self) -> int:
        """Pipelined bytes that wait for the current response."""
        return len(self._held)

    def attach(self, listener: ClientListener) -> None:
        """Let `listener` answer the current request; until then it receives the client's events."""
        self.listener = listener
        if self._is_write_paused:
            listener.on_client_paused()

    def _write(self, data: bytes) -> None:
        """Write bytes of a response. Those that the client does not read count in the memory of bodies; if there is no
        room for them, the connection is aborted."""
        if self._is_lost:
            return
        if self._is_write_paused or len(data) > self._piece_bytes or self._output:
            self._append(data)
            self._write_output()
        else:
            self.transport.write(data)
        if self._is_write_paused:
            self._count_unread()

    def _append(self, data: bytes) -> None:
        """Append to the output. Small pieces become one: each would take more than its bytes."""
        output = self._output
        if output and len(output[-1]) + len(data) <= PIECE_BYTES:
            output[-1] += data
        else:
            output.append(data)
        self._output_bytes += len(data)
        self._unread_mark += len(data)

    def _write_output(self) -> None:
        """Give the transport of the output what it takes."""
        while self._output and not self._is_full:
            self._write_next()

    def _write_next(self) -> None:
        """Give the transport the next piece of the output, without the rest of what that is part of."""
        output = self._output
        first, begin = output[0], self._output_begin
        end = begin + self._piece_bytes
        if end < len(first):
            self._output_begin = end
        else:
            self._output_begin = 0
            self._output_bytes -= len(first)
            output.popleft()
        self.transport.write(first[begin:end])

    def _unread_bytes(self) -> int:
        """Bytes of responses that the client has not read."""
        return self._output_bytes - self._output_begin + self.transport.get_write_buffer_size()

    def _unread_size(self) -> int:
        """Bytes that these take in memory while the client is behind: the first piece is kept as a whole."""
        size = self._output_bytes + self.transport.get_write_buffer_size()
        return size + TLS_BUFFER_BYTES if self._is_tls else size

    def _count_unread(self) -> None:
        if self._is_closing:
            return
        unread = self._unread
        if unread is None:
            request = self.request
            account = None if request is None else request.account
            self._unread = unread = BodyReservation(self._state.body_memory, account, 0)
        more = self._unread_size() - unread.size
        if more <= 0:
            return
        try:
            unread.grow(more)
        except Unavailable:
            self._state.unread_cut += 1
            self._is_closing = True
            self.transport.abort()  # what answers is told by `connection_lost`: it may be writing now

    def _release_unread(self) -> None:
        unread, self._unread = self._unread, None
        if unread is not None:
            unread.release()

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """Write a whole response. `headers` are rendered lines without length, connection and the empty line."""
        request = self.request
        assert request is not None
        headers += request.answer_lines
        close = b"" if self._keeps_alive() else b"connection: close\r\n"
        if request.method == b"HEAD":
            head = b"%b%bcontent-length: %d\r\n%b\r\n" % (status_line(status), headers, len(body), close)
            self._write(head)
        else:
            self._write(
                b"%b%bcontent-length: %d\r\n%b\r\n%b" % (status_line(status), headers, len(body), close, body)
            )
        self._done()

    def start(self, status: int, headers: bytes, first: bytes) -> None:
        """Start a response of unknown length with its first bytes."""
        request = self.request
        assert request is not None
        headers += request.answer_lines
        self._is_chunked = not request.is_http10
        if self._is_chunked:
            close = b"" if self._keeps_alive() else b"connection: close\r\n"
            self._write(
                b"%b%btransfer-encoding: chunked\r\n%b\r\n%x\r\n%b\r\n"
                % (status_line(status), headers, close, len(first), first)
            )
        else:
            self._write(b"%b%bconnection: close\r\n\r\n%b" % (status_line(status), headers, first))

    def send(self, data: bytes) -> None:
        """Write more bytes of a started response; `data` must not be empty."""
        if self._is_lost:
            return
        if self._is_chunked and len(data) > self._piece_bytes:  # which is not copied as a whole
            self._append(b"%x\r\n" % len(data))
            self._append(data)
            self._write(b"\r\n")
        else:
            self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        coalescer = self._coalescer
        if self._interval != coalescer.interval:
            self._interval = coalescer.interval
            coalescer.count_stream()

    def finish(self) -> None:
        """End a started response."""
        if self._is_chunked:
            self._write(b"0\r\n\r\n")
        self._done()

    def abort(self) -> None:
        """Abort the connection: the only way left to signal that a started response is incomplete."""
        self.listener = None
        self._is_closing = True
        self.transport.abort()

    def cut(self) -> None:
        """Abort the connection and the answer, as if the client had disconnected."""
        self.transport.abort()
        self._tell_lost()

    def drain(self) -> None:
        """Close the connection unless a request is being received or answered."""
        if not self.is_busy and not self._is_closing:
            self._close()

    @property
    def is_busy(self) -> bool:
        """Whether a request is being received or answered."""
        return self.request is not None or self.reader.phase is not Phase.IDLE

    def _keeps_alive(self) -> bool:
        request = self.request
        return (
            request is not None
            and request.keep_alive
            and not request.is_http10
            and not (self.is_discarding or self._state.is_draining)
        )

    def _done(self) -> None:
        keeps_alive = self._keeps_alive()
        request, self.request = self.request, None
        self.listener = None
        if self._is_closing:
            return
        assert request is not None
        self.reader.release(request)
        has_more = bool(self.reader.ready or self._held)
        if keeps_alive and has_more and not (self._is_serving or self._is_write_paused):
            self._serve_next_turn()  # by then the request has ended for its account, too
        elif keeps_alive:
            self._serve_requests()
        elif self.is_discarding:
            self._linger()
        else:
            self._close()
