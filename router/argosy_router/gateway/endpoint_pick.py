"""One request that a gateway forwards: from admission to the end of its response, as far as the gateway shows it.

Owns: the load charge of the chosen replica, the outcome record, and the verdict on the replica.
Must not know: gRPC, the gateway's messages, policies, flow control.
Invariants: there is one choice, because a gateway that has sent a request does not ask again. The request ends once,
and releases its charge then: with its response, with a refusal, or when the gateway's stream ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from argosy_protocol.errors import ApiError, ErrorReason
from argosy_router.fleet.replica_load import Charge
from argosy_router.fleet.service import Choice
from argosy_router.http.body_memory import BodyMemory, BodyReservation
from argosy_router.http.deadlines import Deadline, TimerWheel
from argosy_router.http.messages import Headers, first_value, render_headers
from argosy_router.http.upstream_errors import ConnectFailed, UpstreamError
from argosy_router.proxy.accounting.outcome import CLIENT_GONE, RequestOutcome
from argosy_router.proxy.accounting.request_accounting import RequestAccounting
from argosy_router.proxy.dispatcher import Dispatcher
from argosy_router.proxy.downstream.api_shape import error_body, id_headers
from argosy_router.proxy.downstream.error_headers import error_headers
from argosy_router.proxy.resilience.outlier_detection import OutlierDetector
from argosy_router.proxy.upstream.attempt_log import AttemptRecord
from argosy_router.proxy.upstream.relay import StreamRelay, UnaryRelay
from argosy_router.proxy.upstream.request_head import request_head
from argosy_router.proxy.upstream.response_status import Refused, is_error, refusal
from argosy_router.proxy.upstream.upstream_ids import UpstreamIds

_LOCAL_REPLY: Final = b"text/plain"
"""Content type of the responses that Envoy makes itself. Engines answer errors in JSON."""
_UPSTREAM_TIME: Final = b"x-envoy-upstream-service-time"
"""In responses of Envoy that a replica has sent."""


class EndpointPick:
    """Chooses the replica of one request, and follows the response."""

    def __init__(
        self,
        outcome: RequestOutcome,
        on_decided: Callable[[], None],
        on_refused: Callable[[int, bytes, bytes], None],
        on_end: Callable[[RequestOutcome], None],
        *,
        dispatcher: Dispatcher,
        outliers: OutlierDetector,
        accounting: RequestAccounting,
        upstream_ids: UpstreamIds,
        event_memory: BodyMemory,
        wheel: TimerWheel,
        now: Callable[[], float],
    ) -> None:
        """
        Args:
            on_decided: called when the replica is chosen.
            on_refused: called instead with status, header lines and body of the refusal.
            on_end: gets the outcome record when nothing changes it any more.
            now: a monotonic clock.
        """
        self.outcome = outcome
        self._call = outcome.call
        self._on_decided = on_decided
        self._on_refused = on_refused
        self._on_end = on_end
        self._dispatcher = dispatcher
        self._outliers = outliers
        self._accounting = accounting
        self._upstream_ids = upstream_ids
        self._held_events = BodyReservation(event_memory, outcome.call.service, 0)
        self._now = now
        self._choice: Choice | None = None
        self._record: AttemptRecord | None = None
        self._charge: Charge | None = None
        self._prefill_end = Deadline(wheel, self._prefilled)
        self._relay: UnaryRelay | StreamRelay = UnaryRelay(self._held_events)
        self._status = 0
        self._headers: Headers = []
        self._heard_at: float | None = None
        """When the gateway last showed a part of a stream."""
        self.is_over = False

    # admission

    def start(self) -> None:
        """Choose the replica and charge it.

        Raises:
            Unavailable, TooManyRequests: no replica can take the request; nothing has happened.
        """
        call, now = self._call, self._now()
        choice = self._dispatcher.choose(call, (), now)
        self._choice = choice
        self.outcome.attempts = 1
        self.outcome.sent_at = now
        call.service.dispatched(choice, call.prompt, now)
        self._record = self._accounting.record_attempt(call, choice, 1)
        self._charge = choice.replica.load.charge(
            choice.uncached_tokens, call.estimate.sequences, call.account
        )
        # A gateway need not show the response, and one that is whole does not show its first token.
        self._prefill_end.set(choice.predicted_ttft_s)
        self._on_decided()

    def restrict(self, endpoints: Collection[str]) -> None:
        """Have only these endpoints (HOST:PORT) count as replicas for the request, here and in the queue.

        Raises:
            Unavailable: none of them is routable.
        """
        call = self._call
        call.prompt.name = call.service.candidates.restricted(call.prompt.name, endpoints)

    def refuse(self, error: ApiError) -> None:
        call, outcome = self._call, self.outcome
        outcome.status = error.http_status
        outcome.error = error.reason()
        error.name_as_asked(call.client_model)
        lines = error_headers(error) + id_headers(call.request_id, call.path)
        if outcome.reservation is not None:
            lines += outcome.reservation.header_lines
        self._end()
        self._on_refused(error.http_status, lines, error_body(error, call.path))

    # what the gateway is told

    @property
    def choice(self) -> Choice:
        assert self._choice is not None, "decided"
        return self._choice

    @property
    def endpoint(self) -> str:
        """The chosen replica's HOST:PORT."""
        return self.choice.replica.endpoint

    def forwarded(self) -> tuple[bytes, bytes]:
        """Return the header lines and the body that the chosen replica must get."""
        call, replica, record = self._call, self.choice.replica, self._record
        assert record is not None, "decided"
        record.upstream_id = self._upstream_ids.next()
        if not replica.is_argosy_engine:
            call.reduce_body()
        if not replica.takes_model_names:
            call.rename_body(replica)
        body, call.body = call.body, b""
        head = request_head(call, replica, record.upstream_id, len(body), is_resumable=False)
        return head.split(b"\r\n", 2)[2].removesuffix(b"\r\n"), body  # without request line and host

    @property
    def response_lines(self) -> bytes:
        """Header lines that the client's response gets: ids, limits of the key, how the replica was chosen."""
        call, choice, record = self._call, self.choice, self._record
        assert record is not None, "decided"
        lines = id_headers(call.request_id, call.path)
        if self.outcome.reservation is not None:
            lines += self.outcome.reservation.header_lines
        return lines + b"%bx-argosy-route: %b\r\nx-argosy-mode: %b\r\nx-argosy-predicted-tokens: %d\r\n" % (
            choice.replica.name_header,
            choice.decision.reason.encode(),
            record.mode.encode(),
            choice.decision.predicted_tokens,
        )

    # the response, as the gateway shows it

    def on_response(self, status: int, headers: Headers) -> None:
        """Take in the head of the response."""
        self.outcome.status = self._status = status
        self._headers = headers
        content_type = first_value(headers, b"content-type") or b""
        if status == 200 and content_type.startswith(b"text/event-stream"):
            self._relay = StreamRelay(
                None,
                self._held_events,
                hides_usage=self._call.hides_usage,
                is_response=self._call.endpoint == "responses",
            )
        if status < 400:
            self._outliers.began(self.choice.replica)

    def on_data(self, data: bytes) -> bytes:
        """Take in a piece of the response's body, and return what the client gets of it now.

        Raises:
            UpstreamError: an event is too large.
        """
        relay, outcome = self._relay, self.outcome
        if isinstance(relay, UnaryRelay):
            relay.feed(data)
            return data
        self._heard_at = now = self._now()
        if data and outcome.first_event_s is None:
            outcome.first_event_s = now - outcome.started
            self._prefilled()
            if self._call.is_stream:
                service = self._call.service
                service.demand.observe_ttft(outcome.first_event_s, outcome.started, now)
                if service.sides is not None:
                    service.sides.observe_ttft(self.choice.replica.revision, outcome.first_event_s, now)
        ready = relay.feed(data)
        if relay.failure is not None:
            raise relay.failure
        return ready

    def on_end(self) -> bytes:
        """Note that the response is complete, and return what the client still gets."""
        relay, now = self._relay, self._now()
        rest = relay.end()
        service, replica, status = self._call.service, self.choice.replica, self._status
        refused = self._failure()
        if refused is None:
            self._outliers.answered(service, replica, status, now)
        else:
            self._outliers.attempt_failed(service, replica, refused, now)
            if isinstance(refused, Refused) and refused.is_ambiguous:
                self._outliers.abandoned(service, replica)  # no other replica shows whose fault it was
        if status == 200:
            self.outcome.note_answer(relay, self.choice)
        elif status >= 400:
            self.outcome.error = ErrorReason.read(rest)
        self._end()
        return b"" if isinstance(relay, UnaryRelay) else rest

    def _failure(self) -> UpstreamError | None:
        """What the response's status says against the replica."""
        status, headers = self._status, self._headers
        if status == 503 and first_value(headers, _UPSTREAM_TIME) is None:
            content_type = first_value(headers, b"content-type") or b""
            if content_type.startswith(_LOCAL_REPLY):
                return ConnectFailed("the gateway could not reach it")
        if is_error(status):
            return Refused(status)
        return refusal(status, render_headers(headers))

    # the end

    def on_client_lost(self) -> None:
        """The gateway's stream has ended. Whether the response was complete is not known; what the gateway has shown of
        it counts."""
        if self.is_over:
            return
        if self._heard_at is not None and self._status == 200:
            silent_s = self._now() - self._heard_at
            self.outcome.note_answer(self._relay, self.choice, is_cut=True, silent_s=silent_s)
        if self._choice is not None:
            self._outliers.abandoned(self._call.service, self._choice.replica)
        if not self._status:
            self.outcome.status = CLIENT_GONE
            self._accounting.count_disconnect(self._call)
        self._end()

    def on_client_paused(self) -> None:
        """Gateways slow replicas down themselves."""

    def on_client_resumed(self) -> None:
        """See `on_client_paused`."""

    def _prefilled(self) -> None:
        if self._charge is not None:
            self._charge.first_token()

    def _end(self) -> None:
        assert not self.is_over, "a request ends once"
        self.is_over = True
        self._prefill_end.end()
        self._held_events.release()
        if self._charge is not None:
            self._charge.release()
        self.outcome.choice = self._choice
        self.outcome.record = self._record
        self._on_end(self.outcome)
