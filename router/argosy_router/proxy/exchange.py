"""One generation request from dispatch to its end: attempts, retries, forwarding.

Owns: the request's charge and its connection to a replica, and everything written to the client.
Must not know: parsing, discovery, policies.
Invariants: the client's answer begins once; until then a failed attempt may be repeated on another replica, after
that only a stream goes on there, behind what the client has; the charge of each attempt is released exactly once; a
client that leaves aborts the replica's work at once.

    connecting -> waiting -> (unary)  buffering -> answered
         ^------- failed ---'  |
         |                     -> (stream) streaming -> answered
         `------ replica died --------------'        -> an error event, when nobody can go on
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from argosy_engine.protocol.errors import (
    ApiError,
    BadGateway,
    GatewayTimeout,
    InternalError,
    TooManyRequests,
    Unavailable,
)
from argosy_router.admission.accounts import Reservation
from argosy_router.http.client import ClientConnection
from argosy_router.http.errors import ConnectFailed, ConnectionLost, FirstByteTimeout, UpstreamError
from argosy_router.http.messages import Headers
from argosy_router.http.server import Client
from argosy_router.load import Charge
from argosy_router.proxy import headers as header_rules
from argosy_router.proxy.call import Call
from argosy_router.proxy.decisions import DecisionRecord
from argosy_router.proxy.migration import Transcript
from argosy_router.proxy.relay import StreamRelay, UnaryRelay
from argosy_router.proxy.verdict import Refused, refusal
from argosy_router.replica import Replica
from argosy_router.service import Choice

if TYPE_CHECKING:
    from argosy_router.proxy.dispatcher import Dispatcher

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Before the answer begins."""
MAX_MIGRATIONS = 4
"""Attempts to go on with one stream. The first costs no retry credit: it repeats nothing that was answered, and the
streams of a replica that dies were all admitted. The bound keeps a request that kills engines from killing them all."""


