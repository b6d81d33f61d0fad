"""Accounts: what the holder of a key may ask for.

Owns: a key's terms applied to requests. Must not know: keys themselves, queues, HTTP.
"""

from __future__ import annotations

import hashlib

from argosy_router.auth.key_terms import KeyTerms
from argosy_router.ratelimit.key_limits import KeyLimits, Reservation
from argosy_router.ratelimit.token_bucket import PERIOD_S, TokenBucket

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


class Account:
    """The holder of one key. Times are a monotonic clock's."""

    def __init__(self, terms: KeyTerms, now: float, secret: bytes = b"", routers: int = 1) -> None:
        """`routers` divide the limits."""
        self._limits = KeyLimits(routers)
        self._body_bytes = TokenBucket(BODY_BYTES_PER_S * PERIOD_S, now, BODY_BYTES_PER_S)
        self.usual_output_tokens = USUAL_OUTPUT_TOKENS
        """Mean output of requests without `max_tokens`; of this key alone, so that other keys cannot drive it up."""
        self.bytes_per_token = USUAL_BYTES_PER_TOKEN
        """Of the prompts of this key alone, for its limits, for the same reason."""
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
        self._limits.apply(
            terms.name,
            terms.requests_per_minute,
            terms.tokens_per_minute,
            terms.max_parallel_requests,
            terms.max_parallel_sequences,
            now,
        )

    @property
    def is_limited(self) -> bool:
        """Whether the account has any limit, so that its requests need reservations."""
        return self._limits.is_limited

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that it may use; none means all."""
        return self._terms.models

    def divide(self, routers: int, now: float) -> None:
        """Divide the limits by the number of routers, this one included, that serve the account from now on."""
        self._limits.divide(routers, now)

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

    def charge_request(self, now: float) -> None:
        """Charge one request whose tokens are not known yet (see `reserve`).

        Raises:
            RateLimited: the rate of requests is reached, or no token is left; nothing was charged.
        """
        self._limits.charge_request(now)

    def return_request(self) -> None:
        """Return what `charge_request` charged."""
        self._limits.return_request()

    def reserve(
        self, tokens: int, now: float, sequences: int = 1, *, is_charged: bool = False
    ) -> Reservation:
        """Reserve one request with its sequences and an estimate of its tokens.

        Args:
            is_charged: whether `charge_request` has charged the request.

        Raises:
            RateLimited: one of the limits is reached; nothing was reserved, and the request is not charged any more.
            BadRequest: the request alone has more sequences than the limit allows.
        """
        return self._limits.reserve(tokens, now, sequences, is_charged=is_charged)

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
