"""A call in a service's queue, which listens to its client while it waits.

Must not know: why it is queued, when it is admitted.
Invariant: when the client leaves, the call leaves the queue at once and is never sent.
"""

# Not compiled: its base class is interpreted.

from __future__ import annotations

from collections.abc import Callable

from argosy_protocol.errors import ApiError
from argosy_router.flow_control.controller import FlowController
from argosy_router.flow_control.queued_request import QueuedRequest
from argosy_router.http.server_interface import Client
from argosy_router.proxy.pending_request import PendingRequest


class QueuedCall(QueuedRequest):
    """One queued call, and the exchange (or endpoint pick) that takes over when it leaves the queue."""

    __slots__ = ("_client", "_flow_control", "_now", "exchange")

    def __init__(
        self, flow_control: FlowController, exchange: PendingRequest, client: Client, now: Callable[[], float]
    ) -> None:
        """`now` is a monotonic clock."""
        call = exchange.outcome.call
        super().__init__(
            call.account,
            call.priority,
            call.estimate.cost,
            len(call.body) + len(call.prompt.name),
            call.prompt.name,
            call.estimate.sequences,
        )
        self.since = exchange.outcome.started
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
            self._flow_control.retract(service, self._now(), self.sequences)
            self.exchange.refuse(error)

    def refuse(self, error: ApiError) -> None:
        self._leave_queue("refused")
        self.exchange.refuse(error)

    def _leave_queue(self, how: str) -> None:
        self._count_wait(how)
        self._client.attach(self.exchange)

    def _count_wait(self, how: str) -> None:
        outcome = self.exchange.outcome
        outcome.queued_s = seconds = self._now() - self.since
        self._flow_control.observe_wait(outcome.call.service, how, seconds)

    # the client

    def on_client_lost(self) -> None:
        self._flow_control.remove(self.exchange.outcome.call.service, self, self._now())
        self._count_wait("abandoned")
        self.exchange.on_client_lost()

    def on_client_paused(self) -> None:
        self.exchange.on_client_paused()

    def on_client_resumed(self) -> None:
        self.exchange.on_client_resumed()
