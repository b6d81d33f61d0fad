"""Layers of pre-Llama transformers: LayerNorm, multi-head attention without rotary embedding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from argosy_engine.attention.layer import Attention
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.linear import Linear

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""Activation functions by the names that transformers' configs use."""


class LayerNorm:
    """(x - mean) / std * weight + bias over the last dimension (arXiv 1607.06450).

    Args:
        has_bias: whether anything is added.
    """

    def __init__(
        self, factory: LayerFactory, name: str, size: int, eps: float, *, has_bias: bool = True
    ) -> None:
        self.weight = factory.take(name + ".weight", size)
        self.bias = factory.take(name + ".bias", size) if has_bias else None
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class MultiHeadAttention:
    """Multi-head attention for models whose input carries the positions: q and k are not rotated.

    Args:
        qkv: projection of [T, hidden_size] to concatenated q, k and v.
    """

    def __init__(self, qkv: Linear, output: Linear, attention: Attention) -> None:
        self.qkv = qkv
        self.output = output
        self.attention = attention

    def __call__(self, x: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Attend from x [T, hidden_size]; the output has the same shape."""
        return self.of_projected(self.qkv(x), meta)

    def of_projected(self, qkv: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """The same from the projections to q, k and v."""
        return self.output(self.attention(qkv, meta))
