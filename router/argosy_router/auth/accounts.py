"""Accounts: what the holder of a key may ask for, and what it has reserved of its rate limits.

Owns: a key's terms applied to requests. Must not know: keys themselves, queues, HTTP.
Each of several routers has its share of the limits; together they keep the limits, except for one request each if a
limit is smaller than the number of routers.
Invariant: a reservation is closed once; tokens that a request reserved and did not use are returned, and those that it
used beyond its reservation are owed.
"""

from __future__ import annotations

import hashlib

from argosy_protocol.errors import TooManyRequests
from argosy_router.auth.terms import KeyTerms
from argosy_router.ratelimit.token_bucket import RateLimits

MAX_PRIORITY = (1 << 31) - 1
"""Bound of the request field `priority`."""


USUAL_OUTPUT_TOKENS = 256.0
"""Assumed output of a request without `max_tokens` until the account has responses to learn from: an ordinary chat
answer."""
_LEARNING_RATE = 0.1
"""A change in the length of responses is learnt from some twenty of them."""


class RateLimited(TooManyRequests):
    """An account is over one of its limits."""

    default_code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float, limits: bytes) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self._limits = limits.decode()

    def headers(self) -> dict[str, str]:
        fields = (line.partition(": ") for line in self._limits.splitlines())
        return super().headers() | {name: value for name, _, value in fields}


class Account:
    """The holder of one key. Times are a monotonic clock's."""

    def __init__(self, terms: KeyTerms, now: float, secret: bytes = b"", routers: int = 1) -> None:
        """`routers` divide the limits."""
        self._limits = RateLimits()
        self._routers = routers
        self._active = 0
        """Requests with an open reservation."""
        self.usual_output_tokens = USUAL_OUTPUT_TOKENS
        """Mean output of requests without `max_tokens`; of this key alone, so that other keys cannot drive it up."""
        self.apply(terms, now, secret)

    def apply(self, terms: KeyTerms, now: float, secret: bytes = b"") -> None:
        """Apply new terms from the next request on; what was used of the old limits stays used.

        Args:
            secret: up to 64 bytes that no other account knows; empty only where the cache is shared.
        """
        assert secret or terms.cache == "shared"
        self.name = terms.name
        self.weight = terms.weight
        self._terms = terms
        self._secret = secret
        self._divide(now)
        self.is_limited = self._limits.is_limited or terms.max_parallel_requests > 0

    def divide(self, routers: int, now: float) -> None:
        """Divide the limits by the number of routers, this one included, that serve the account from now on."""
        if routers != self._routers:
            self._routers = routers
            self._divide(now)

    def _divide(self, now: float) -> None:
        """Set this router's share of the limits: of rates exactly, of parallel requests at least one."""
        terms, routers = self._terms, self._routers
        self._limits.apply(terms.requests_per_minute / routers, terms.tokens_per_minute / routers, now)
        parallel = terms.max_parallel_requests
        self._max_parallel_requests = max(1, parallel // routers) if parallel else 0

    def may_use(self, *names: str) -> bool:
        """Return whether the account may use the model that has these names."""
        models = self._terms.models
        return not models or any(name in models for name in names)

    def priority(self, asked: int) -> int:
        """Return the priority of a request that asks for `asked`: no request gets ahead of the key's own class."""
        return min(MAX_PRIORITY, self._terms.priority + max(0, asked))

    def cache_salt(self, asked: str | None) -> str | None:
        """Return the `cache_salt` of a request that asks for `asked`. If the cache is private, no other account can
        have the same salt: it is a keyed hash, and the same in every router that has the key."""
        if self._terms.cache == "shared":
            return asked
        salt = (asked or "").encode("utf-8", "surrogatepass")
        return hashlib.blake2b(salt, key=self._secret, digest_size=24, person=b"argosy-salt/1").hexdigest()

    def reserve(self, tokens: int, now: float) -> Reservation:
        """Reserve one request and an estimate of its tokens.

        Raises:
            RateLimited: one of the limits is reached; nothing was reserved.
        """
        terms = self._terms
        wait_s = self._limits.wait_s(tokens, now)
        if wait_s > 0.0:
            raise RateLimited(
                f"the rate limit of API key {self.name!r} is reached",
                retry_after_s=wait_s,
                limits=self._limits.header_lines(),
            )
        if self._max_parallel_requests and self._active >= self._max_parallel_requests:
            raise RateLimited(
                f"API key {self.name!r} has {terms.max_parallel_requests} requests in progress, its limit",
                retry_after_s=1.0,
                limits=self._limits.header_lines(),
            )
        if self._limits.tokens is not None:
            tokens = min(
                tokens, int(self._limits.tokens.capacity)
            )  # more than a full bucket can never be reserved
        self._active += 1
        self._limits.take(1, tokens)
        return Reservation(self, tokens, self._limits.header_lines())

    def learn_output(self, tokens: float) -> None:
        """Learn from the response to a request without `max_tokens`, which had `tokens` for each sequence."""
        self.usual_output_tokens += _LEARNING_RATE * (tokens - self.usual_output_tokens)

    def close(self, requests: int, tokens: int) -> None:
        """Correct the limits by the difference from what was reserved; for `Reservation` only."""
        self._active -= 1
        self._limits.take(requests, tokens)


class AnonymousAccount(Account):
    """The account of all clients of a router without keys: it may use every model, has no limits, and keeps the
    priority that a request asks for."""

    def __init__(self) -> None:
        super().__init__(KeyTerms(name="anyone"), 0.0)
        self.name = ""

    def priority(self, asked: int) -> int:
        return asked


ANONYMOUS = AnonymousAccount()


class Reservation:
    """What one request has reserved of its account's limits."""

    __slots__ = ("_account", "_is_open", "_tokens", "header_lines")

    def __init__(self, account: Account, tokens: int, header_lines: bytes) -> None:
        self._account = account
        self._tokens = tokens
        self._is_open = True
        self.header_lines = header_lines
        """Header lines of the response, which tell what is left of the limits."""

    def settle(self, tokens: int) -> None:
        """Close with the tokens that the request used. If it used more than it had reserved, the bucket goes into debt,
        and no request passes until the debt is refilled."""
        self._close(0, tokens - self._tokens)

    def cancel(self) -> None:
        """Close without charging anything: the request never reached a replica."""
        self._close(-1, -self._tokens)

    def _close(self, requests: int, tokens: int) -> None:
        if self._is_open:
            self._is_open = False
            self._account.close(requests, tokens)
