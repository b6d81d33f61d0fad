"""Latent attention in plain torch, on any device: the reference for kernels, and what serves on CPUs.

Decodes run absorbed in padded batches grouped by length, prompts one by one, absorbed or expanded, whichever takes
fewer operations. Expanded keys and values are made for as many heads at a time as `WORKSPACE_BYTES` hold.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from argosy_engine.attention import WORKSPACE_BYTES
from argosy_engine.attention.decode_batches import DecodeBatch, decode_batches
from argosy_engine.attention.latent import LatentWeights, multiply_heads
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.params import LatentAttentionParams
from argosy_engine.attention.torch_rms_norm import rms_norm

_QUERIES = 128
"""Queries whose scores a CPU computes at a time."""


class TorchLatentAttention:
    """One layer's latent attention in plain torch.

    Args:
        workspace_bytes: limit on what is gathered, expanded or scored at a time; exceeded only where one request's
            latents, one head or one query takes more.
        is_fused: whether expanded prompts use torch's fused attention, as on GPUs.
    """

    def __init__(
        self,
        params: LatentAttentionParams,
        weights: LatentWeights,
        workspace_bytes: int = WORKSPACE_BYTES,
        *,
        is_fused: bool = False,
    ) -> None:
        self._params = params
        self._weights = weights
        self._workspace_bytes = workspace_bytes
        self._is_fused = is_fused

    def __call__(
        self, q: torch.Tensor, compressed: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        params = self._params
        q_nope, q_rope = q.view(len(q), params.num_heads, -1).split(
            [params.qk_nope_head_dim, params.qk_rope_head_dim], dim=2
        )
        latent, k_rope = compressed.split([params.kv_lora_rank, params.qk_rope_head_dim], dim=1)
        latent = rms_norm(latent, self._weights.norm, self._weights.eps)
        q_rope, k_rope = self._rotated(q_rope, meta), self._rotated(k_rope.unsqueeze(1), meta).squeeze(1)
        cached = torch.cat((latent, k_rope), dim=1)
        kv_cache.view(-1, params.cached_dim).index_copy_(0, meta.slot_mapping, cached)
        out = q.new_empty(len(q), params.num_heads * params.v_head_dim)
        if count := meta.num_decodes:
            self._decode(q_nope[:count], q_rope[:count], kv_cache, meta, out[:count])
        starts, seq_lens = meta.query_start_loc_cpu.tolist(), meta.seq_lens_cpu.tolist()
        for row in range(meta.num_decodes, len(seq_lens)):
            new = slice(starts[row], starts[row + 1])
            keys = self.gathered(kv_cache, meta.block_table[row], seq_lens[row])
            attend = self.attend_expanded if params.expands(new.stop - new.start) else self.attend_absorbed
            out[new] = attend(q_nope[new], q_rope[new], keys)
        return out

    def _rotated(self, x: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Rotate x [T, heads, qk_rope_head_dim]."""
        rotary = self._weights.rotary
        selected = meta.shared.get(rotary)
        if selected is None:
            selected = meta.shared[rotary] = rotary.select(meta.positions)
        return rotary.apply(x, *selected)

    def _absorbed(self, q_nope: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
        """Return queries of what the cache keeps, [T, num_heads, cached_dim]."""
        return torch.cat((multiply_heads(q_nope, self._weights.key_up), q_rope), dim=2)

    def gathered(self, kv_cache: torch.Tensor, table: torch.Tensor, seq_len: int) -> torch.Tensor:
        """Return what the cache keeps of a request's tokens, [seq_len, cached_dim]."""
        blocks = table[: -(-seq_len // kv_cache.shape[1])]
        return kv_cache.index_select(0, blocks).view(-1, self._params.cached_dim)[:seq_len]

    def _decode(
        self,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """Attend from one query of each of the first requests; out is [decodes, num_heads * v_head_dim]."""
        queries = self._absorbed(q_nope, q_rope)
        attended = q_nope.new_empty(*queries.shape[:2], self._params.kv_lora_rank)
        token_bytes = self._params.cached_dim * kv_cache.itemsize
        for batch in decode_batches(meta, token_bytes, self._workspace_bytes):
            attended[batch.rows] = self._decode_rows(queries[batch.rows], kv_cache, meta, batch)
        out.view(len(out), self._params.num_heads, -1).copy_(multiply_heads(attended, self._weights.value_up))

    def _decode_rows(
        self,
        queries: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: AttentionMetadata,
        batch: DecodeBatch,
    ) -> torch.Tensor:
        num_blocks = -(-batch.longest // kv_cache.shape[1])
        tables = meta.block_table[batch.rows, :num_blocks].reshape(-1)
        keys = kv_cache.index_select(0, tables).view(len(queries), -1, self._params.cached_dim)
        ends = torch.arange(batch.shortest, keys.shape[1], device=keys.device)
        hidden = ends >= meta.seq_lens[batch.rows].unsqueeze(1)
        # Hidden positions may hold stale values, and a probability of zero times NaN is NaN.
        keys[:, batch.shortest :].masked_fill_(hidden.unsqueeze(2), 0.0)
        scores = torch.bmm(queries, keys.transpose(1, 2)).float() * self._params.scale
        scores[:, :, batch.shortest :].masked_fill_(hidden.unsqueeze(1), float("-inf"))
        probs = torch.softmax(scores, dim=-1)
        return torch.bmm(probs.to(queries.dtype), keys[:, :, : self._params.kv_lora_rank])

    def attend_absorbed(self, q_nope: torch.Tensor, q_rope: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Attend from the last queries to all keys [seq_len, cached_dim]; returns [new, num_heads * v_head_dim]."""
        params = self._params
        queries = self._absorbed(q_nope, q_rope)
        size = max(self._workspace_bytes // (4 * params.num_heads * len(keys)), 1)
        parts, end = [], len(keys) - len(queries)
        for part in queries.split(size):
            end += len(part)
            seen = keys[:end]
            scores = torch.matmul(part, seen.t()).float() * params.scale
            future = torch.ones(len(part), end, dtype=torch.bool, device=keys.device).triu(
                end - len(part) + 1
            )
            probs = torch.softmax(scores.masked_fill_(future.unsqueeze(1), float("-inf")), dim=-1)
            parts.append(torch.matmul(probs.to(keys.dtype), seen[:, : params.kv_lora_rank]))
        return multiply_heads(torch.cat(parts), self._weights.value_up).flatten(1)

    def attend_expanded(self, q_nope: torch.Tensor, q_rope: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Attend by keys and values of each head; see `attend_absorbed`."""
        params = self._params
        num_new, seq_len = len(q_nope), len(keys)
        latent, k_rope = keys.split([params.kv_lora_rank, params.qk_rope_head_dim], dim=1)
        out = q_nope.new_empty(num_new, params.num_heads, params.v_head_dim)
        head_bytes = seq_len * (params.expanded_dim * keys.itemsize + 4 * min(num_new, _QUERIES))
        num_heads = max(self._workspace_bytes // head_bytes, 1)
        for start in range(0, params.num_heads, num_heads):
            heads = slice(start, start + num_heads)
            key_up, value_up = self._weights.key_up[heads], self._weights.value_up[heads]
            k_nope = torch.matmul(latent, key_up)
            k = torch.cat((k_nope, k_rope.expand(len(key_up), -1, -1)), dim=2)
            v = torch.matmul(latent, value_up.flatten(0, 1).t()).view(seq_len, len(value_up), -1)
            q = torch.cat((q_nope[:, heads], q_rope[:, heads]), dim=2)
            attend = self._attend_fused if self._is_fused else self._attend_by_scores
            out[:, heads] = attend(q.transpose(0, 1), k, v.transpose(0, 1)).transpose(0, 1)
        return out.view(num_new, -1)

    def _attend_by_scores(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend from the last queries [heads, new, qk_head_dim] to k [heads, seq_len, qk_head_dim] and v
        [heads, seq_len, v_head_dim]; returns [heads, new, v_head_dim].

        A few queries at a time, against the keys up to the last of them: two products and a softmax take a CPU half as
        long as torch's fused kernel where there is context, and no longer without.
        """
        parts, end = [], k.shape[1] - q.shape[1]
        for part in q.split(_QUERIES, dim=1):
            start, end = end, end + part.shape[1]
            scores = torch.bmm(part, k[:, :end].transpose(1, 2)).float().mul_(self._params.scale)
            future = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).triu(1)
            scores[:, :, start:].masked_fill_(future, float("-inf"))
            parts.append(torch.bmm(torch.softmax(scores, dim=-1).to(v.dtype), v[:, :end]))
        return torch.cat(parts, dim=1)

    def _attend_fused(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Do the same by torch's fused kernels."""
        num_new, seq_len, width = q.shape[1], k.shape[1], v.shape[2]
        # They take keys and values of one size only.
        size = max(k.shape[2], width)
        q, k, v = (F.pad(each, (0, size - each.shape[2])).unsqueeze(0) for each in (q, k, v))
        attend, scale = F.scaled_dot_product_attention, self._params.scale
        if num_new == seq_len:
            return attend(q, k, v, is_causal=True, scale=scale).squeeze(0)[..., :width]
        # Masks take memory: a few queries at a time.
        parts, end = [], seq_len - num_new
        for part in q.split(max(self._workspace_bytes // (4 * seq_len), 1), dim=2):
            start, end = end, end + part.shape[2]
            visible = torch.ones(end - start, end, dtype=torch.bool, device=q.device).tril(start)
            parts.append(attend(part, k[:, :, :end], v[:, :, :end], attn_mask=visible, scale=scale))
        return torch.cat(parts, dim=2).squeeze(0)[..., :width]
