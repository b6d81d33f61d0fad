"""TokenLogprobs: what travels from the sampler to the client. Apart from `logprobs`, because the API process has no
torch."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
"""raw: of the model; processed: of what the token is drawn from, after grammar, penalties, temperature and cuts."""


class TokenLogprobs(Struct, array_like=True, gc=False):
    """One token: itself first, then the best tokens, best first (itself among them, when it is one)."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """1 is the most probable token"""
