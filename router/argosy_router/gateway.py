"""Requests that a gateway forwards itself, with the router as its endpoint picker (Gateway API Inference Extension):
their way in, and each one from its admission to the end of its response, as far as the gateway shows it.

Envoy asks the router, by its external processing protocol (`ext_proc`), where each request goes.

Owns: the memory that a body takes, the time that it may take, which routes the router answers itself; the load charge
of the chosen replica, the outcome record, and the verdict on the replica.
Must not know: gRPC, the gateway's messages; how a replica is chosen, how requests are queued, limited and accounted
for: that is the proxy's.
Invariants: a request without a valid key is refused before its body is read; memory is released when the body has been
handed on or dropped. There is one choice, because a gateway that has sent a request does not ask
again. The request ends once, and releases its charge then: with its response, with a refusal, or when the gateway's
stream ends.
"""

# Not compiled: waits for gateways; protobuf's messages and gRPC take most of the time.

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from argosy_protocol.errors import (
    ApiError,
    BadRequest,
    ErrorReason,
    HeadersTooLarge,
    NotFound,
    PayloadTooLarge,
)
from argosy_router.config import ServerLimits
from argosy_router.fleet.replica import Charge
from argosy_router.fleet.service import Choice
from argosy_router.http.deadlines import Deadline
from argosy_router.http.limits import BodyMemory, BodyReservation
from argosy_router.http.messages import ClientListener, Headers, Request, first_value, render_headers
from argosy_router.http.upstream import ConnectFailed, UpstreamError
from argosy_router.proxy.accounting import CLIENT_GONE, AttemptRecord, RequestOutcome
from argosy_router.proxy.answer import error_body, error_headers, id_headers
from argosy_router.proxy.application import RouterApplication
from argosy_router.proxy.attempt import request_head
from argosy_router.proxy.call import Call, request_id_for
from argosy_router.proxy.exchange import RequestHandler, Shared
from argosy_router.proxy.relay import Refused, StreamRelay, UnaryRelay, is_error, refusal

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
        shared: Shared,
    ) -> None:
        """
        Args:
            on_decided: called when the replica is chosen.
            on_refused: called instead with status, header lines and body of the refusal.
            on_end: gets the outcome record when nothing changes it any more.
        """
        self.outcome = outcome
        self._call = outcome.call
        self._on_decided = on_decided
        self._on_refused = on_refused
        self._on_end = on_end
        self._shared = shared
        self._outliers = shared.outliers
        self._accounting = shared.accounting
        self._held_events = BodyReservation(shared.event_memory, outcome.call.service, 0)
        self._now = shared.now
        self._choice: Choice | None = None
        self._record: AttemptRecord | None = None
        self._charge: Charge | None = None
        self._prefill_end = Deadline(shared.wheel, self._prefilled)
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
        choice = self._shared.dispatcher.choose(call, (), now)
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
        record.upstream_id = self._shared.upstream_ids.next()
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


_ONE_LINE = re.compile(rb"[^\x00\r\n]*")
_OWN_PORT_ONLY = (b"/v1/files", b"/v1/batches", b"/v1/responses/")
"""Prefixes of paths whose requests need the storage, unless replicas answer them."""


class RouterAnswer(NamedTuple):
    """A response of the router's own: a refusal, or a route that needs no replica."""

    status: int
    headers: bytes
    """Header lines."""
    body: bytes


class Intake:
    """Takes the requests of all gateways of one router."""

    def __init__(
        self,
        application: RouterApplication,
        requests: RequestHandler,
        limits: ServerLimits,
        memory: BodyMemory,
    ) -> None:
        self.application = application
        self.requests = requests
        self.limits = limits
        self.memory = memory


