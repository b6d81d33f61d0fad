"""Inputs and results of routing policies: requests, candidates, decisions.

Must not know: any one policy.
"""

from __future__ import annotations

import random
from typing import Final, Literal, NamedTuple, Protocol

Reason = Literal["cached", "predicted", "load", "session", "only", "busy"]
"""Value of the response header `x-argosy-route`."""

MIN_HIT_TOKENS: Final = 16
"""One KV block: the engine reuses nothing shorter, and role names alone must not look like a shared prefix."""


class RouteRequest:
    """The part of a request that routing looks at."""

    __slots__ = ("affinity_hash", "hits", "prompt_tokens", "sequence", "session")

    def __init__(
        self, prompt_tokens: int, hits: dict[int, int], affinity_hash: int, sequence: int, session: int = 0
    ) -> None:
        self.prompt_tokens = prompt_tokens
        """An estimate: the router has no tokenizer."""
        self.hits = hits
        """position of a candidate -> prompt tokens expected in its cache; absent means none"""
        self.affinity_hash = affinity_hash
        """Hash of the prompt's beginning; equal for prompts that share it."""
        self.sequence = sequence
        """Number of this request at this router, for policies that take turns."""
        self.session = session
        """Hash of the session that the client declared; zero for none."""


class Candidate:
    """A replica that may be chosen, as far as policies look at it.

    Subclasses keep the figures up to date. Every figure has a value; what is not measured is assumed (`rate_priors`).
    """

    __slots__ = (
        "decode_step_s",
        "identity",
        "kv_usage",
        "max_num_seqs",
        "prefill_tokens_per_s",
        "queued_tokens",
        "recent_work",
        "requests",
        "wait_s",
    )

    def __init__(
        self, name: str, prefill_tokens_per_s: float, decode_step_s: float, max_num_seqs: int
    ) -> None:
        self.identity = name.encode()
        """Its name in bytes, the same at every router."""
        self.queued_tokens = 0
        """Uncached prompt tokens to be computed before those of a new request."""
        self.requests = 0
        """Requests running or waiting."""
        self.kv_usage = 0.0
        """Share of the KV cache taken by running requests, 0..1."""
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.decode_step_s = decode_step_s
        self.max_num_seqs = max_num_seqs
        self.recent_work = 0.0
        """Seconds of prefill it was sent lately, on a scale shared by all candidates: only ratios matter."""
        self.wait_s = 0.0
        """`wait_model.waiting_s` of this candidate, updated when the figures change rather than at each decision."""


class Decision:
    """The chosen candidate, by position, and the reason."""

    __slots__ = ("cost_s", "position", "predicted_tokens", "reason")

    def __init__(self, position: int, reason: Reason, predicted_tokens: int, cost_s: float) -> None:
        self.position = position
        self.reason = reason
        self.predicted_tokens = predicted_tokens
        self.cost_s = cost_s
        """The chosen candidate's cost in seconds; zero for policies that compute none."""


class Choose(Protocol):
    def __call__(self, request: RouteRequest, candidates: list[Candidate], rng: random.Random) -> Decision:
        """Choose a replica. `candidates` has at least one, ordered by name."""
        ...


class Explain(Protocol):
    def __call__(self, request: RouteRequest, candidates: list[Candidate]) -> list[dict[str, float]]:
        """For each candidate, the named figures that the choice depends on."""
        ...


class Policy(NamedTuple):
    """A policy's choice function, and the function that explains its choices."""

    choose: Choose
    terms: Explain


def decide(
    request: RouteRequest, candidates: list[Candidate], position: int, cost_s: float = 0.0
) -> Decision:
    """Build the decision for a position; its reason follows from the predicted hit."""
    hit = request.hits.get(position, 0)
    if len(candidates) == 1:
        return Decision(position, "only", hit, cost_s)
    return Decision(position, "cached" if hit >= MIN_HIT_TOKENS else "load", hit, cost_s)
