"""Embeddings: the vectors of tokens, divided among tensor-parallel ranks by tokens, and the frequencies of the rotary
embedding of positions (arXiv 2104.09864), scaled as `rope_config` describes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from argosy_engine.distributed.parallel_state import Communicator
from argosy_engine.model_configs.rope_config import QueryTemperature, RopeParameters


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


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> torch.Tensor:
    """Return the radians per position of each pair that is rotated, float32 [rotary_dim / 2] on the CPU.

    Raises:
        NotOurs: see `RopeParameters.rotary_dim`.
    """
    rotary_dim = rope.rotary_dim(head_dim)
    if rope.kind != "proportional":
        head_dim = rotary_dim
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / rope.theta**exponents
    if rope.kind in ("linear", "proportional"):
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq)
    if rope.kind == "yarn":
        return _yarn(rope, inv_freq, head_dim)
    return inv_freq


def _llama3(rope: RopeParameters, inv_freq: torch.Tensor) -> torch.Tensor:
    """Apply Llama 3.1's scaling.

    With the trained context length L, frequencies with wavelengths below L / high_freq_factor stay, those with
    wavelengths above L / low_freq_factor are divided by `factor`, and those between are blended linearly; with equal
    factors (Llama 4 Scout) there are none between.
    """
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
    width = rope.high_freq_factor - rope.low_freq_factor
    kept = (
        ((turns - rope.low_freq_factor) / width).clamp(0.0, 1.0) if width else turns >= rope.low_freq_factor
    )
    kept = kept.to(torch.float32)
    return (1 - kept) * inv_freq / rope.factor + kept * inv_freq


def _yarn(rope: RopeParameters, inv_freq: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Apply YaRN's scaling.

    Frequencies that turn more than beta_fast times within the trained context stay, those that turn less than beta_slow
    times are divided by `factor`, and a linear ramp over the dimensions blends those between.
    """

    def dimension(turns: float) -> float:
        context = rope.original_max_position_embeddings
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    index = torch.arange(head_dim // 2, dtype=torch.float32)
    scaled = ((index - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return inv_freq / rope.factor * scaled + inv_freq * (1 - scaled)


def query_scales(temperature: QueryTemperature, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the factors of the queries at positions [T], [T, 1]; 1 within the trained context.

    Args:
        dtype: of the queries; the factors have it, or float32.
    """
    first = 1.0 if temperature.counts_from_one else 0.0
    times = torch.floor((positions.float() + first) / temperature.original_max_position_embeddings)
    factors = (1 + temperature.beta * torch.log1p(times)).unsqueeze(1)
    return factors if temperature.in_float32 else factors.to(dtype)