class Exchange:
    """One request under way."""

    def __init__(self, dispatcher: Dispatcher, client: Client, call: Call, started: float) -> None:
        self._dispatcher = dispatcher
        self._client = client
        self.call = call
        self.started = started
        self.status = 0
        """Status sent to the client; 499 when it left before one was."""
        self.attempts = 0
        self.migrations = 0
        """Those of the attempts that went on with a stream."""
        self.choice: Choice | None = None
        self.record: DecisionRecord | None = None
        """Of the last attempt."""
        self.first_event_s: float | None = None
        self.waited_s = 0.0
        """Of it, time in the queue."""
        self.reservation: Reservation | None = None
        """What it took of its key's limits."""
        self._tried: list[Replica] = []
        """Since the client was last sent something."""
        self._charge: Charge | None = None
        self._connection: ClientConnection | None = None
        self._is_over = False
        self._is_started = False
        self._is_client_paused = False
        self._is_answering = False
        """Whether this attempt's answer has reached the client."""
        self._relay: UnaryRelay | StreamRelay = UnaryRelay()
        self._upstream_status = 0
        self._upstream_headers = b""
        self._fingerprint = ""
        """Of the replica's model, where it can resume the stream of another and be resumed; else empty."""
        self._transcript: Transcript | None = None

    # attempts

    def start(self) -> None:
        """Sends the request to the best replica.

        Raises:
            Unavailable, TooManyRequests: none can take it; nothing has happened.
        """
        self._attempt(self._dispatcher.choose(self.call, self._tried))

    def refuse(self, error: ApiError) -> None:
        """Ends a request that was not sent."""
        self._answer_error(error)

    def answer_through(self, client: Client) -> None:
        """Gives the answer to `client` from now on."""
        self._client = client

    def _attempt(self, choice: Choice) -> None:
        self.attempts += 1
        self.choice = choice
        self._tried.append(choice.replica)
        if not self._is_started:
            self._transcript = None
        said = self._transcript.num_tokens if self._transcript is not None else 0
        self._charge = choice.replica.load.charge(choice.uncached_tokens + said)
        self.record = self._dispatcher.dispatched(self.call, choice, self.attempts)
        self.record.resumed_tokens = said
        self._fingerprint = choice.replica.fingerprint if self.call.shape is not None else ""
        self._is_answering = False
        choice.replica.pool.acquire(self)

    def on_connected(self, connection: ClientConnection) -> None:
        choice = self.choice
        assert choice is not None
        if self._is_over:  # the client left while we connected
            choice.replica.pool.release(connection)
            return
        self._connection = connection
        body = self.call.body if self._transcript is None else self._transcript.continuing(self.call.body)
        connection.send(
            self,
            self._dispatcher.request_head(
                self.call, choice.replica, len(body), is_resumable=bool(self._fingerprint)
            ),
            self._dispatcher.first_byte_timeout_s(self.call, choice),
            body=body,
        )
        if self._is_client_paused:
            connection.pause_reading()

    def on_connect_failed(self, error: ConnectFailed) -> None:
        if not self._is_over:
            self._on_attempt_failed(error)

    def on_failed(self, error: UpstreamError) -> None:
        self._connection = None
        if not self._is_over:
            self._on_attempt_failed(error)

    def _on_attempt_failed(self, error: UpstreamError) -> None:
        choice = self.choice
        assert choice is not None
        replica = choice.replica
        if isinstance(error, ConnectionLost) and error.stale and self._may_reconnect(replica):
            assert self.record is not None
            self.attempts = self.record.attempt = self.attempts + 1
            self._dispatcher.retried(self.call, "stale")
            replica.pool.acquire(self, fresh=True)
            return
        self._release(replica)
        self._dispatcher.attempt_failed(self.call, replica, error)
        if self._is_started:
            self._continue(replica)
        else:
            self._retry(error)

    def _may_reconnect(self, replica: Replica) -> bool:
        """Whether the same replica is asked again: a kept connection that dies at once is rarely its fault."""
        allowed = MAX_ATTEMPTS + self.migrations
        return replica.is_routable and self.attempts < allowed and self._dispatcher.may_retry()

    def _retry(self, error: UpstreamError) -> None:
        """Nothing has been answered yet: another replica may."""
        following = self._another() if self.attempts < MAX_ATTEMPTS else None
        if following is not None and self._dispatcher.may_retry():
            self._dispatcher.retried(self.call, error.reason)
            self._attempt(following)
        else:
            self._give_up(error)

    def _continue(self, replica: Replica) -> None:
        """The replica died after the answer began: another one goes on with it, or the client hears of it."""
        transcript = self._transcript
        if transcript is None or not transcript.read():
            self._interrupt(replica, "refused")
        elif transcript.missing_end is not None:
            self._dispatcher.migrated(self.call, "completed")
            if transcript.missing_end:
                self._client.send(transcript.missing_end)
            self._client.finish()
            self._end()
        elif (successor := self._successor()) is not None:
            self.migrations += 1
            self._attempt(successor)
        else:
            self._interrupt(replica, "failed")

    def _successor(self) -> Choice | None:
        """Whoever may go on with the stream."""
        if self.migrations >= MAX_MIGRATIONS:
            return None
        successor = self._another(self._fingerprint)
        if successor is None or (self.migrations and not self._dispatcher.may_retry()):
            return None
        return successor

    def _another(self, fingerprint: str = "") -> Choice | None:
        """The next replica to try; None leaves it at the error at hand."""
        try:
            return self._dispatcher.choose(self.call, self._tried, fingerprint)
        except ApiError:
            return None

    def _give_up(self, error: UpstreamError) -> None:
        model = self.call.service.spec.model
        if isinstance(error, Refused) and error.is_busy:
            message = f"the replicas of model {model!r} take no more requests"
            self._answer_error(TooManyRequests(message, retry_after_s=error.retry_after_s))
        elif isinstance(error, FirstByteTimeout):
            self._answer_error(GatewayTimeout(f"model {model!r} did not answer in time", retry_after_s=1.0))
        elif isinstance(error, ConnectFailed):
            self._answer_error(Unavailable(f"no replica of model {model!r} is reachable", retry_after_s=1.0))
        else:
            self._answer_error(BadGateway(f"the replica of model {model!r} failed", retry_after_s=1.0))

    def _release(self, replica: Replica) -> None:
        charge, self._charge = self._charge, None
        assert charge is not None, "one charge per attempt"
        charge.release()

    # the replica's answer

    def on_response(self, status: int, headers: Headers) -> None:
        content_type = next((value for name, value in headers if name == b"content-type"), b"")
        is_stream = status == 200 and content_type.startswith(b"text/event-stream")
        if self._is_started and not is_stream:
            self._drop_connection()
            self._on_attempt_failed(Refused(status))
            return
        self._upstream_status = status
        self._upstream_headers = header_rules.returned(headers)
        if is_stream and self._fingerprint and self._transcript is None:
            assert self.call.shape is not None
            self._transcript = Transcript(self.call.shape)
        self._relay = (
            StreamRelay(self._transcript, hides_usage=self.call.hides_usage) if is_stream else UnaryRelay()
        )

    def on_data(self, data: bytes) -> None:
        relay = self._relay
        ready = relay.feed(data)
        if ready:
            self._forward(ready)
        if relay.failure is not None:
            self._drop_connection()
            self._on_attempt_failed(relay.failure)

    def _forward(self, data: bytes) -> None:
        if self._is_answering:
            self._client.send(data)
            return
        self._is_answering = True
        assert self.choice is not None
        assert self._charge is not None
        self._charge.first_token()
        self._tried = [self.choice.replica]
        if self._is_started:
            self._dispatcher.migrated(self.call, "resumed")
            self._client.send(data)
            return
        self._is_started = True
        self.status = self._upstream_status
        self.first_event_s = self._dispatcher.now() - self.started
        self._client.start(self.status, self._upstream_headers + self._own_headers(), data)

    def on_end(self) -> None:
        self._connection = None
        if self._is_over:
            return
        relay, choice = self._relay, self.choice
        assert choice is not None
        rest = relay.end()
        status = self._upstream_status
        if relay.failure is not None:
            self._on_attempt_failed(relay.failure)
        elif self._is_started:
            if rest:
                self._forward(rest)
            self._settle(choice.replica)
            self._client.finish()
            self._end()
        elif (refused := refusal(status, self._upstream_headers)) is not None:
            self._on_attempt_failed(refused)
        else:
            self._settle(choice.replica)
            self._answer(status, self._upstream_headers, rest)

    def _settle(self, replica: Replica) -> None:
        """The client has, or is about to get, the replica's whole answer."""
        self._release(replica)
        self._dispatcher.answered(self.call, replica, self._upstream_status)

    def _measure(self) -> None:
        """What the answer used, or the part of it that the client has."""
        relay, choice, record = self._relay, self.choice, self.record
        if choice is None or record is None or self.status != 200:
            return
        usage = relay.usage
        if usage is not None:
            self._dispatcher.measured(self.call, choice, record, usage)
        elif isinstance(relay, StreamRelay):
            self._dispatcher.counted(record, relay.num_tokens)

    def _interrupt(self, replica: Replica, outcome: str) -> None:
        """Nobody goes on with the answer: say so inside it, the status is gone."""
        self._dispatcher.interrupted(self.call, replica)
        if isinstance(self._relay, UnaryRelay):
            self._client.abort()
        else:
            self._dispatcher.migrated(self.call, outcome)
            error = BadGateway("the replica failed while generating; the answer is incomplete")
            self._client.send(b"data: " + error.body() + b"\n\n")
            self._client.finish()
        self._end()

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    # the client

    def on_client_lost(self) -> None:
        if self._is_over:
            return
        self._drop_connection()
        choice = self.choice
        if choice is not None and self._charge is not None:
            self._release(choice.replica)
            choice.replica.health.abandoned()
        if not self._is_started:
            self.status = 499
        self._dispatcher.client_lost(self.call)
        self._end()

    def on_client_paused(self) -> None:
        self._is_client_paused = True
        if self._connection is not None:
            self._connection.pause_reading()

    def on_client_resumed(self) -> None:
        self._is_client_paused = False
        if self._connection is not None:
            self._connection.resume_reading()

    # answers

    @property
    def identity(self) -> bytes:
        """Header lines of every answer to this request."""
        lines = b"x-request-id: %b\r\n" % self.call.request_id
        return lines if self.reservation is None else lines + self.reservation.header_lines

    def _own_headers(self) -> bytes:
        choice, record = self.choice, self.record
        identity = self.identity
        if choice is None or record is None:
            return identity
        decision = choice.decision
        return b"%b%bx-argosy-route: %b\r\nx-argosy-mode: %b\r\nx-argosy-predicted-tokens: %d\r\n" % (
            identity,
            choice.replica.name_header,
            decision.reason.encode(),
            record.mode.encode(),
            decision.predicted_tokens,
        )

    def _answer(self, status: int, headers: bytes, body: bytes) -> None:
        self.status = status
        self._client.respond(status, headers + self._own_headers(), body)
        self._end()

    def _answer_error(self, error: ApiError) -> None:
        if isinstance(error, InternalError):
            log.error("request %s: %s", self.call.request_id.decode(), error.message)
        self._answer(error.http_status, self._dispatcher.error_headers(error), error.body())

    def _end(self) -> None:
        assert self._charge is None, "every attempt was settled"
        assert not self._is_over, "a request ends once"
        self._is_over = True
        self._measure()
        self._dispatcher.finished(self)
