"""TokenLogprobs: log probabilities as the sampler sends them to the client. Separate from `sampler`, because the API
process does not import torch."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
"""raw: the model's values; processed: the values that the token is drawn from, after grammar mask, logits processors,
temperature, min_p, top-k and top-p."""


class TokenLogprobs(Struct, array_like=True, gc=False):
    """Scores of one position: the token itself, then the best tokens in descending order, which may include it."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the token itself; 1 is the most probable."""
