"""Attention: one layer's attention, the same module in every model. It knows its constants and its KV cache; a backend
computes."""

from __future__ import annotations

import torch

from argosy_engine.attention.backend import AttentionBackend, AttentionWeights
from argosy_engine.attention.kv_cache_spec import KVCacheSpec
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.params import AttentionParams
from argosy_engine.quantized_rows import Activations


class Attention:
    """Norm of q and k heads, rotary embedding, KV cache write and attention of one layer."""

    def __init__(
        self,
        params: AttentionParams,
        backend: AttentionBackend,
        weights: AttentionWeights = AttentionWeights(),  # noqa: B008 (immutable)
    ) -> None:
        self.params = params
        self.kv_cache_dtype = backend.kv_cache_dtype
        self.impl = backend.attention(params, weights)
        self.kv_cache: torch.Tensor
        """[2, num_blocks, block_size, num_kv_heads, head_dim], once it is bound."""
        self.group = 0
        """Index of its KV cache group."""

    def bind(self, kv_cache: torch.Tensor, group: int = 0) -> None:
        """Let the layer keep keys and values in this cache, whose slots are those of this KV cache group."""
        self.kv_cache, self.group = kv_cache, group

    def __call__(self, qkv: torch.Tensor, meta: AttentionMetadata) -> Activations:
        """Write keys and values to the cache and compute attention, [T, num_heads * head_dim].

        The result may be quantised, if the output projection wants it so.

        Args:
            qkv: [T, (num_heads + 2 num_kv_heads) * head_dim], contiguous; may be changed in place.
            meta: of the step.
        """
        return self.impl(qkv, self.kv_cache, meta.of_group(self.group))

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """Return what the layer keeps in a block of `block_size` tokens."""
        return self.params.kv_cache_spec(block_size, self.kv_cache_dtype.itemsize)

    def kv_cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Return the shape of the layer's KV cache, [2, num_blocks, block_size, num_kv_heads, head_dim]."""
        return 2, num_blocks, block_size, self.params.num_kv_heads, self.params.head_dim
