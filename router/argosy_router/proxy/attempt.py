"""One attempt: a request at one replica.

Owns: the head that the replica gets, the attempt's load charge, its connection, and the state of the replica's
response.
Must not know: the exchange that made it, the client, other attempts at the same request, what follows a failure.
Invariants: the charge is released exactly once, when the attempt is over; after that the listener hears nothing of it.
Engines abort, and some deduplicate, by the id in `x-request-id`. So every attempt has an id of its own, of 128 random
bits, a repetition on the same replica included, and engines never see the client's id.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Final

from argosy_protocol import headers
from argosy_router.fleet.replica import CoreStalled, Replica
from argosy_router.fleet.service import Choice
from argosy_router.http.deadlines import Deadline, TimerWheel
from argosy_router.http.limits import BodyReservation
from argosy_router.http.messages import Headers, first_value
from argosy_router.http.upstream import ConnectFailed, RequestUnsendable, UpstreamConnection, UpstreamError
from argosy_router.proxy.accounting import AttemptRecord
from argosy_router.proxy.answer_tokens import MessageTranscript, Transcript
from argosy_router.proxy.call import Call, returned_headers
from argosy_router.proxy.relay import Refused, StreamRelay, UnaryRelay

log = logging.getLogger(__name__)


_RESUME: Final = f"{headers.RESUME}: {headers.IN_COMMENTS}\r\n".encode()


def request_head(
    call: Call, replica: Replica, upstream_id: bytes, body_bytes: int, *, is_resumable: bool
) -> bytes:
    """Render everything before the body.

    Args:
        upstream_id: the attempt's own request id.
        is_resumable: ask the engine for what another one needs to continue its stream.
    """
    bearer_key = replica.key.current
    key = f"authorization: Bearer {bearer_key}\r\n".encode("latin-1") if bearer_key else b""
    resume = _RESUME if is_resumable else b""
    internal = call.internal_headers if replica.is_argosy_engine else b""
    return b"POST %b HTTP/1.1\r\nhost: %b\r\n%b%b%b%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
        call.path,
        replica.pool.authority_bytes,
        key,
        resume,
        internal,
        call.headers,
        upstream_id,
        body_bytes,
    )


ID_HEX_DIGITS: Final = 32
_IDS_PER_READ: Final = 256
"""Ids made of one read of the kernel's generator, which costs more than everything else here."""


