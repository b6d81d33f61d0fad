"""Limits of one key: requests and tokens per minute, parallel requests and sequences, reserved before a request goes.

Owns: how much of its limits a key has left at this router. Must not know: keys themselves, requests, queues, HTTP.
Each of several routers has its share of the limits; together they keep the limits, except for one request each if a
limit is smaller than the number of routers, or a request has more sequences than the share.
Invariant: a reservation is closed once; tokens that a request reserved and did not use are returned, and those that it
used beyond its reservation are owed.
"""

from __future__ import annotations

from argosy_protocol.errors import BadRequest, TooManyRequests
from argosy_router.ratelimit.token_bucket import RateLimits


class RateLimited(TooManyRequests):
    """A key is over one of its limits."""

    default_code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float, limits: bytes) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self._limits = limits.decode()

    def headers(self) -> dict[str, str]:
        fields = (line.partition(": ") for line in self._limits.splitlines())
        return super().headers() | {name: value for name, _, value in fields}


class KeyLimits:
    """The limits of the key called `name`. Times are a monotonic clock's."""

    def __init__(self, routers: int = 1) -> None:
        """There is no limit before `apply`. `routers` divide the limits."""
        self._rates = RateLimits()
        self._routers = routers
        self._name = ""
        self._requests_per_minute = 0
        self._tokens_per_minute = 0
        self._max_parallel_requests = 0
        self._parallel_share = 0
        """This router's share of `_max_parallel_requests`; zero without that limit."""
        self._max_parallel_sequences = 0
        self._sequence_share = 0
        """This router's share of `_max_parallel_sequences`; zero without that limit."""
        self._sequences = 0
        """Sequences of the requests with an open reservation."""
        self._active = 0
        """Requests with an open reservation."""

    def apply(
        self,
        name: str,
        requests_per_minute: int,
        tokens_per_minute: int,
        max_parallel_requests: int,
        max_parallel_sequences: int,
        now: float,
    ) -> None:
        """Set the limits of all routers together, where zero is no limit; what was used of the old ones stays used."""
        self._name = name
        self._requests_per_minute = requests_per_minute
        self._tokens_per_minute = tokens_per_minute
        self._max_parallel_requests = max_parallel_requests
        self._max_parallel_sequences = max_parallel_sequences
        self._divide(now)

    def divide(self, routers: int, now: float) -> None:
        """Divide the limits by the number of routers, this one included, that apply them from now on."""
        if routers != self._routers:
            self._routers = routers
            self._divide(now)

    def _divide(self, now: float) -> None:
        """Set this router's share of the limits: of rates exactly, of parallel requests and sequences at least one."""
        routers, parallel, sequences = (
            self._routers,
            self._max_parallel_requests,
            self._max_parallel_sequences,
        )
        self._rates.apply(self._requests_per_minute / routers, self._tokens_per_minute / routers, now)
        self._parallel_share = max(1, parallel // routers) if parallel else 0
        self._sequence_share = max(1, sequences // routers) if sequences else 0

    @property
    def is_limited(self) -> bool:
        return self._rates.is_limited or self._parallel_share > 0 or self._sequence_share > 0

    def charge_request(self, now: float) -> None:
        """Charge one request whose tokens are not known yet.

        Raises:
            RateLimited: the rate of requests is reached, or no token is left; nothing was charged.
        """
        self._check_rates(1, now)
        self._rates.take(1, 0)

    def return_request(self) -> None:
        """Return what `charge_request` charged."""
        self._rates.take(-1, 0)

    def reserve(
        self, tokens: int, now: float, sequences: int = 1, *, is_charged: bool = False
    ) -> Reservation:
        """Reserve one request with its sequences and an estimate of its tokens. A request with more sequences than this
        router's share passes while the key has no other.

        Args:
            is_charged: whether `charge_request` has charged the request.

        Raises:
            RateLimited: one of the limits is reached; nothing was reserved, and the request is not charged any more.
            BadRequest: the request alone has more sequences than the limit allows.
        """
        share = self._sequence_share
        if share and sequences > self._max_parallel_sequences:
            raise BadRequest(
                f"the request generates {sequences} sequences (choices, prompts of a batch or beams), and API key "
                f"{self._name!r} may have {self._max_parallel_sequences} in progress: send smaller requests"
            )
        if is_charged:
            self.return_request()
        self._check_rates(tokens, now)
        if self._parallel_share and self._active >= self._parallel_share:
            raise RateLimited(
                f"API key {self._name!r} has {self._active} requests in progress, and may have "
                f"{self._max_parallel_requests}{self._of_which(self._parallel_share)}",
                retry_after_s=1.0,
                limits=self._rates.header_lines(),
            )
        if share and self._sequences + min(sequences, share) > share:
            raise RateLimited(
                f"API key {self._name!r} has {self._sequences} sequences in progress, and may have "
                f"{self._max_parallel_sequences}{self._of_which(share)}",
                retry_after_s=1.0,
                limits=self._rates.header_lines(),
            )
        if self._rates.tokens is not None:
            tokens = min(
                tokens, int(self._rates.tokens.capacity)
            )  # more than a full bucket can never be reserved
        self._active += 1
        self._sequences += sequences
        self._rates.take(1, tokens)
        return Reservation(self, tokens, sequences, self._rates.header_lines())

    def _check_rates(self, tokens: int, now: float) -> None:
        wait_s = self._rates.wait_s(tokens, now)
        if wait_s > 0.0:
            unit = self._rates.slower(tokens, now)
            limit = self._requests_per_minute if unit == "requests" else self._tokens_per_minute
            raise RateLimited(
                f"API key {self._name!r} has reached its rate limit of {limit} {unit} per minute"
                f"{self._of_which(limit / self._routers)}",
                retry_after_s=wait_s,
                limits=self._rates.header_lines(),
            )

    def _of_which(self, share: float) -> str:
        """The part of a message that tells this router's share of a limit; empty for an only router."""
        if self._routers == 1:
            return ""
        shown = f"{int(share)}" if share >= 10 else f"{share:.2g}"
        return f", of which this router, one of {self._routers}, admits {shown}"

    def close(self, requests: int, tokens: int, sequences: int) -> None:
        """Free the reserved sequences, and correct the other limits by the difference from what was reserved; for
        `Reservation` only."""
        self._active -= 1
        self._sequences -= sequences
        self._rates.take(requests, tokens)


class Reservation:
    """What one request has reserved of its key's limits."""

    __slots__ = ("_is_open", "_limits", "_sequences", "_tokens", "header_lines")

    def __init__(self, limits: KeyLimits, tokens: int, sequences: int, header_lines: bytes) -> None:
        self._limits = limits
        self._tokens = tokens
        self._sequences = sequences
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
            self._limits.close(requests, tokens, self._sequences)
