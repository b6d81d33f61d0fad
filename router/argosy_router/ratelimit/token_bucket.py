"""Token buckets of requests and tokens per minute.

Owns: how much of its limits an account has left. Must not know: keys, requests.
Invariants: a bucket never holds more than its capacity, of an account one minute's refill, but at least one; it may be
in debt (a response was longer than reserved), and then no request passes until the debt is refilled.

Times are a monotonic clock's, passed in. The header names and the forms of their values are OpenAI's.
"""

from __future__ import annotations

import math

PERIOD_S = 60.0


class TokenBucket:
    """A bucket that begins full and refills continuously at `per_minute`, which may be below one.

    Args:
        capacity: the most that it holds; by default one minute's refill, at least one.
    """

    __slots__ = ("_level", "_time", "capacity", "per_minute")

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


class RateLimits:
    """The two buckets of an account; either may be missing."""

    __slots__ = ("requests", "tokens")

    def __init__(self) -> None:
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None

    def apply(self, requests_per_minute: float, tokens_per_minute: float, now: float) -> None:
        """Set the limits; zero is no limit."""
        self.requests = _resized(self.requests, requests_per_minute, now)
        self.tokens = _resized(self.tokens, tokens_per_minute, now)

    @property
    def is_limited(self) -> bool:
        return self.requests is not None or self.tokens is not None

    def wait_s(self, tokens: int, now: float) -> float:
        """Return the seconds until one more request with this many tokens may pass; zero if it may pass now."""
        return max(self._waits_s(tokens, now))

    def slower(self, tokens: int, now: float) -> str:
        """Return which of the limits, `requests` or `tokens`, such a request waits for longer."""
        requests_s, tokens_s = self._waits_s(tokens, now)
        return "requests" if requests_s >= tokens_s else "tokens"

    def _waits_s(self, tokens: int, now: float) -> tuple[float, float]:
        """Return the seconds that each limit makes such a request wait."""
        requests_s = self.requests.wait_s(1, now) if self.requests is not None else 0.0
        tokens_s = self.tokens.wait_s(tokens, now) if self.tokens is not None else 0.0
        return requests_s, tokens_s

    def take(self, requests: int, tokens: int) -> None:
        """Take requests and tokens from the buckets; negative numbers are returned to them."""
        if self.requests is not None:
            self.requests.take(requests)
        if self.tokens is not None:
            self.tokens.take(tokens)

    def header_lines(self) -> bytes:
        """Render `x-ratelimit-*` as OpenAI sends them, as of the last `wait_s`."""
        lines = b""
        if self.requests is not None:
            lines = _REQUESTS % _figures(self.requests)
        if self.tokens is not None:
            lines += _TOKENS % _figures(self.tokens)
        return lines


_LINES = b"x-ratelimit-limit-%b: %%d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%b\r\n"
_REQUESTS = _LINES % ((b"requests",) * 3)
_TOKENS = _LINES % ((b"tokens",) * 3)


def _figures(bucket: TokenBucket) -> tuple[int, int, bytes]:
    return math.floor(bucket.capacity), bucket.remaining(), duration(bucket.reset_s()).encode()


def _resized(bucket: TokenBucket | None, per_minute: float, now: float) -> TokenBucket | None:
    if not per_minute:
        return None
    if bucket is None:
        return TokenBucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket


def duration(seconds: float) -> str:
    """Render `120ms`, `1.5s` or `6m0s`, rounded up."""
    ms = math.ceil(seconds * 1000)
    if ms < 1000:
        return f"{ms}ms"
    if ms < 60_000:
        return f"{ms / 1000:g}s"
    minutes, rest = divmod(math.ceil(ms / 1000), 60)
    return f"{minutes}m{rest}s"
