"""Hedging: a request overdue at one replica is sent to another one, too (Dean and Barroso, "The tail at scale").

Owns: when a first token is overdue, and how many requests of a service may be hedged.
Must not know: attempts, connections, how the other replica is chosen.
Invariant: of the streams of a service at most `SHARE` are hedged, plus one, and at most `MAX_CREDIT` in a row; so a
service that is slow because it is overloaded gets hardly more work.
"""

from __future__ import annotations

from collections.abc import Callable

from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.service import Service
from argosy_router.http.deadlines import Deadline, TimerWheel

SHARE = 0.05
"""The cost of the paper's example of a deferred hedge, which waits for the 95th percentile."""
MAX_CREDIT = 10.0
"""Hedges that may be saved up: a replica that hangs holds a handful of requests."""
FLOOR_S = 0.1
"""Below this a first token is not overdue, however short its prediction: scheduling alone may take as long."""


class Hedging:
    """Shared by all requests of one router."""

    def __init__(self, fleet: Fleet, wheel: TimerWheel, factor: float) -> None:
        """`factor` applies to services without one of their own; zero hedges none of their requests."""
        self._fleet = fleet
        self._wheel = wheel
        self._factor = factor
        self.credit: dict[Service, float] = {}
        """Hedges that each service's streams have earned."""

    def watch(
        self, service: Service, predicted_ttft_s: float, on_overdue: Callable[[], None]
    ) -> Deadline | None:
        """Have `on_overdue` called when the first token of a stream just sent is overdue, unless the deadline is ended
        before; None if the service's requests are not hedged."""
        factor = service.spec.hedge_after
        if factor is None:
            factor = self._factor
        if not factor:
            return None
        credit = self.credit.get(service)
        if credit is None:
            credit = self._add(service)
        self.credit[service] = min(MAX_CREDIT, credit + SHARE)
        deadline = Deadline(self._wheel, on_overdue)
        deadline.set(max(FLOOR_S, factor * predicted_ttft_s))
        return deadline

    def spend(self, service: Service) -> bool:
        """Take one hedge; False when the service's share is used up."""
        credit = self.credit.get(service, 0.0)
        if credit < 1.0:
            return False
        self.credit[service] = credit - 1.0
        return True

    def _add(self, service: Service) -> float:
        for gone in set(self.credit).difference(self._fleet.services.values()):
            del self.credit[gone]
        return 1.0
