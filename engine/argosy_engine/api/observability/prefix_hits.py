"""PrefixHits: which prefixes requests find in the prefix cache, and how often of late.

Owns the token ids of the hottest prefixes, in bounded memory, and the choice of those that a new replica should
compute first. Must not know: who asks for them. A prefix is what one request found: whole KV cache blocks from the
prompt's beginning, under the request's salt; of a longer one those within MAX_WARM_UP_TOKENS, since a new replica
computes no more. Invariants: at most MAX_PREFIXES entries of MAX_TOKENS tokens together; a prefix that is part of
another one is not reported beside it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from math import exp
from typing import Final

from xxhash import xxh3_128_digest

from argosy_engine.frontend.observer import Observer
from argosy_engine.messages.core_messages import EngineCoreRequest
from argosy_protocol.hot_prefixes import MAX_PREFIXES, MAX_TOKENS, MAX_WARM_UP_TOKENS, HotPrefix
from argosy_protocol.telemetry import pack_u32, pack_u64

RECENT_S: Final = 600.0
"""Time constant with which hits lose their weight, as in the router's value of a cache."""
MIN_TOKENS: Final = 64
"""Shorter prefixes are computed in a few milliseconds."""


class _Prefix:
    """One prefix, and its decayed hits."""

    __slots__ = ("_hits", "_time", "request", "tokens")

    def __init__(self, tokens: array[int], request: HotPrefix, now: float) -> None:
        self.tokens = tokens
        self.request = request
        self._hits = 0.0
        self._time = now

    def hit(self, now: float) -> None:
        self._hits = self._hits * exp((self._time - now) / RECENT_S) + 1.0
        self._time = now

    def value(self, now: float) -> float:
        """Tokens that it saves: length times recent hits."""
        return self._hits * exp((self._time - now) / RECENT_S) * len(self.tokens)


class PrefixHits(Observer):
    """The hottest prefixes of one engine.

    Args:
        now: a monotonic clock.
        block_size: tokens of a KV cache block.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, block_size: int = 1) -> None:
        self._now = now
        self._max_kept = MAX_WARM_UP_TOKENS // block_size * block_size
        self._prefixes: dict[bytes, _Prefix] = {}
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Token ids kept."""
        return self._num_tokens

    def on_prefix_hit(self, request: EngineCoreRequest, num_cached: int) -> None:
        if num_cached < MIN_TOKENS or request.adapter or request.mm_features:
            return
        num_kept = min(num_cached, self._max_kept)
        now, tokens = self._now(), array("I", request.prompt_token_ids[:num_kept])
        key = xxh3_128_digest(tokens.tobytes() + (request.cache_salt or "").encode("utf-8", "surrogatepass"))
        prefix = self._prefixes.get(key)
        if prefix is None:
            self._make_room(len(tokens), now)
            prefix = self._prefixes[key] = _Prefix(tokens, _report(request, tokens), now)
            self._num_tokens += len(tokens)
        prefix.hit(now)

    def hottest(self, max_tokens: int) -> tuple[HotPrefix, ...]:
        """The hottest prefixes of at most `max_tokens` tokens together, hottest first."""
        now, left = self._now(), min(max_tokens, MAX_TOKENS)
        chosen: list[_Prefix] = []
        for prefix in sorted(self._prefixes.values(), key=lambda each: each.value(now), reverse=True):
            if any(_begins(other, prefix) for other in chosen):
                continue
            if len(prefix.tokens) <= left:
                covered = [other for other in chosen if _begins(prefix, other)]
                left += sum(len(other.tokens) for other in covered) - len(prefix.tokens)
                chosen = [other for other in chosen if other not in covered] + [prefix]
        return tuple(prefix.request for prefix in chosen)

    def _make_room(self, num_tokens: int, now: float) -> None:
        """Forget the prefixes of least value until one more fits."""
        while self._prefixes and (
            len(self._prefixes) >= MAX_PREFIXES or self._num_tokens + num_tokens > MAX_TOKENS
        ):
            coldest = min(self._prefixes, key=lambda key: self._prefixes[key].value(now))
            self._num_tokens -= len(self._prefixes.pop(coldest).tokens)


def _begins(longer: _Prefix, shorter: _Prefix) -> bool:
    """Whether `longer` begins with `shorter`, so that computing it computes both."""
    return (
        longer.request.cache_salt == shorter.request.cache_salt
        and len(longer.tokens) >= len(shorter.tokens)
        and longer.tokens[: len(shorter.tokens)] == shorter.tokens
    )


def _report(request: EngineCoreRequest, tokens: array[int]) -> HotPrefix:
    ends = [(end.hash, end.token_end) for end in request.chunk_ends if end.token_end <= len(tokens)]
    return HotPrefix(
        token_ids=pack_u32(tokens),
        cache_salt=request.cache_salt,
        chunk_hashes=pack_u64([each for each, _ in ends]),
        chunk_tokens=pack_u32([each for _, each in ends]),
    )
