"""What policies see and return.

Owns: the vocabulary shared by all policies. Must not know: any one policy.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

Reason = Literal["cached", "predicted", "load", "session", "only"]
"""Value of the response header `x-argosy-route`."""


class RouteRequest(NamedTuple):
    """The part of a request that routing looks at."""

    prompt_tokens: int
    """Estimate: the router has no tokenizer."""
    hits: Mapping[int, int]
    """slot -> prompt tokens expected in that replica's cache; absent means none"""
    key: int
    """Names the beginning of the prompt; equal for prompts that share it."""
    sequence: int
    """Number of this request at this router, for policies that take turns."""


class Candidate(Protocol):
    """A replica that may be chosen."""

    @property
    def name(self) -> str: ...
    @property
    def slot(self) -> int: ...
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
    def prefill_tokens_per_s(self) -> float:
        """0: not measured yet"""
        ...

    @property
    def decode_step_s(self) -> float:
        """0: not measured yet"""
        ...

    @property
    def max_num_seqs(self) -> int:
        """0: unknown"""
        ...


class Decision(NamedTuple):
    """The chosen candidate, by its position, and why."""

    position: int
    reason: Reason
    predicted_tokens: int
    cost_s: float
    """Predicted seconds until the first token, as far as the policy predicts them."""


class Policy(Protocol):
    def __call__(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision: ...
