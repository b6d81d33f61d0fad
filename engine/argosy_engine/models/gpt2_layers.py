"""Layers of pre-Llama transformers: LayerNorm with bias, multi-head attention without rotary embedding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from argosy_engine.attention.cpu_attn import CpuAttention
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.torch_attn import TorchAttention
from argosy_engine.models.layers import Linear
from argosy_engine.models.weights import Weights

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""Activation functions by the names that transformers' configs use."""


class LayerNorm:
    """(x - mean) / std * weight + bias over the last dimension (arXiv 1607.06450)."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self.weight = weights.take(name + ".weight", size)
        self.bias = weights.take(name + ".bias", size)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class MultiHeadAttention:
    """Multi-head attention for models whose input carries the positions: q and k are not rotated.

    Args:
        qkv: projection of [T, hidden_size] to concatenated q, k and v.
        weights: source of both projections, read here for its dtype and device.
    """

    def __init__(
        self,
        qkv: Linear,
        output: Linear,
        num_heads: int,
        head_dim: int,
        weights: Weights,
        *,
        scale: float | None = None,
    ) -> None:
        self.qkv = qkv
        self.output = output
        self.attention = TorchAttention(num_heads, num_heads, head_dim, scale=scale)
        self.native = CpuAttention.create(
            num_heads, num_heads, head_dim, dtype=weights.dtype, device=weights.device, scale=scale
        )
        self._heads = (3, num_heads, head_dim)

    def __call__(self, x: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Attend from x [T, hidden_size]; the output has the same shape."""
        qkv = self.qkv(x)
        if self.native is not None and self.native.serves(kv_cache):
            return self.output(self.native(qkv, kv_cache, meta))
        q, k, v = qkv.view(-1, *self._heads).unbind(1)
        self.attention.write(kv_cache, k, v, meta)
        return self.output(self.attention(q, kv_cache, meta).reshape(x.shape[0], -1))
