"""How many requests of batches this router has in flight, and how many more it takes, so that interactive requests find
capacity.

Owns: their number by service. Must not know: batches, who sends them.
Invariants: they have no more than `share` of what a service's replicas can take, one at least; no further one is taken
while an interactive request is queued for the service. They also have the lowest priority in the queue, and in engines
that schedule by priority.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from argosy_protocol.batch_program import NO_ROOM
from argosy_protocol.errors import TooManyRequests
from argosy_router.fleet.service import Service
from argosy_router.flow_control.controller import FlowController
from argosy_router.http.server_interface import Client
from argosy_router.proxy.downstream.ending_client import EndingClient


class BackgroundLoad:
    """Counts the requests of batches of one router."""

    def __init__(
        self, flow_control: FlowController, share: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`share` is of what a service's replicas can take, from 0 to 1."""
        self._flow_control = flow_control
        self._share = share
        self._now = now
        self._running: Counter[Service] = Counter()

    @property
    def inflight(self) -> int:
        """Requests of batches in flight."""
        return self._running.total()

    def room(self, service: Service) -> int:
        """How many more requests of batches for a service are taken now."""
        running = self._running.get(service, 0)
        room = self._flow_control.background_room(service, self._now(), running, self._share)
        return max(room, 0 if running else 1)

    def begin(self, client: Client, service: Service) -> Client:
        """Count a request until it ends; return the client that its answer goes to.

        Raises:
            TooManyRequests: there is no room for it.
        """
        if self.room(service) <= 0:
            raise TooManyRequests(
                "the service has no room for further requests of batches", code=NO_ROOM, retry_after_s=1.0
            )
        self._running[service] += 1
        return EndingClient(client, lambda: self._end(service))

    def _end(self, service: Service) -> None:
        self._running[service] -= 1
        if not self._running[service]:
            del self._running[service]
