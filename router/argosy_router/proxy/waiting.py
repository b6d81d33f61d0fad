"""A request in the queue, as its client's connection sees it.

Must not know: why it waits, when its turn comes.
Invariant: a client that leaves is out of the queue at once, and its request is never sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from argosy_protocol.errors import ApiError
from argosy_router.admission.entry import Waiter
from argosy_router.admission.lane import Lane
from argosy_router.http.roles import Client

if TYPE_CHECKING:
    from argosy_router.proxy.exchange import Exchange
    from argosy_router.proxy.gate import Gate


class Waiting(Waiter):
    """One waiting request."""

    __slots__ = ("_client", "_gate", "_lane", "exchange")

    def __init__(self, gate: Gate, lane: Lane, exchange: Exchange, client: Client) -> None:
        call = exchange.call
        super().__init__(
            call.account,
            call.priority,
            call.estimate.total,
            len(call.body),
            call.prompt.name,
            call.estimate.sequences,
        )
        self.since = exchange.started
        self.exchange = exchange
        self._gate = gate
        self._lane = lane
        self._client = client

    def admit(self) -> None:
        self._leave("sent")
        try:
            self.exchange.start()
        except ApiError as error:
            self._lane.retract(self._gate.now(), self.sequences)
            self.exchange.refuse(error)

    def refuse(self, error: ApiError) -> None:
        self._leave("refused")
        self.exchange.refuse(error)

    def _leave(self, outcome: str) -> None:
        self._gate.left(self, outcome)
        self._client.attach(self.exchange)

    # the client

    def on_client_lost(self) -> None:
        self._lane.leave(self)
        self._gate.left(self, "abandoned")
        self.exchange.on_client_lost()

    def on_client_paused(self) -> None:
        self.exchange.on_client_paused()

    def on_client_resumed(self) -> None:
        self.exchange.on_client_resumed()
