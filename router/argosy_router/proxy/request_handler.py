"""The request handler: takes each call through rate limits and flow control to an exchange, and accounts for its end.

Owns: the order of these steps, calls that are queued, and the number of requests that have not ended.
Must not know: HTTP framing, routes, attempts, how a replica is chosen, when a queued call is admitted.
Invariants: each request that `handle` or `take` gets ends once: its outcome is accounted for, its reservation settled,
and flow control told that it ended. A queued call whose client leaves is taken out at once and never sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from argosy_protocol.errors import ApiError, BadRequest, TooManyRequests, Unavailable
from argosy_router.auth.accounts import Account, RateLimited
from argosy_router.fair_queue import QueuedRequest
from argosy_router.flow_control import FlowController
from argosy_router.http.messages import Client, Request
from argosy_router.proxy.accounting import RequestOutcome
from argosy_router.proxy.answer import Answer, CommentSchedule
from argosy_router.proxy.call import Call
from argosy_router.proxy.exchange import Exchange, Shared
from argosy_router.proxy.resilience import RetryBudgets


class PendingRequest(Protocol):
    """A decoded request that flow control starts, queues or refuses: an exchange, or the pick of an endpoint for a
    gateway that forwards the request itself. It also listens to its client (`ClientListener`)."""

    outcome: RequestOutcome

    def start(self) -> None:
        """Send the request, or have it sent.

        Raises:
            Unavailable, TooManyRequests: no replica can take it; nothing has happened.
        """
        ...

    def refuse(self, error: ApiError) -> None:
        """Answer the request with an error; it has then ended."""
        ...

    def on_client_lost(self) -> None: ...

    def on_client_paused(self) -> None: ...

    def on_client_resumed(self) -> None: ...


class QueuedCall:
    """One queued call, and the exchange (or endpoint pick) that takes over when it leaves the queue. A
    `ClientListener`."""

    def __init__(
        self, flow_control: FlowController, exchange: PendingRequest, client: Client, now: Callable[[], float]
    ) -> None:
        """`now` is a monotonic clock."""
        call = exchange.outcome.call
        self.request = QueuedRequest(
            call.account,
            call.priority,
            call.estimate.cost,
            len(call.body) + call.prompt.name.num_bytes,
            call.prompt.name,
            call.estimate.sequences,
            self.admit,
            self.refuse,
        )
        self.request.since = exchange.outcome.started
        self._flow_control = flow_control
        self.exchange = exchange
        self._client = client
        self._now = now

    def admit(self) -> None:
        self._leave_queue("sent")
        try:
            self.exchange.start()
        except ApiError as error:
            service = self.exchange.outcome.call.service
            self._flow_control.retract(service, self._now(), self.request.sequences)
            self.exchange.refuse(error)

    def refuse(self, error: ApiError) -> None:
        self._leave_queue("refused")
        self.exchange.refuse(error)

    def _leave_queue(self, how: str) -> None:
        self._count_wait(how)
        self._client.attach(self.exchange)

    def _count_wait(self, how: str) -> None:
        outcome = self.exchange.outcome
        outcome.queued_s = seconds = self._now() - self.request.since
        self._flow_control.observe_wait(outcome.call.service, how, seconds)
        # This breaks a reference cycle, so that the exchange and the body are freed at once when the request has ended.
        self.request.admit, self.request.refuse = self.exchange.start, self.exchange.refuse

    # the client

    def on_client_lost(self) -> None:
        self._flow_control.remove(self.exchange.outcome.call.service, self.request, self._now())
        self._count_wait("abandoned")
        self.exchange.on_client_lost()

    def on_client_paused(self) -> None:
        self.exchange.on_client_paused()

    def on_client_resumed(self) -> None:
        self.exchange.on_client_resumed()


class RequestHandler:
    """Handles all generation requests of one router."""

    def __init__(
        self,
        flow_control: FlowController,
        retry_budgets: RetryBudgets,
        comments: CommentSchedule,
        shared: Shared,
    ) -> None:
        self._flow_control = flow_control
        self._retry_budgets = retry_budgets
        self._comments = comments
        self.shared = shared
        self._accounting = shared.accounting
        self.inflight = 0
        """Requests that have not ended, including queued ones."""
        self.idle = asyncio.Event()
        """Set while no request is in flight."""
        self.idle.set()

    def handle(
        self, client: Client, call: Call, started: float, on_end: Callable[[], None] | None = None
    ) -> None:
        """Send a call, queue it, or refuse it with an error.

        Args:
            started: when the whole request had arrived.
            on_end: called when it has ended.
        """
        outcome = RequestOutcome(call, started)
        answer = Answer(
            client, outcome, wheel=self.shared.wheel, comments=self._comments, now=self.shared.now
        )
        ended = self.on_end if on_end is None else partial(self._on_end_of, on_end)
        budget = self._retry_budgets.of(call.service, self.now())
        self.take(Exchange(answer, outcome, ended, budget, self.shared), client)

    def now(self) -> float:
        """Return the time by the monotonic clock of requests."""
        return self.shared.now()

    def charge(self, request: Request, account: Account) -> None:
        """Charge a request to its key's limits, before its body is read.

        Raises:
            RateLimited: the key's rate is reached.
        """
        request.is_charged = self._accounting.charge_request(account, self.now())

    def take(self, request: PendingRequest, client: Client) -> None:
        """Start a request, queue it, or refuse it. It must call `on_end` once, when it has ended."""
        if not self.inflight:
            self.idle.clear()
        self.inflight += 1
        client.attach(request)
        try:
            self._accounting.reserve(request.outcome)
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
        queued = QueuedCall(flow_control, request, client, self.shared.now)
        client.attach(queued)
        try:
            flow_control.enqueue(call.service, queued.request, now)
        except ApiError as error:
            queued.refuse(error)

    def _on_end_of(self, on_end: Callable[[], None], outcome: RequestOutcome) -> None:
        on_end()
        self.on_end(outcome)

    def on_end(self, outcome: RequestOutcome) -> None:
        """Account for a request that has ended, and free its place."""
        now = self.now()
        self._accounting.close(outcome, now)
        if outcome.attempts:
            self._flow_control.ended(outcome.call.service, now, outcome.call.estimate.sequences)
        self.inflight -= 1
        if not self.inflight:
            self.idle.set()
