"""Allowance: how often something may be done, such as a write that a tenant can cause at will.

Owns the count. Must not know what is done, nor look at a clock. Invariant: within any time t at most `burst` plus
t / `interval` are taken.
"""

from __future__ import annotations


class Allowance:
    """A token bucket, full at first. Times are a monotonic clock's.

    Args:
        burst: how many may be taken at once.
        interval: seconds until one more may be.
    """

    def __init__(self, burst: float, interval: float, now: float) -> None:
        self._burst = burst
        self._interval = interval
        self._left = burst
        self._at = now

    def wait(self, now: float, reserve: float = 0.0) -> float:
        """Seconds until one may be taken that leaves `reserve` of them; 0 if it may be now."""
        self._left = min(self._burst, self._left + (now - self._at) / self._interval)
        self._at = now
        return max(0.0, (1.0 + reserve - self._left) * self._interval)

    def take(self) -> None:
        """Take the one that `wait` allowed."""
        self._left -= 1.0
