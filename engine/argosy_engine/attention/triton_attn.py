"""Backend `triton`: our Triton kernels, on NVIDIA GPUs from compute capability 8.0 on, on CPUs in Triton's interpreter.

Two kernels per layer: `rope_and_cache` between the projection and the cache, then `paged_attention` (a third one merges
the segments of a decode whose keys were split). Latent attention: `latent_rope_and_cache`, the product that brings
queries to the latents, `latent_attention` (and the same merge), and the product that makes values of what comes out;
long prompts are expanded, one by one, and left to torch's kernels.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

import torch

from argosy_engine.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionWeights,
    LatentWeights,
    multiply_heads,
)
from argosy_engine.attention.params import AttentionParams, LatentAttentionParams
from argosy_engine.attention.torch_attn import TorchLatentAttention
from argosy_engine.quantized_rows import Activations, QuantizedRows
from argosy_engine.triton_kernels.latent_attention import latent_attention, latent_rope_and_cache
from argosy_engine.triton_kernels.paged_attention import paged_attention, paged_attention_fp8
from argosy_engine.triton_kernels.rope_and_cache import rope_and_cache


class TritonBackend(AttentionBackend):
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


class TritonAttention:
    """One layer's attention by the Triton kernels."""

    def __init__(self, params: AttentionParams, weights: AttentionWeights) -> None:
        self._params = params
        self._weights = weights
        self._kv_cache: torch.Tensor | None = None
        self._options: dict[str, Any] = {
            "scale": params.scale,
            "sliding_window": params.sliding_window,
            "chunk_size": params.chunk_size,
            "logit_softcap": params.logit_softcap,
            "k_scale": weights.k_scale,
            "v_scale": weights.v_scale,
            "sinks": weights.sinks,
            "alibi_slopes": weights.alibi_slopes,
        }
        """What `paged_attention` is told in every step, keys and values of the cache included."""

    def __call__(self, qkv: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata) -> Activations:
        params, weights = self._params, self._weights
        queries = prepare(qkv, kv_cache, meta, params, weights)
        if kv_cache is not self._kv_cache:
            self._kv_cache, self._options["halves"] = kv_cache, kv_cache.unbind(0)
        options = {
            "query_start_loc": meta.query_start_loc,
            "seq_lens": meta.seq_lens,
            "block_table": meta.block_table,
            "max_query_len": meta.max_query_len,
            "key_ends": meta.key_ends,
            **self._options,
        }
        if weights.output_quantization is None:
            attended = paged_attention(queries, kv_cache, **options)
            return attended.view(qkv.shape[0], params.num_heads * params.head_dim)
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
    size = params.num_heads * params.head_dim
    return qkv[:, :size].view(qkv.shape[0], params.num_heads, params.head_dim)


class TritonLatentAttention:
    """One layer's latent attention by the Triton kernels."""

    def __init__(self, params: LatentAttentionParams, weights: LatentWeights) -> None:
        self._params = params
        self._weights = weights
        self._torch = TorchLatentAttention(params, weights, is_fused=True)

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
        if not params.expands(meta.max_query_len):
            requests = slice(0, len(meta.seq_lens_cpu))
            return self._absorbed(heads, kv_cache, meta, requests, meta.query_start_loc, meta.max_query_len)
        starts, seq_lens = meta.query_start_loc_cpu.tolist(), meta.seq_lens_cpu.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        out = q.new_empty(len(q), params.num_heads * params.v_head_dim)
        for is_expanded, run in groupby(range(len(lengths)), lambda row: params.expands(lengths[row])):
            rows = list(run)
            if is_expanded:
                for row in rows:
                    own = slice(starts[row], starts[row + 1])
                    keys = self._torch.gathered(kv_cache, meta.block_table[row], seq_lens[row])
                    out[own] = self._torch.attend_expanded(*self._parts(heads[own]), keys)
                continue
            requests = slice(rows[0], rows[-1] + 1)
            own = slice(starts[requests.start], starts[requests.stop])
            own_starts = meta.query_start_loc[requests.start : requests.stop + 1] - own.start
            longest = max(lengths[row] for row in rows)
            out[own] = self._absorbed(heads[own], kv_cache, meta, requests, own_starts, longest)
        return out

    def _parts(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nope = self._params.qk_nope_head_dim
        return heads[..., :nope], heads[..., nope:]

    def _absorbed(
        self,
        heads: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: AttentionMetadata,
        requests: slice,
        query_start_loc: torch.Tensor,
        max_query_len: int,
    ) -> torch.Tensor:
        """Return the results of some requests, [T, num_heads * v_head_dim].

        Args:
            heads: their queries, [T, num_heads, qk_head_dim].
            query_start_loc: index of each one's first query in these, and their end.
        """
        q_nope, q_rope = self._parts(heads)
        attended = latent_attention(
            multiply_heads(q_nope, self._weights.key_up),
            q_rope,
            kv_cache,
            query_start_loc=query_start_loc,
            seq_lens=meta.seq_lens[requests],
            block_table=meta.block_table[requests],
            max_query_len=max_query_len,
            scale=self._params.scale,
        )
        return multiply_heads(attended, self._weights.value_up).reshape(len(heads), -1)
