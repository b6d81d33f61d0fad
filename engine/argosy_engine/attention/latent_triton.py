"""Latent attention by our Triton kernels, absorbed: `latent_rope_and_cache`, the product that brings the queries to the
latents, `latent_attention` (and a launch that merges the segments of a decode whose keys were split), and the product
that makes values of what comes out."""

from __future__ import annotations

import torch

from argosy_engine.attention.latent import LatentWeights, multiply_heads
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.params import LatentAttentionParams
from argosy_engine.triton_kernels.latent_attention import latent_attention
from argosy_engine.triton_kernels.latent_rope_and_cache import latent_rope_and_cache


class TritonLatentAttention:
    """One layer's latent attention by the Triton kernels."""

    def __init__(self, params: LatentAttentionParams, weights: LatentWeights) -> None:
        self._params = params
        self._weights = weights

    def __call__(
        self, q: torch.Tensor, compressed: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        params, weights = self._params, self._weights
        heads = q.view(len(q), params.num_heads, params.qk_head_dim)
        latent_rope_and_cache(
            heads,
            compressed,
            meta.positions,
            weights.rotary.cosines,
            weights.rotary.sines,
            meta.slot_mapping,
            kv_cache,
            norm=weights.norm,
            eps=weights.eps,
        )
        attended = latent_attention(
            multiply_heads(heads[..., : params.qk_nope_head_dim], weights.key_up),
            heads[..., params.qk_nope_head_dim :],
            kv_cache,
            query_start_loc=meta.query_start_loc,
            seq_lens=meta.seq_lens,
            block_table=meta.block_table,
            max_query_len=meta.max_query_len,
            scale=params.scale,
        )
        return multiply_heads(attended, weights.value_up).reshape(len(q), -1)
