"""Accounts: what the holder of a key may ask for, and how much of its limits it has left at this router.

Owns: a key's terms applied to requests, reservations, token buckets, and the `x-ratelimit-*` headers, whose names and
forms are OpenAI's. Must not know: keys themselves, requests, queues, HTTP. Times are a monotonic clock's, passed in.
Each of several routers has its share of the limits; together they keep the limits, except for one request each if a
limit is smaller than the number of routers, or a request has more sequences than the share.
Invariants: a reservation is closed once; tokens that a request reserved and did not use are returned, and those that it
used beyond its reservation are owed. A bucket never holds more than its capacity, of an account one minute's refill,
but at least one; it may be in debt, and then no request passes until the debt is refilled.
"""

from __future__ import annotations

import hashlib
import math

from argosy_protocol.errors import BadRequest, TooManyRequests
from argosy_router.auth.key_terms import KeyTerms
from argosy_router.token_bucket import PERIOD_S, TokenBucket


class RateLimits:
    """The two buckets of an account; either may be missing."""

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

    def wait_s(self, tokens: int, now: float) -> tuple[float, str]:
        """Return the seconds until one more request with this many tokens may pass, zero if it may pass now, and which
        of the limits it waits for longer, `requests` or `tokens`."""
        requests_s = self.requests.wait_s(1, now) if self.requests is not None else 0.0
        tokens_s = self.tokens.wait_s(tokens, now) if self.tokens is not None else 0.0
        return (requests_s, "requests") if requests_s >= tokens_s else (tokens_s, "tokens")

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
    """The limits of one key, of which zero is none."""

    def __init__(self, terms: KeyTerms, now: float, routers: int = 1) -> None:
        """`routers` divide the limits."""
        self._rates = RateLimits()
        self._routers = routers
        self._parallel_share = 0
        """This router's share of parallel requests; zero without that limit."""
        self._sequence_share = 0
        """This router's share of parallel sequences; zero without that limit."""
        self._sequences = 0
        """Sequences of the requests with an open reservation."""
        self._active = 0
        """Requests with an open reservation."""
        self._limit(terms, now)

    def _limit(self, terms: KeyTerms, now: float) -> None:
        """Set the limits of all routers together; what was used of the old ones stays used."""
        self._terms = terms
        self._divide(now)

    def divide(self, routers: int, now: float) -> None:
        """Divide the limits by the number of routers, this one included, that apply them from now on."""
        if routers != self._routers:
            self._routers = routers
            self._divide(now)

    def _divide(self, now: float) -> None:
        """Set this router's share of the limits: of rates exactly, of parallel requests and sequences at least one."""
        routers, terms = self._routers, self._terms
        parallel, sequences = terms.max_parallel_requests, terms.max_parallel_sequences
        self._rates.apply(terms.requests_per_minute / routers, terms.tokens_per_minute / routers, now)
        self._parallel_share = max(1, parallel // routers) if parallel else 0
        self._sequence_share = max(1, sequences // routers) if sequences else 0

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit, so that requests need reservations."""
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
        if share and sequences > self._terms.max_parallel_sequences:
            raise BadRequest(
                f"the request generates {sequences} sequences (choices, prompts of a batch or beams), and API key "
                f"{self._terms.name!r} may have {self._terms.max_parallel_sequences} in progress: send smaller requests"
            )
        if is_charged:
            self.return_request()
        self._check_rates(tokens, now)
        if self._parallel_share and self._active >= self._parallel_share:
            raise RateLimited(
                f"API key {self._terms.name!r} has {self._active} requests in progress, and may have "
                f"{self._terms.max_parallel_requests}{self._of_which(self._parallel_share)}",
                retry_after_s=1.0,
                limits=self._rates.header_lines(),
            )
        if share and self._sequences + min(sequences, share) > share:
            raise RateLimited(
                f"API key {self._terms.name!r} has {self._sequences} sequences in progress, and may have "
                f"{self._terms.max_parallel_sequences}{self._of_which(share)}",
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
        wait_s, unit = self._rates.wait_s(tokens, now)
        if wait_s > 0.0:
            limit = self._terms.requests_per_minute if unit == "requests" else self._terms.tokens_per_minute
            raise RateLimited(
                f"API key {self._terms.name!r} has reached its rate limit of {limit} {unit} per minute"
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


MAX_PRIORITY = (1 << 31) - 1
"""Bound of the request field `priority`."""

USUAL_OUTPUT_TOKENS = 256.0
"""Assumed output of a request without `max_tokens` until the account has responses to learn from: an ordinary chat
answer."""
USUAL_BYTES_PER_TOKEN = 4.0
"""Assumed of an account's prompts until it has had answers: English prose with a large vocabulary."""
BODY_BYTES_PER_S = 8 << 20
"""Of an account's larger bodies, read in the event loop: some 40 ms in each second. A second's may come at once."""
_LEARNING_RATE = 0.1
"""A change in the length of responses is learnt from some twenty of them."""


class Account(KeyLimits):
    """The holder of one key. Times are a monotonic clock's."""

    def __init__(self, terms: KeyTerms, now: float, secret: bytes = b"", routers: int = 1) -> None:
        """`routers` divide the limits."""
        super().__init__(terms, now, routers)
        self._body_bytes = TokenBucket(BODY_BYTES_PER_S * PERIOD_S, now, BODY_BYTES_PER_S)
        self.usual_output_tokens = USUAL_OUTPUT_TOKENS
        """Mean output of requests without `max_tokens`; of this key alone, so that other keys cannot drive it up."""
        self.bytes_per_token = USUAL_BYTES_PER_TOKEN
        """Of the prompts of this key alone, for its limits, for the same reason."""
        self.apply(terms, now, secret)

    def apply(self, terms: KeyTerms, now: float, secret: bytes = b"") -> None:
        """Apply new terms from the next request on; what was used of the old limits stays used. `secret`: up to 64
        bytes that no other account knows; empty only where the cache is shared."""
        assert secret or terms.cache == "shared"
        self.name = terms.name
        self.weight = terms.weight
        self._secret = secret
        self._limit(terms, now)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that it may use; none means all."""
        return self._terms.models

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

    def may_read_at_once(self, size: int, now: float) -> bool:
        """Count a body of `size` bytes against what the event loop reads for one account in a second; return whether it
        is within that, else it counts for nothing."""
        if self._body_bytes.wait_s(size, now) > 0.0:
            return False
        self._body_bytes.take(size)
        return True

    def learn_output(self, tokens: float) -> None:
        """Learn from the response to a request without `max_tokens`, which had `tokens` for each sequence."""
        self.usual_output_tokens += _LEARNING_RATE * (tokens - self.usual_output_tokens)


class AnonymousAccount(Account):
    """The account of all clients of a router without keys: it may use every model, has no limits, and keeps the
    priority that a request asks for."""

    def __init__(self) -> None:
        super().__init__(KeyTerms(name="anyone"), 0.0)
        self.name = ""

    def priority(self, asked: int) -> int:
        return asked


ANONYMOUS = AnonymousAccount()
