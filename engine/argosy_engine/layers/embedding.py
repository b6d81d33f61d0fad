"""Embedding: a vector per token, divided among tensor-parallel ranks by tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from argosy_engine.distributed.communicator import Communicator


class Embedding:
    """Looks up weight [vocab_size, width]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return vectors [T, width] of token_ids [T]."""
        return F.embedding(token_ids, self.weight)


class VocabParallelEmbedding(Embedding):
    """The vectors of some of the tokens; those of the others come from their ranks.

    Args:
        weight: [len(tokens), width].
        tokens: those of this rank.
    """

    def __init__(self, weight: torch.Tensor, tokens: range, communicator: Communicator) -> None:
        super().__init__(weight)
        self._tokens = tokens
        self._communicator = communicator

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        is_other = (token_ids < self._tokens.start) | (token_ids >= self._tokens.stop)
        rows = (token_ids - self._tokens.start).masked_fill_(is_other, 0)
        vectors = F.embedding(rows, self.weight).masked_fill_(is_other.unsqueeze(1), 0.0)
        return self._communicator.all_reduce(vectors)