class GatewayRequest:
    """One request of a gateway; to the application, its client."""

    def __init__(self, intake: Intake, head: Headers, subset: Collection[str] | None) -> None:
        """
        Args:
            head: has the pseudo-headers `:method` and `:path` too.
            subset: endpoints (HOST:PORT) that the gateway allows; None for all.
        """
        self._intake = intake
        self._subset = subset
        self._started = intake.requests.now()
        pseudo = {name: value for name, value in head if name.startswith(b":")}
        fields = [(name, value) for name, value in head if not name.startswith(b":")]
        self._request = Request(
            pseudo.get(b":method", b""), pseudo.get(b":path", b""), fields, is_http10=False, keep_alive=True
        )
        self._request.is_from_gateway = True
        self._request.id = request_id_for(self._request.header(b"x-request-id"))
        self._received: bytes | bytearray = b""
        self._body = BodyReservation(intake.memory, None, 0)
        self._limit = 0
        self._listener: ClientListener | None = None
        self.decided: asyncio.Future[RouterAnswer | EndpointPick] = asyncio.get_running_loop().create_future()
        """Resolves to what becomes of the request."""

    def open(self) -> None:
        """Check the head; `decided` is done if the request is refused."""
        limits = self._intake.limits
        try:
            self._check_head()
            is_used = self._intake.application.on_head(self._request)
            if self._request.refusal is not None:
                raise self._request.refusal
            self._limit = limits.max_body_bytes if is_used else limits.max_unread_body_bytes
            self._body = BodyReservation(self._intake.memory, self._request.account, 0)
            path = self._request.path
            if path.startswith(_OWN_PORT_ONLY) and not self._intake.application.serves(
                path.decode("latin-1")
            ):
                if self._request.sink is not None:  # an upload has begun with its head
                    self._request.sink.abort()
                raise NotFound("files, batches and stored responses are on the router's own port only")
        except ApiError as error:
            self.refuse(error)

    def _check_head(self) -> None:
        limits, headers = self._intake.limits, self._request.headers
        size = len(self._request.target) + sum(len(name) + len(value) for name, value in headers)
        if size > limits.max_header_bytes or len(headers) > limits.max_headers:
            raise HeadersTooLarge("request headers are too large")
        if any(not _ONE_LINE.fullmatch(value) for _, value in headers):
            raise BadRequest("a header's value has control characters")
        if self._request.method == b"OPTIONS":
            raise BadRequest("browsers' preflight requests are the gateway's to answer: configure CORS there")

    def feed(self, data: bytes) -> None:
        """Take a piece of the body; `decided` is done if the request is refused."""
        size = self._body.size + len(data)
        try:
            if size > self._limit:
                raise PayloadTooLarge(f"the request body exceeds the limit of {self._limit} bytes")
            if data:
                self._body.grow(len(data))
                self._keep(data)
        except ApiError as error:
            self.refuse(error)

    def _keep(self, data: bytes) -> None:
        if not self._received:
            self._received = data  # with a buffered body, the whole of it
            return
        if isinstance(self._received, bytes):
            self._received = bytearray(self._received)
        self._received += data  # a list of tiny pieces would take many times the memory that is reserved

    @property
    def time_left_s(self) -> float:
        """How much longer the body may take, so that it arrives at the lowest rate at least."""
        limits = self._intake.limits
        allowed = limits.body_timeout_s + self._body.size / limits.min_body_rate
        return self._started + allowed - self._intake.requests.now()

    def complete(self) -> None:
        """Admit, queue, answer or refuse the request, whose body is complete. `decided` is done now or later."""
        intake, request = self._intake, self._request
        request.body, self._received = bytes(self._received), b""
        request.body_bytes = len(request.body)
        started = intake.requests.now()
        if not intake.application.decode_for_gateway(self, request, lambda call: self._take(call, started)):
            intake.application.on_request(self, request)

    def _take(self, call: Call, now: float) -> None:
        """Have an endpoint picked for a call that arrived at `now`."""
        intake = self._intake
        self._request.body = b""
        outcome = RequestOutcome(call, now)
        requests = intake.requests
        pick = EndpointPick(
            outcome, lambda: self._decide(pick), self.respond, requests.on_end, requests.shared
        )
        try:
            if self._subset is not None:
                pick.restrict(self._subset)
        except ApiError as error:
            self.refuse(error)
            return
        requests.take(pick, self)

    def close(self) -> None:
        """End the request, because the gateway's stream has ended; nothing if it has ended before."""
        self._received = b""
        self._body.release()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.on_client_lost()

    def forwarded(self) -> None:
        """Free the body's memory: the gateway has it."""
        self._body.release()

    def _decide(self, verdict: RouterAnswer | EndpointPick) -> None:
        if not self.decided.done():
            self.decided.set_result(verdict)

    def refuse(self, error: ApiError) -> None:
        """Refuse a request that was not admitted; nothing if that is decided."""
        self._received = b""
        if self.decided.done():
            return
        self._intake.application.refuse(self, self._request, error)

    # the application's client

    def attach(self, listener: ClientListener) -> None:
        self._listener = listener

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        self._listener = None
        self._decide(RouterAnswer(status, headers, body))

    def start(self, status: int, headers: bytes, first: bytes) -> None:
        raise AssertionError("routes that answer in pieces are refused")

    def send(self, data: bytes) -> None:
        raise AssertionError("routes that answer in pieces are refused")

    def finish(self) -> None:
        raise AssertionError("routes that answer in pieces are refused")

    def abort(self) -> None:
        raise AssertionError("routes that answer in pieces are refused")
