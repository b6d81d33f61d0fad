"""A request in the queue, as its client's connection sees it.

Owns: what a client hears while it waits. Must not know: why it waits, when its turn comes.
Invariants: a client that leaves is out of the queue at once, and its request is never sent; the client's answer begins
once, with the answer itself or, for a stream that has waited a while, with a comment.

Comments keep load balancers from taking a waiting stream for a dead one. Their price: the status is 200 from then on,
and what goes wrong later is told by an error event inside the stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from argosy_engine.protocol.errors import ApiError
from argosy_router.admission.entry import Waiter
from argosy_router.admission.lane import Lane
from argosy_router.http.roles import Client
from argosy_router.http.roles import Exchange as ClientListener

if TYPE_CHECKING:
    from argosy_router.proxy.exchange import Exchange
    from argosy_router.proxy.gate import Gate

_STREAM_HEADERS = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
_COMMENT = b": waiting for a replica\n\n"


class Waiting(Waiter):
    """One waiting request."""

    __slots__ = ("_client", "_gate", "_is_begun", "_is_paused", "_lane", "exchange")

    def __init__(self, gate: Gate, lane: Lane, exchange: Exchange, client: Client) -> None:
        call = exchange.call
        super().__init__(call.account, call.priority, call.estimate.total, len(call.body), call.prompt.name)
        self.since = exchange.started
        self.exchange = exchange
        self._gate = gate
        self._lane = lane
        self._client = client
        self._is_begun = False
        self._is_paused = False

    def admit(self) -> None:
        self._leave("sent")
        try:
            self.exchange.start()
        except ApiError as error:
            self._lane.retract(self._gate.now())
            self.exchange.refuse(error)

    def refuse(self, error: ApiError) -> None:
        self._leave("refused")
        self.exchange.refuse(error)

    def _leave(self, outcome: str) -> None:
        self._gate.left(self, outcome)
        self._client.attach(self.exchange)

    def keep_alive(self) -> None:
        """Lets a stream's client, and whoever is on the way, know that the answer is still to come."""
        if not self._is_begun:
            self._is_begun = True
            self._client.start(200, _STREAM_HEADERS + self.exchange.identity, _COMMENT)
            self.exchange.answer_through(BegunStream(self._client))
        elif not self._is_paused:
            self._client.send(_COMMENT)

    # the client

    def on_client_lost(self) -> None:
        self._lane.leave(self)
        self._gate.left(self, "abandoned")
        self.exchange.on_client_lost()

    def on_client_paused(self) -> None:
        self._is_paused = True

    def on_client_resumed(self) -> None:
        self._is_paused = False


class BegunStream:
    """A client whose event stream has begun before there was an answer: the answer goes on inside it."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def attach(self, exchange: ClientListener) -> None:
        self._client.attach(exchange)

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """A whole answer becomes one event: it is an error, or the answer of an engine that did not stream."""
        self._client.send(b"data: %b\n\n" % body.replace(b"\n", b" "))
        self._client.finish()

    def start(self, status: int, headers: bytes, first: bytes) -> None:
        self._client.send(first)

    def send(self, data: bytes) -> None:
        self._client.send(data)

    def finish(self) -> None:
        self._client.finish()

    def abort(self) -> None:
        self._client.abort()
