"""One attempt: a request at one replica.

Owns: the attempt's charge, its connection, and what has come of the replica's answer.
Must not know: the client, other attempts at the same request, what follows a failure.
Invariants: the charge is released exactly once, when the attempt is over; after that nothing is heard of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from argosy_router.fleet.service import Choice
from argosy_router.http.client import ClientConnection
from argosy_router.http.deadlines import Deadline
from argosy_router.http.errors import ConnectFailed, CoreStalled, UpstreamError
from argosy_router.http.messages import Headers, first_value
from argosy_router.proxy import headers as header_rules
from argosy_router.proxy.decisions import DecisionRecord
from argosy_router.proxy.migration import Transcript
from argosy_router.proxy.relay import StreamRelay, UnaryRelay
from argosy_router.proxy.verdict import Refused

if TYPE_CHECKING:
    from argosy_router.proxy.dispatcher import Dispatcher
    from argosy_router.proxy.exchange import Exchange


class Attempt:
    """Sends the request and reports to its exchange."""

    def __init__(
        self,
        exchange: Exchange,
        dispatcher: Dispatcher,
        choice: Choice,
        record: DecisionRecord,
        transcript: Transcript | None,
    ) -> None:
        """`transcript` is what the client has of a stream that the attempt goes on with; None where it has nothing."""
        call = exchange.call
        self._exchange = exchange
        self._dispatcher = dispatcher
        self._call = call
        self.choice = choice
        self.replica = choice.replica
        self.record = record
        self.transcript = transcript
        self._is_resuming = transcript is not None
        self.fingerprint = choice.replica.fingerprint if call.shape is not None else ""
        """Of the replica's model, where it can resume the stream of another and be resumed; else empty."""
        self.relay: UnaryRelay | StreamRelay = UnaryRelay()
        said = 0
        if transcript is not None:
            self.relay = StreamRelay(transcript, hides_usage=call.hides_usage)
            said = record.resumed_tokens = transcript.num_tokens
        self._charge = choice.replica.load.charge(choice.uncached_tokens + said, call.estimate.sequences)
        self.started = dispatcher.now()
        self.status = 0
        self.headers = b""
        """Lines of the replica's answer as the client gets them."""
        self.is_answering = False
        """Whether its answer has reached the client."""
        self.is_over = False
        self._connection: ClientConnection | None = None
        self._overdue: Deadline | None = None
        self._prefill_end: Deadline | None = None

    # what the exchange calls

    def start(self, *, fresh: bool = False) -> None:
        """Sends the request as soon as there is a connection (a new one if `fresh`)."""
        if not self._call.is_stream and self._prefill_end is None:
            # It begins when it is complete, so its first token shows nowhere: the prompt is taken off the account when
            # its prediction says that it is computed. A replica that is slower says so, if it reports its queue.
            self._prefill_end = Deadline(self._dispatcher.wheel, self._charge.first_token)
            self._prefill_end.set(self.choice.predicted_ttft_s)
        self.replica.under_way.add(self)
        self.replica.pool.acquire(self, fresh=fresh)

    def watch(self) -> None:
        """Tells the exchange when the answer is overdue, where the service's requests are hedged."""
        service, expected_s = self._call.service, self.choice.predicted_ttft_s
        self._overdue = self._dispatcher.hedging.watch(service, expected_s, self._exchange.on_overdue)

    def answers(self) -> None:
        """The client is about to get the first bytes of its answer."""
        self.is_answering = True
        self._charge.first_token()
        if self._connection is not None:
            self._connection.begun()
        if self._overdue is not None:
            self._overdue.end()

    def end(self) -> None:
        """It is over, however it ended. A replica that still works on it sees a reset, and aborts the work."""
        assert not self.is_over, "an attempt ends once"
        self.is_over = True
        self.replica.under_way.discard(self)
        self._charge.release()
        for deadline in (self._overdue, self._prefill_end):
            if deadline is not None:
                deadline.end()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def abandon(self) -> None:
        """Nobody wants its answer any more, which says nothing about the replica."""
        self.end()
        self._dispatcher.abandoned(self._call, self.replica)

    def pause(self) -> None:
        """The client cannot keep up."""
        if self._connection is not None:
            self._connection.pause_reading()

    def resume(self) -> None:
        """The client can again."""
        if self._connection is not None:
            self._connection.resume_reading()

    # the replica

    def core_stalled(self, age_s: float, bound_s: float) -> None:
        if (
            self._dispatcher.now() - self.started > bound_s
        ):  # else it came later than the core's last sign of life
            error = CoreStalled(f"its core has been silent for {age_s:.1f} s")
            self._exchange.on_stalled(self, error)

    # the connection

    def on_connected(self, connection: ClientConnection) -> None:
        if self.is_over:  # while we connected
            self.replica.pool.release(connection)
            return
        self._connection = connection
        call, transcript = self._call, self.transcript
        self.record.upstream_id = upstream_id = self._dispatcher.upstream_ids.next()
        if not self.replica.is_ours:
            call.reduce_body()
        if not self.replica.takes_model_names:
            call.rename_body(self.replica)
        body = call.body if transcript is None else transcript.continuing(call.body)
        connection.send(
            self,
            self._dispatcher.request_head(
                call, self.replica, upstream_id, len(body), is_resumable=bool(self.fingerprint)
            ),
            self._dispatcher.first_byte_timeout_s(call, self.choice),
            body=body,
        )
        if self._exchange.is_client_paused:
            connection.pause_reading()

    def on_connect_failed(self, error: ConnectFailed) -> None:
        if not self.is_over:
            self._exchange.on_attempt_failed(self, error)

    def on_failed(self, error: UpstreamError) -> None:
        self._connection = None
        self._exchange.on_attempt_failed(self, error)

    # the replica's answer

    def on_response(self, status: int, headers: Headers) -> None:
        content_type = first_value(headers, b"content-type") or b""
        is_stream = status == 200 and content_type.startswith(b"text/event-stream")
        self.status = status
        self.headers = header_rules.returned(headers)
        if is_stream:
            self._exchange.on_accepted()
        if self._is_resuming:
            if not is_stream:
                self._exchange.on_attempt_failed(self, Refused(status, self.headers))
        elif is_stream:
            shape = self._call.shape
            if self.fingerprint and shape is not None:
                self.transcript = Transcript(shape)
            self.relay = StreamRelay(self.transcript, hides_usage=self._call.hides_usage)

    def on_data(self, data: bytes) -> None:
        relay = self.relay
        ready = relay.feed(data)
        if ready:
            self._exchange.forward(self, ready)
        if relay.failure is not None:
            self._exchange.on_attempt_failed(self, relay.failure)

    def on_end(self) -> None:
        self._connection = None
        rest = self.relay.end()
        if self.relay.failure is not None:
            self._exchange.on_attempt_failed(self, self.relay.failure)
        else:
            self._exchange.on_attempt_ended(self, rest)
