"""The request handler: takes each call through rate limits and flow control to an exchange, and accounts for its end.

Owns: the order of these steps, and the number of requests that have not ended.
Must not know: HTTP framing, routes, attempts, how a replica is chosen.
Invariant: each request that `handle` or `take` gets ends once: its outcome is accounted for, its reservation settled,
and flow control told that it ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from argosy_protocol.errors import ApiError, BadRequest, TooManyRequests, Unavailable
from argosy_router.auth.accounts import Account
from argosy_router.flow_control.controller import FlowController
from argosy_router.http.body_memory import BodyMemory
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.messages import Request
from argosy_router.http.server_interface import Client
from argosy_router.proxy.accounting.outcome import RequestOutcome
from argosy_router.proxy.accounting.rate_limit_charges import RateLimitCharges
from argosy_router.proxy.accounting.request_accounting import RequestAccounting
from argosy_router.proxy.dispatcher import Dispatcher
from argosy_router.proxy.downstream.answer import Answer
from argosy_router.proxy.downstream.commented_stream import CommentSchedule
from argosy_router.proxy.exchange import Exchange
from argosy_router.proxy.pending_request import PendingRequest
from argosy_router.proxy.queued_call import QueuedCall
from argosy_router.proxy.request.call import Call
from argosy_router.proxy.resilience.outlier_detection import OutlierDetector
from argosy_router.proxy.resilience.retry_budget import RetryBudgets
from argosy_router.proxy.upstream.relay import MAX_HELD_BYTES
from argosy_router.proxy.upstream.upstream_ids import UpstreamIds
from argosy_router.ratelimit.key_limits import RateLimited


class RequestHandler:
    """Handles all generation requests of one router."""

    def __init__(
        self,
        flow_control: FlowController,
        charges: RateLimitCharges,
        dispatcher: Dispatcher,
        outliers: OutlierDetector,
        retry_budgets: RetryBudgets,
        accounting: RequestAccounting,
        *,
        wheel: TimerWheel,
        comments: CommentSchedule,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` is a monotonic clock: not the loop's, which stands still between turns and counts milliseconds."""
        self._flow_control = flow_control
        self._charges = charges
        self._dispatcher = dispatcher
        self._outliers = outliers
        self._retry_budgets = retry_budgets
        self._accounting = accounting
        self._wheel = wheel
        self._comments = comments
        self._upstream_ids = UpstreamIds()
        self.event_memory = BodyMemory(MAX_HELD_BYTES)
        """Of the unfinished events of all streams."""
        self.now = now
        self.inflight = 0
        """Requests that have not ended, including queued ones."""
        self.idle = asyncio.Event()
        """Set while no request is in flight."""
        self.idle.set()

    def handle(self, client: Client, call: Call, started: float) -> None:
        """Send a call, queue it, or refuse it with an error. `started` is when the whole request had arrived."""
        outcome = RequestOutcome(call, started)
        answer = Answer(client, outcome, wheel=self._wheel, comments=self._comments, now=self.now)
        exchange = Exchange(
            answer,
            outcome,
            self.on_end,
            dispatcher=self._dispatcher,
            outliers=self._outliers,
            retry_budget=self._retry_budgets.of(call.service, self.now()),
            accounting=self._accounting,
            upstream_ids=self._upstream_ids,
            event_memory=self.event_memory,
            wheel=self._wheel,
            now=self.now,
        )
        self.take(exchange, client)

    def charge(self, request: Request, account: Account) -> None:
        """Charge a request to its key's limits, before its body is read.

        Raises:
            RateLimited: the key's rate is reached.
        """
        request.is_charged = self._charges.charge_request(account, self.now())

    def take(self, request: PendingRequest, client: Client) -> None:
        """Start a request, queue it, or refuse it. It must call `on_end` once, when it has ended."""
        if not self.inflight:
            self.idle.clear()
        self.inflight += 1
        client.attach(request)
        try:
            self._charges.reserve(request.outcome)
        except (RateLimited, BadRequest) as refusal:
            request.refuse(refusal)
            return
        self._admit(request, client)

    def _admit(self, request: PendingRequest, client: Client) -> None:
        """Start a request at once if flow control admits it, else queue it."""
        outcome, flow_control = request.outcome, self._flow_control
        call, now = outcome.call, outcome.started
        sequences = call.estimate.sequences
        if flow_control.try_admit(call.service, now, call.prompt.name, sequences, call.account):
            try:
                request.start()
            except (Unavailable, TooManyRequests):  # the replicas' capacity was last looked up a moment ago
                flow_control.retract(call.service, now, sequences)
            else:
                return
        queued = QueuedCall(flow_control, request, client, self.now)
        client.attach(queued)
        try:
            flow_control.enqueue(call.service, queued, now)
        except ApiError as error:
            queued.refuse(error)

    def on_end(self, outcome: RequestOutcome) -> None:
        """Account for a request that has ended, and free its place."""
        now = self.now()
        self._accounting.close(outcome, now - outcome.started)
        self._charges.settle(outcome, now)
        if outcome.attempts:
            self._flow_control.ended(outcome.call.service, now, outcome.call.estimate.sequences)
        self.inflight -= 1
        if not self.inflight:
            self.idle.set()