class UpstreamIds:
    """Generates ids."""

    def __init__(self) -> None:
        self._digits = b""
        self._position = 0

    def next(self) -> bytes:
        """Return a new id as lower-case hexadecimal digits."""
        start = self._position
        if start == len(self._digits):
            self._digits = os.urandom(_IDS_PER_READ * ID_HEX_DIGITS // 2).hex().encode()
            start = 0
        self._position = end = start + ID_HEX_DIGITS
        return self._digits[start:end]


class AttemptListener:
    """Receives what an attempt reports. A base class, not a `Protocol`, so that compiled calls to it are direct."""

    def on_stream_accepted(self) -> None:
        """The replica has responded with the head of a stream."""
        raise NotImplementedError

    def on_attempt_data(self, attempt: Attempt, data: bytes) -> None:
        """The response continues with `data`, which the client gets next."""
        raise NotImplementedError

    def on_attempt_ended(self, attempt: Attempt, rest: bytes) -> None:
        """The replica's response is complete; `rest` of it has not been forwarded."""
        raise NotImplementedError

    def on_attempt_failed(self, attempt: Attempt, error: UpstreamError) -> None:
        """The replica gave no response, or not all of it."""
        raise NotImplementedError

    def on_attempt_stalled(self, attempt: Attempt, error: CoreStalled) -> None:
        """The replica's core has stopped; its response may still come."""
        raise NotImplementedError


class Attempt:
    """Sends a request to the chosen replica, and reports to its listener."""

    def __init__(
        self,
        listener: AttemptListener,
        call: Call,
        choice: Choice,
        record: AttemptRecord,
        transcript: Transcript | None,
        held_events: BodyReservation,
        *,
        wheel: TimerWheel,
        upstream_ids: UpstreamIds,
        first_byte_timeout_s: float,
        now: Callable[[], float],
    ) -> None:
        """
        Args:
            transcript: what the client has of a stream that the attempt continues; None if it has nothing.
            held_events: gets what is reserved for an unfinished event or answer; released when the attempt is over.
            now: a monotonic clock.
        """
        self._listener = listener
        self._call = call
        self._held_events = held_events
        self._wheel = wheel
        self._upstream_ids = upstream_ids
        self._first_byte_timeout_s = first_byte_timeout_s
        self._now = now
        self.choice = choice
        self.replica = choice.replica
        self.record = record
        self.transcript = transcript
        self._is_resuming = transcript is not None
        self.fingerprint = choice.replica.fingerprint if call.shape is not None else ""
        """Fingerprint of the replica's model, if another replica can continue the stream; else empty."""
        self.relay: UnaryRelay | StreamRelay = UnaryRelay(held_events)
        resumed_tokens = 0
        if transcript is not None:
            self.relay = self._stream_relay()
            resumed_tokens = record.resumed_tokens = transcript.num_tokens
        tokens = choice.uncached_tokens + resumed_tokens
        self._charge = choice.replica.load.charge(tokens, call.estimate.sequences, call.account)
        self.started = now()
        self.heard_at = self.started
        """When the replica's response last went on."""
        self.status = 0
        self.headers = b""
        """Header lines of the response as the client gets them."""
        self.is_answering = False
        """Whether a part of its response was forwarded to the client."""
        self.is_over = False
        self._sent_keys: list[str] = []
        """Keys that the request was sent with, the last one last."""
        self._is_paused = False
        self._is_stalled = False
        """Whether a stall of the replica's core waits to be reported."""
        self._connection: UpstreamConnection | None = None
        self._overdue: Deadline | None = None
        self._prefill_end: Deadline | None = None

    # called by the exchange

    def start(self, *, fresh: bool = False) -> None:
        """Send the request as soon as there is a connection (a new one if `fresh`)."""
        if not self._call.is_stream and self._prefill_end is None:
            # A unary response begins when it is complete, so nothing shows its first token: the prompt leaves the load
            # account when it is predicted to be computed. A slower replica corrects that by the queue it reports.
            self._prefill_end = Deadline(self._wheel, self._charge.first_token)
            self._prefill_end.set(self.choice.predicted_ttft_s)
        self.replica.inflight_attempts.add(self)
        self.replica.pool.acquire(self, fresh=fresh)

    def has_other_key(self) -> bool:
        """Whether the replica, which refused the key of this attempt, may accept another one."""
        return bool(self._sent_keys) and self.replica.key.refused(self._sent_keys[-1], self._sent_keys)

    def resend(self) -> None:
        """Send the request, which the replica refused to read, to it again with the key that it has now."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        if not self._is_resuming:
            self._held_events.release()
            self.relay = UnaryRelay(self._held_events)
        self.start(fresh=True)

    def end_when_answering(self, overdue: Deadline | None) -> None:
        """Have the deadline ended when the response begins or the attempt is over."""
        self._overdue = overdue

    def begin_answer(self) -> None:
        """Note that the first bytes of the response are about to be forwarded."""
        self.is_answering = True
        self._charge.first_token()
        if self._connection is not None:
            self._connection.begun()
        if self._overdue is not None:
            self._overdue.end()

    @property
    def route_headers(self) -> bytes:
        """Header lines of the answer that tell how the replica was chosen."""
        decision = self.choice.decision
        return b"%bx-argosy-route: %b\r\nx-argosy-mode: %b\r\nx-argosy-predicted-tokens: %d\r\n" % (
            self.replica.name_header,
            decision.reason.encode(),
            self.record.mode.encode(),
            decision.predicted_tokens,
        )

    def end(self) -> None:
        """End the attempt, however it went. A replica that still works on it sees a reset and aborts the work."""
        assert not self.is_over, "an attempt ends once"
        self.is_over = True
        self.replica.inflight_attempts.discard(self)
        self._charge.release()
        self._held_events.release()
        for deadline in (self._overdue, self._prefill_end):
            if deadline is not None:
                deadline.end()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def pause(self) -> None:
        """Stop reading the response: the client cannot keep up."""
        self._is_paused = True
        if self._connection is not None:
            self._connection.pause_reading()

    def resume(self) -> None:
        """Continue to read: the client can keep up again."""
        self._is_paused = False
        if self._connection is not None:
            self._connection.resume_reading()

    # the replica

    def core_stalled(self, age_s: float, bound_s: float) -> None:
        # Else it was sent after the core's last step, or has not had its turn since an earlier report.
        if self._now() - self.started > bound_s and not self._is_stalled:
            self._is_stalled = True
            error = CoreStalled(f"its core has been silent for {age_s:.1f} s")
            self._wheel.turns.run(partial(self._report_stall, error))

    def _report_stall(self, error: CoreStalled) -> None:
        self._is_stalled = False
        if not self.is_over:
            self._listener.on_attempt_stalled(self, error)

    # the connection

    def on_connected(self, connection: UpstreamConnection) -> None:
        if self.is_over:  # while we connected
            self.replica.pool.release(connection)
            return
        try:
            head, body = self._written()
        except Exception as error:
            log.exception("a request for replica %s could not be written", self.replica.name)
            self.replica.pool.release(connection)
            # A connection may come at once, within `start`, when the listener does not know of the attempt yet.
            failure = RequestUnsendable(type(error).__name__)
            asyncio.get_running_loop().call_soon(self._fail_unless_over, failure)
            return
        self._connection = connection
        connection.send(self, head, self._first_byte_timeout_s, body=body)
        if self._is_paused:
            connection.pause_reading()

    def _written(self) -> tuple[bytes, bytes]:
        """Return the request's head and body for this replica."""
        call, transcript = self._call, self.transcript
        self.record.upstream_id = upstream_id = self._upstream_ids.next()
        if not self.replica.is_argosy_engine:
            call.reduce_body()
        if not self.replica.takes_model_names:
            call.rename_body(self.replica)
        body = call.body if transcript is None else transcript.continuing(call.body)
        self._sent_keys.append(self.replica.key.current)
        head = request_head(call, self.replica, upstream_id, len(body), is_resumable=bool(self.fingerprint))
        return head, body

    def on_connect_failed(self, error: ConnectFailed) -> None:
        self._fail_unless_over(error)

    def _fail_unless_over(self, error: UpstreamError) -> None:
        if not self.is_over:
            self._listener.on_attempt_failed(self, error)

    def on_failed(self, error: UpstreamError) -> None:
        self._connection = None
        self._listener.on_attempt_failed(self, error)

    # the replica's answer

    def on_response(self, status: int, headers: Headers) -> None:
        content_type = first_value(headers, b"content-type") or b""
        is_stream = status == 200 and content_type.startswith(b"text/event-stream")
        self.status = status
        self.headers = returned_headers(headers)
        if is_stream:
            self._listener.on_stream_accepted()
        if self._is_resuming:
            if not is_stream:
                self._listener.on_attempt_failed(self, Refused(status, self.headers))
        elif is_stream:
            shape = self._call.shape
            if self.fingerprint and shape is not None:
                self.transcript = MessageTranscript(shape) if shape.is_message else Transcript(shape)
            self.relay = self._stream_relay()

    def _stream_relay(self) -> StreamRelay:
        call = self._call
        return StreamRelay(
            self.transcript,
            self._held_events,
            hides_usage=call.hides_usage,
            hides_progress=call.hides_progress,
            is_response=call.endpoint == "responses",
        )

    def on_data(self, data: bytes) -> None:
        relay = self.relay
        self.heard_at = self._now()
        ready = relay.feed(data)
        if ready:
            self._listener.on_attempt_data(self, ready)
        if relay.failure is not None:
            self._listener.on_attempt_failed(self, relay.failure)

    def on_end(self) -> None:
        self._connection = None
        rest = self.relay.end()
        if self.relay.failure is not None:
            self._listener.on_attempt_failed(self, self.relay.failure)
        else:
            self._listener.on_attempt_ended(self, rest)
