"""Latent attention by our Triton kernels: `latent_rope_and_cache`, the product that brings queries to the latents,
`latent_attention` (and a launch that merges the segments of a decode whose keys were split), and the product that makes
values of what comes out. Long prompts are expanded (`latent`), one by one, and left to torch's kernels.
"""

from __future__ import annotations

from itertools import groupby, pairwise

import torch

from argosy_engine.attention.latent import LatentWeights, multiply_heads
from argosy_engine.attention.latent_torch import TorchLatentAttention
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.params import LatentAttentionParams
from argosy_engine.triton_kernels.latent_attention import latent_attention
from argosy_engine.triton_kernels.latent_rope_and_cache import latent_rope_and_cache


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
