"""The retry budget: retries must not turn a brown-out into an outage.

Owns: how many attempts of one service may be repeated. Must not know: which.

Each request earns `RATIO` of a retry, and `FLOOR_PER_S` come free so that a quiet router can still retry (Finagle's
and Linkerd's budget; GEP-3388 has the same fields). Unused credit is capped at ten seconds' worth of the floor.
"""

from __future__ import annotations

RATIO = 0.2
FLOOR_PER_S = 10.0
MAX_CREDIT = 100.0
KEPT_CREDIT = 50.0
"""Repeating what an engine answered with an error leaves so much, so that a flood of requests that are themselves at
fault does not cost others their retries."""


class RetryBudget:
    """Credit for retries. Times are a monotonic clock's, passed in."""

    __slots__ = ("_credit", "_time")

    def __init__(self, now: float) -> None:
        self._credit = MAX_CREDIT
        self._time = now

    def earn(self) -> None:
        """A request arrived."""
        self._credit = min(MAX_CREDIT, self._credit + RATIO)

    def spend(self, now: float, *, is_error: bool = False) -> bool:
        """Takes one retry; False when the budget is exhausted. With `is_error` the request was answered with an error,
        and `KEPT_CREDIT` is left for others."""
        self._credit = min(MAX_CREDIT, self._credit + FLOOR_PER_S * (now - self._time))
        self._time = now
        if self._credit < (1.0 + KEPT_CREDIT if is_error else 1.0):
            return False
        self._credit -= 1.0
        return True
