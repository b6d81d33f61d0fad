"""Load of requests with shared prefixes: each prompt is one of a few prefixes, followed by a question of its own.

Owns prompts, arrivals, and the share that an ideal cache could hold. Must not know servers. Invariant: equal arguments
make equal loads, so that all contenders get the same requests at the same times.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from prompts import as_trace

from argosy_protocol.chunk_hash import CHUNK_BYTES
from argosy_router.simulation import oracle_tokens

_ALPHABET = "abcdefghij"
_WORD_LETTERS = 5


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, `at_s` seconds after the load began."""

    at_s: float
    prompt: str


class SharedPrefixes:
    """Makes prompts over `groups` equally popular prefixes. Prefixes end at a chunk boundary, so that no chunk contains
    both prefix and question."""

    def __init__(self, seed: str, groups: int, prefix_bytes: int, question_bytes: int) -> None:
        self._rng = random.Random(seed)
        length = max(1, round(prefix_bytes / CHUNK_BYTES)) * CHUNK_BYTES
        self._prefixes = [text(self._rng, length) for _ in range(groups)]
        self._question_bytes = question_bytes

    def warm_up(self, times: int = 2) -> list[str]:
        """Return `times` prompts for every prefix, the prefixes in turn."""
        return [self._ask(prefix) for _ in range(times) for prefix in self._prefixes]

    def poisson(self, rate_per_s: float, seconds: float) -> list[Arrival]:
        """Return the arrivals of a Poisson process within `seconds`."""
        arrivals = []
        at = self._rng.expovariate(rate_per_s)
        while at < seconds:
            arrivals.append(Arrival(at, self._ask(self._rng.choice(self._prefixes))))
            at += self._rng.expovariate(rate_per_s)
        return arrivals

    def _ask(self, prefix: str) -> str:
        return prefix + text(self._rng, self._question_bytes)


def text(rng: random.Random, length: int) -> str:
    """Return random words, `length` bytes in total."""
    words = (
        "".join(rng.choices(_ALPHABET, k=_WORD_LETTERS)) for _ in range(length // (_WORD_LETTERS + 1) + 1)
    )
    return " ".join(words)[:length]


def oracle_share(before: Sequence[str], prompts: Sequence[str]) -> float:
    """Return the share of the tokens of `prompts` that a single unbounded cache of chunks would hold, if `before` was
    sent first."""
    earlier = [as_trace(prompt, 0) for prompt in before]
    later = [as_trace(prompt, 0) for prompt in prompts]
    held = oracle_tokens([*earlier, *later]) - oracle_tokens(earlier)
    return held / sum(request.input_tokens for request in later)
