"""A request on its way in from a gateway: its head, its bounded body, and who answers it.

Owns: the memory that the body takes, the time that it may take, and which routes the router answers itself.
Must not know: gRPC, the gateway's messages, how a replica is chosen.
Invariants: a request without a valid key is refused before its body is read; memory is released when the body has been
handed on or dropped.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from argosy_protocol.errors import ApiError, BadRequest, HeadersTooLarge, NotFound, PayloadTooLarge
from argosy_router.config import ServerLimits
from argosy_router.gateway.endpoint_pick import EndpointPick
from argosy_router.http.body_memory import BodyMemory, BodyReservation
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.messages import Headers, Request
from argosy_router.http.server_interface import ClientListener
from argosy_router.proxy.accounting.outcome import RequestOutcome
from argosy_router.proxy.accounting.request_accounting import RequestAccounting
from argosy_router.proxy.application import RouterApplication
from argosy_router.proxy.dispatcher import Dispatcher
from argosy_router.proxy.request.call import Call
from argosy_router.proxy.request.request_id import request_id_for
from argosy_router.proxy.request_handler import RequestHandler
from argosy_router.proxy.resilience.outlier_detection import OutlierDetector
from argosy_router.proxy.upstream.upstream_ids import UpstreamIds

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
        dispatcher: Dispatcher,
        outliers: OutlierDetector,
        accounting: RequestAccounting,
        *,
        limits: ServerLimits,
        memory: BodyMemory,
        wheel: TimerWheel,
    ) -> None:
        self.application = application
        self.requests = requests
        self.limits = limits
        self.memory = memory
        self._dispatcher = dispatcher
        self._outliers = outliers
        self._accounting = accounting
        self._upstream_ids = UpstreamIds()
        self._wheel = wheel

    def pick(
        self,
        outcome: RequestOutcome,
        on_decided: Callable[[], None],
        on_refused: Callable[[int, bytes, bytes], None],
    ) -> EndpointPick:
        """Make the pick of a request, which is not admitted yet."""
        return EndpointPick(
            outcome,
            on_decided,
            on_refused,
            self.requests.on_end,
            dispatcher=self._dispatcher,
            outliers=self._outliers,
            accounting=self._accounting,
            upstream_ids=self._upstream_ids,
            event_memory=self.requests.event_memory,
            wheel=self._wheel,
            now=self.requests.now,
        )


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
        self._request_id = request_id_for(self._request.header(b"x-request-id"))
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
        if not intake.application.decode_for_gateway(
            self, request, self._request_id, lambda call: self._take(call, started)
        ):
            intake.application.on_request(self, request)

    def _take(self, call: Call, now: float) -> None:
        """Have an endpoint picked for a call that arrived at `now`."""
        intake = self._intake
        self._request.body = b""
        outcome = RequestOutcome(call, now)
        pick = intake.pick(outcome, lambda: self._decide(pick), self.respond)
        try:
            if self._subset is not None:
                pick.restrict(self._subset)
        except ApiError as error:
            self.refuse(error)
            return
        intake.requests.take(pick, self)

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
        self._intake.application.refuse(self, self._request_id, error, self._request.path)

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
