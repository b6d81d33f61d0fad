"""TokenLogprobs: what travels from the sampler to the client. Apart from `logprobs`, because the API process has no
torch."""

from __future__ import annotations

from msgspec import Struct


class TokenLogprobs(Struct, array_like=True, gc=False):
    """One token: itself first, then the best tokens, best first (itself among them, when it is one)."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """1 is the most probable token"""
