"""What policies see and return.

Owns: the vocabulary shared by all policies. Must not know: any one policy.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

Reason = Literal["cached", "predicted", "load", "session", "only"]
"""Value of the response header `x-argosy-route`."""

MIN_HIT_TOKENS = 16
"""One KV block: the engine reuses nothing below it. Role names alone must not look like a shared prefix."""


class RouteRequest(NamedTuple):
    """The part of a request that routing looks at."""

    prompt_tokens: int
    """Estimate: the router has no tokenizer."""
    hits: Mapping[int, int]
    """position of a candidate -> prompt tokens expected in its cache; absent means none"""
    key: int
    """Names the beginning of the prompt; equal for prompts that share it."""
    sequence: int
    """Number of this request at this router, for policies that take turns."""
    session: int = 0
    """Names the session the client declared; zero for none."""


class Candidate(Protocol):
    """A replica that may be chosen. Every figure is known: what is not measured has been assumed (`rates`)."""

    @property
    def identity(self) -> bytes:
        """Its name, the same at every router."""
        ...

    @property
    def queued_tokens(self) -> int:
        """Uncached prompt tokens ahead of a new request."""
        ...

    @property
    def requests(self) -> int:
        """Requests running or waiting."""
        ...

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache taken by running requests, 0..1."""
        ...

    @property
    def prefill_tokens_per_s(self) -> float: ...
    @property
    def decode_step_s(self) -> float: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def recent_work(self) -> float:
        """Seconds of prefill it was sent lately, on a scale that all candidates share: only relations count."""
        ...

    @property
    def wait_s(self) -> float:
        """`waiting.waiting_s` of it, kept up to date where the figures change rather than where they are read."""
        ...


class Decision(NamedTuple):
    """The chosen candidate, by its position, and why."""

    position: int
    reason: Reason
    predicted_tokens: int
    cost_s: float
    """The policy's cost of the choice in seconds; zero for policies without one."""


class Choose(Protocol):
    def __call__(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        """Candidates are at least one, in the order of their names."""
        ...


class Terms(Protocol):
    def __call__(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[dict[str, float]]:
        """For each candidate, the named figures the choice rests on."""
        ...


class Policy(NamedTuple):
    """One way to choose, and its reasons for people."""

    choose: Choose
    terms: Terms


def decide(
    request: RouteRequest, candidates: Sequence[Candidate], position: int, cost_s: float = 0.0
) -> Decision:
    """The decision for a position, with the reason that follows from the predicted hit."""
    hit = request.hits.get(position, 0)
    if len(candidates) == 1:
        return Decision(position, "only", hit, cost_s)
    return Decision(position, "cached" if hit >= MIN_HIT_TOKENS else "load", hit, cost_s)
