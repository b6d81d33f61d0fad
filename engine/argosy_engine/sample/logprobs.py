"""Log probabilities of sampled and prompt tokens and of their best alternatives, and the tokens' ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from argosy_engine.sample.token_logprobs import LogprobsMode, TokenLogprobs

_MAX_LOGITS_BYTES = 64 << 20
"""Bytes of logits computed at a time for prompt positions: a long prompt's logits can take gigabytes."""


def score(logits: torch.Tensor, mode: LogprobsMode) -> torch.Tensor:
    """Return the scores to report for logits [N, vocab_size], in float32: the logits or their log probabilities."""
    return logits.float() if mode.endswith("logits") else logits.float().log_softmax(-1)


class LogprobsTensors(NamedTuple):
    """Scores of N tokens with k alternatives each."""

    token_ids: torch.Tensor
    """int64 [N, 1 + k]"""
    logprobs: torch.Tensor
    """float32 [N, 1 + k]"""
    ranks: torch.Tensor
    """int64 [N]"""

    def tolists(self, counts: list[int]) -> list[TokenLogprobs]:
        """Return one entry per token, with `counts` alternatives each. Waits for the device."""
        ids, values, ranks = self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist()
        return [
            TokenLogprobs(ids[row][: count + 1], values[row][: count + 1], ranks[row])
            for row, count in enumerate(counts)
        ]


def gather_logprobs(logprobs: torch.Tensor, token_ids: torch.Tensor, count: int) -> LogprobsTensors:
    """Gather the scores of the tokens [N] and of the `count` best tokens from float32 scores [N, vocab_size]."""
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
    """Compute the log probabilities of prompt tokens.

    Args:
        hidden: [N, hidden_size], the hidden states at the positions before the tokens.
        token_ids: int64 [N].
        count: alternatives per token.
        mode: `processed` is the same as `raw` here, because a prompt's logits are not processed.
    """
    size = max(_MAX_LOGITS_BYTES // (4 * vocab_size), 1)
    scored: list[TokenLogprobs] = []
    for part, tokens in zip(hidden.split(size), token_ids.split(size), strict=True):
        scores = score(compute_logits(part), mode)
        scored += gather_logprobs(scores, tokens, count).tolists([count] * len(tokens))
    return scored
