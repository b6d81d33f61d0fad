"""The retry budget of each service, which keeps retries from turning a brown-out into an outage.

Owns: how many retries a service may still send. Must not know: which requests are retried.

Each request that is sent earns `RATIO` of a retry, and `FLOOR_PER_S` come free so that a quiet router can still retry
(Finagle's and Linkerd's budget; GEP-3388 has the same fields). Unused credit is capped at ten seconds' worth of the
floor.
"""

from __future__ import annotations

from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.service import Service

RATIO = 0.2
FLOOR_PER_S = 10.0
MAX_CREDIT = 100.0
RESERVED_CREDIT = 50.0
"""Credit that retries of errors leave for other retries, so that a flood of requests that are themselves at fault does
not use up the budget."""


class RetryBudget:
    """The retry credit of one service. Times are a monotonic clock's, passed in."""

    __slots__ = ("_credit", "_time")

    def __init__(self, now: float) -> None:
        self._credit = MAX_CREDIT
        self._time = now

    def earn(self) -> None:
        """Add what a request earns when it is sent first; one that is refused by a limit earns nothing."""
        self._credit = min(MAX_CREDIT, self._credit + RATIO)

    def spend(self, now: float, *, is_error: bool = False) -> bool:
        """Take one retry; False when the budget is exhausted.

        Args:
            is_error: an engine answered the request with an error, or is too busy for requests like it, so
                `RESERVED_CREDIT` must remain.
        """
        self._credit = min(MAX_CREDIT, self._credit + FLOOR_PER_S * (now - self._time))
        self._time = now
        if self._credit < (1.0 + RESERVED_CREDIT if is_error else 1.0):
            return False
        self._credit -= 1.0
        return True


class RetryBudgets:
    """The budgets of all services."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._budgets: dict[Service, RetryBudget] = {}

    def of(self, service: Service, now: float) -> RetryBudget:
        """Return the service's budget. When it is new, those of removed services are dropped."""
        budget = self._budgets.get(service)
        if budget is None:
            for gone in set(self._budgets).difference(self._fleet.services.values()):
                del self._budgets[gone]
            budget = self._budgets[service] = RetryBudget(now)
        return budget
