"""Backend `triton`: our Triton kernels, on NVIDIA GPUs from compute capability 8.0 on, on CPUs in Triton's interpreter.

Two kernels per layer: `rope_and_cache` between the projection and the cache, then `paged_attention` (a third one merges
the segments of a decode whose keys were split).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from argosy_engine.attention.backend import AttentionWeights, DecoderParts
from argosy_engine.attention.latent import LatentWeights
from argosy_engine.attention.latent_triton import TritonLatentAttention
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.params import AttentionParams, LatentAttentionParams
from argosy_engine.quantized_rows import Activations, QuantizedRows
from argosy_engine.triton_kernels.paged_attention import paged_attention, paged_attention_fp8
from argosy_engine.triton_kernels.rope_and_cache import rope_and_cache


class TritonBackend:
    """Attention by the Triton kernels."""

    uses_triton = True

    def __init__(self, dtype: torch.dtype, *, has_fp8_kv_cache: bool = False) -> None:
        self.kv_cache_dtype = torch.float8_e4m3fn if has_fp8_kv_cache else dtype

    def attention(self, params: AttentionParams, weights: AttentionWeights) -> TritonAttention:
        return TritonAttention(params, weights)

    def latent_attention(
        self, params: LatentAttentionParams, weights: LatentWeights
    ) -> TritonLatentAttention:
        return TritonLatentAttention(params, weights)

    def fuse_decoder(self, layers: Sequence[DecoderParts]) -> None:
        return None


class TritonAttention:
    """One layer's attention by the Triton kernels."""

    def __init__(self, params: AttentionParams, weights: AttentionWeights) -> None:
        self._params = params
        self._weights = weights

    def __call__(self, qkv: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata) -> Activations:
        params, weights = self._params, self._weights
        queries = prepare(qkv, kv_cache, meta, params, weights)
        options: dict[str, Any] = {
            "query_start_loc": meta.query_start_loc,
            "seq_lens": meta.seq_lens,
            "block_table": meta.block_table,
            "max_query_len": meta.max_query_len,
            "scale": params.scale,
            "sliding_window": params.sliding_window,
            "chunk_size": params.chunk_size,
            "logit_softcap": params.logit_softcap,
            "k_scale": weights.k_scale,
            "v_scale": weights.v_scale,
            "sinks": weights.sinks,
        }
        if weights.output_quantization is None:
            return paged_attention(queries, kv_cache, **options).view(len(qkv), -1)
        out_scale = weights.output_quantization.scale
        attended, scales = paged_attention_fp8(queries, kv_cache, out_scale=out_scale, **options)
        attended = attended.view(len(qkv), -1)
        return attended if scales is None else QuantizedRows(attended, scales)


def prepare(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    params: AttentionParams,
    weights: AttentionWeights,
) -> torch.Tensor:
    """Norm and rotate q and k, write keys and values to the cache; return the queries [T, num_heads, head_dim]."""
    rope_and_cache(
        qkv,
        meta.positions,
        weights.rotary.cosines if weights.rotary else None,
        weights.rotary.sines if weights.rotary else None,
        meta.slot_mapping,
        kv_cache,
        num_heads=params.num_heads,
        q_norm=weights.q_norm,
        k_norm=weights.k_norm,
        eps=weights.eps,
        k_scale=weights.k_scale,
        v_scale=weights.v_scale,
    )
    return qkv[:, : params.num_heads * params.head_dim].view(-1, params.num_heads, params.head_dim)
