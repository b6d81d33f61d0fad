"""Log probabilities: of sampled and prompt tokens, of the best alternatives, and the token's rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from argosy_engine.sample.token_logprobs import LogprobsMode, TokenLogprobs

_MAX_LOGITS_BYTES = 64 << 20
"""Prompt positions are scored so many bytes of logits at a time: a prompt times a vocabulary can be gigabytes."""


def score(logits: torch.Tensor, mode: LogprobsMode) -> torch.Tensor:
    """What is reported of logits [N, vocab_size], as float32: themselves or their log probabilities."""
    return logits.float() if mode.endswith("logits") else logits.float().log_softmax(-1)


class LogprobsTensors(NamedTuple):
    """For N tokens and k alternatives."""

    token_ids: torch.Tensor
    """int64 [N, 1 + k]"""
    logprobs: torch.Tensor
    """float32 [N, 1 + k]"""
    ranks: torch.Tensor
    """int64 [N]"""

    def tolists(self, counts: list[int]) -> list[TokenLogprobs]:
        """One entry per token, with so many alternatives each. Waits for the device."""
        ids, values, ranks = self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist()
        return [
            TokenLogprobs(ids[row][: count + 1], values[row][: count + 1], ranks[row])
            for row, count in enumerate(counts)
        ]


def gather_logprobs(logprobs: torch.Tensor, token_ids: torch.Tensor, count: int) -> LogprobsTensors:
    """Picks the tokens [N] and the `count` best ones from scores float32 [N, vocab_size]."""
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(1) + 1
    best = torch.topk(logprobs, min(count, logprobs.shape[1]), dim=1)
    return LogprobsTensors(
        torch.cat([token_ids.unsqueeze(1), best.indices], 1), torch.cat([chosen, best.values], 1), ranks
    )


def score_prompt(
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    count: int,
    vocab_size: int,
    mode: LogprobsMode,
) -> list[TokenLogprobs]:
    """Log probabilities of prompt tokens.

    Args:
        hidden: [N, hidden_size] of the positions before the tokens.
        token_ids: int64 [N].
        count: alternatives per token.
        mode: nothing processes the logits of a prompt, so `processed` is the same as `raw`.
    """
    size = max(_MAX_LOGITS_BYTES // (4 * vocab_size), 1)
    scored: list[TokenLogprobs] = []
    for part, tokens in zip(hidden.split(size), token_ids.split(size), strict=True):
        scores = score(compute_logits(part), mode)
        scored += gather_logprobs(scores, tokens, count).tolists([count] * len(tokens))
    return scored
