"""A token bucket: a rate per minute with a burst.

Invariant: a bucket never holds more than its capacity; it may be in debt, and nothing passes until that is refilled.
Times are a monotonic clock's, passed in.
"""

from __future__ import annotations

import math

PERIOD_S = 60.0


class TokenBucket:
    """A bucket that begins full and refills continuously at `per_minute`, which may be below one; `capacity`: the most
    that it holds; by default one minute's refill, at least one."""

    def __init__(self, per_minute: float, now: float, capacity: float | None = None) -> None:
        self.per_minute = per_minute
        self.capacity = max(1.0, per_minute) if capacity is None else capacity
        self._level = self.capacity
        self._time = now

    def resize(self, per_minute: float, now: float, capacity: float | None = None) -> None:
        """Change the limit from now on, and what the bucket holds as in its making; what was used stays used."""
        self._refill(now)
        self.per_minute = per_minute
        self.capacity = max(1.0, per_minute) if capacity is None else capacity
        self._level = min(self._level, self.capacity)

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` can be taken; zero if it can be taken now. For an amount above the capacity
        a full bucket is enough."""
        self._refill(now)
        missing = min(amount, self.capacity) - self._level
        return missing * PERIOD_S / self.per_minute if missing > 0 else 0.0

    def take(self, amount: float) -> None:
        """Take what `wait_s` allowed, or more afterwards; negative amounts are returned to the bucket."""
        self._level = min(self.capacity, self._level - amount)

    def spend(self, amount: float, now: float) -> float:
        """Take an amount, into debt if there is not enough; return the seconds until the debt is refilled."""
        self._refill(now)
        self.take(amount)
        return self.wait_s(0.0, now)

    def remaining(self) -> int:
        return max(0, math.floor(self._level))

    def reset_s(self) -> float:
        """Return the seconds until the bucket is full again."""
        return (self.capacity - self._level) * PERIOD_S / self.per_minute

    def _refill(self, now: float) -> None:
        if now > self._time:  # a request that has waited may come with the time of its arrival
            self._level = min(self.capacity, self._level + (now - self._time) * self.per_minute / PERIOD_S)
            self._time = now
