"""Hedging: sends a request that is overdue at one replica to a second one (Dean and Barroso, "The tail at scale").

Owns: when a first token is overdue, and how many requests of a service may be hedged.
Must not know: attempts, connections, how the other replica is chosen.
Invariant: of the streams of a service at most `SHARE` are hedged, plus one, and at most `MAX_CREDIT` in a row; so
hedges add little work to a service that is slow because it is overloaded.
"""

from __future__ import annotations

from collections.abc import Callable

from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.service import Service
from argosy_router.http.deadlines import Deadline, TimerWheel

SHARE = 0.05
"""The cost of the paper's example of a deferred hedge, which waits for the 95th percentile."""
MAX_CREDIT = 10.0
"""Hedges that a service may save up: a replica that hangs holds a handful of requests."""
FLOOR_S = 0.1
"""Minimum wait for a first token, however short the prediction: scheduling alone may take as long."""


class Hedging:
    """Decides when to hedge, for all requests of one router."""

    def __init__(self, fleet: Fleet, wheel: TimerWheel, factor: float) -> None:
        """`factor` is the default of services that set none; zero disables hedging."""
        self._fleet = fleet
        self._wheel = wheel
        self._factor = factor
        self.credit: dict[Service, float] = {}
        """Hedges that each service may send."""

    def watch(
        self, service: Service, predicted_ttft_s: float, on_overdue: Callable[[], None]
    ) -> Deadline | None:
        """Call `on_overdue` when the first token of a stream that was just sent is overdue, unless the returned
        deadline is ended before; None if the service's requests are not hedged."""
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
