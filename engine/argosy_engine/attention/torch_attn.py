"""Backend `torch`: paged attention in plain torch, portable and the reference for all kernels, and latent attention,
also for CPUs.

Decodes run as padded batches grouped by length, so that one long request does not slow down the others; prompts run one
by one over their gathered blocks, latent ones absorbed or expanded, whichever takes fewer operations. What is gathered,
expanded or scored at a time stays within `WORKSPACE_BYTES`. The cache is `[2, num_blocks, block_size, num_kv_heads,
head_dim]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from argosy_engine.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionWeights,
    LatentWeights,
    RotaryEmbedding,
    multiply_heads,
    rms_norm,
)
from argosy_engine.attention.params import WORKSPACE_BYTES, AttentionParams, LatentAttentionParams


class TorchBackend(AttentionBackend):
    """Attention in plain torch, on any device and in any dtype."""

    def __init__(self, dtype: torch.dtype, *, has_fp8_kv_cache: bool = False) -> None:
        self.kv_cache_dtype = torch.float8_e4m3fn if has_fp8_kv_cache else dtype

    def attention(self, params: AttentionParams, weights: AttentionWeights) -> TorchAttention:
        return TorchAttention(params, weights)

    def latent_attention(self, params: LatentAttentionParams, weights: LatentWeights) -> TorchLatentAttention:
        return TorchLatentAttention(params, weights)


class TorchAttention:
    """One layer's attention in plain torch."""

    def __init__(self, params: AttentionParams, weights: AttentionWeights) -> None:
        self.num_heads, self.num_kv_heads = params.num_heads, params.num_kv_heads
        self.head_dim = params.head_dim
        self.scale = params.scale
        self.sliding_window = params.sliding_window
        self.logit_softcap = params.logit_softcap
        self.chunk_size = params.chunk_size
        self._first_read = params.kv_cache_spec(block_size=1, itemsize=1).first_read
        self._sinks = weights.sinks
        self._slopes = weights.alibi_slopes
        self._split = [params.num_heads, params.num_kv_heads, params.num_kv_heads]
        self._weights = weights

    def __call__(self, qkv: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        q, k, v = qkv.view(len(qkv), -1, self.head_dim).split(self._split, dim=1)
        weights = self._weights
        if weights.q_norm is not None:
            q = rms_norm(q, weights.q_norm, weights.eps)
        if weights.k_norm is not None:
            k = rms_norm(k, weights.k_norm, weights.eps)
        if weights.rotary is not None:
            q, k = self._rotate(weights.rotary, q, k, meta)
        _write(kv_cache[0], meta.slot_mapping, k, weights.k_scale)
        _write(kv_cache[1], meta.slot_mapping, v, weights.v_scale)
        return self._attend_all(q.contiguous(), kv_cache, meta).view(len(qkv), -1)

    @staticmethod
    def _rotate(
        rotary: RotaryEmbedding, q: torch.Tensor, k: torch.Tensor, meta: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        selected = meta.shared.get(rotary)
        if selected is None:
            selected = meta.shared[rotary] = rotary.select(meta.positions)
        return rotary.apply(q, *selected), rotary.apply(k, *selected)

    def _attend_all(self, q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Compute causal attention of q [T, num_heads, head_dim] over the cache; the result has q's shape."""
        out = torch.empty_like(q)
        if meta.num_decodes:
            self._decode(q[: meta.num_decodes], kv_cache, meta, out[: meta.num_decodes])
        starts, seq_lens = meta.query_start_loc_cpu.tolist(), meta.seq_lens_cpu.tolist()
        for row in range(meta.num_decodes, len(seq_lens)):
            prompt = slice(starts[row], starts[row + 1])
            ends = None if meta.key_ends is None else meta.key_ends[prompt]
            out[prompt] = self._prefill(q[prompt], kv_cache, meta.block_table[row], seq_lens[row], ends)
        return out

    def _decode(
        self, q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, out: torch.Tensor
    ) -> None:
        # FP8 is widened to float32 on its way to the activations' dtype.
        itemsize = kv_cache.itemsize if self._weights.k_scale is None else 4
        for batch in decode_batches(meta, 2 * self.num_kv_heads * self.head_dim * itemsize):
            out[batch.rows] = self._decode_rows(q[batch.rows], kv_cache, meta, batch.rows, batch.longest)

    def _decode_rows(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: AttentionMetadata,
        rows: torch.Tensor | slice,
        longest: int,
    ) -> torch.Tensor:
        block_size = kv_cache.shape[2]
        num_blocks = -(-longest // block_size)
        batch, groups = q.shape[0], self.num_heads // self.num_kv_heads
        tables = meta.block_table[rows, :num_blocks].reshape(-1)
        shape = (batch, num_blocks * block_size, self.num_kv_heads, self.head_dim)
        positions = torch.arange(shape[1], device=q.device)
        seq_lens = meta.seq_lens[rows].unsqueeze(1)
        hidden = positions >= seq_lens
        if self.sliding_window is not None:
            hidden |= positions < seq_lens - self.sliding_window
        if self.chunk_size is not None:
            hidden |= positions < (seq_lens - 1) // self.chunk_size * self.chunk_size
        k = _read(kv_cache[0], tables, self._weights.k_scale, q.dtype).view(shape).permute(0, 2, 3, 1)
        # Hidden positions may hold stale values, and a probability of zero times NaN is NaN.
        v = _read(kv_cache[1], tables, self._weights.v_scale, q.dtype).view(shape)
        v = v.masked_fill_(hidden[:, :, None, None], 0.0)
        # matmul + softmax, not SDPA: with one query per row it is about twice as fast on a CPU.
        scores = torch.matmul(q.view(batch, self.num_kv_heads, groups, self.head_dim), k).float() * self.scale
        scores = self._cap(scores).masked_fill_(hidden[:, None, None, :], float("-inf"))
        scores = scores.view(batch, self.num_heads, 1, -1)
        if self._slopes is not None:
            scores += self._slopes[:, None, None] * (positions - seq_lens + 1)[:, None, None, :]
        probs = self._probabilities(scores).to(q.dtype).view(batch, self.num_kv_heads, groups, -1)
        return torch.matmul(probs, v.permute(0, 2, 1, 3)).view(batch, self.num_heads, self.head_dim)

    def _prefill(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        table: torch.Tensor,
        seq_len: int,
        key_ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        block_size, num_new = kv_cache.shape[2], len(q)
        # Gather only tokens inside window or chunk: blocks that left it may belong to other requests by now.
        first = self._first_read(seq_len - num_new)
        first_block = first // block_size
        blocks = table[first_block : -(-seq_len // block_size)]
        shape = (-1, self.num_kv_heads, self.head_dim)
        seen = slice(first - first_block * block_size, seq_len - first_block * block_size)
        k = _read(kv_cache[0], blocks, self._weights.k_scale, q.dtype).view(shape)[seen].transpose(0, 1)
        v = _read(kv_cache[1], blocks, self._weights.v_scale, q.dtype).view(shape)[seen].transpose(0, 1)
        num_seen = seq_len - first
        if key_ends is None and not self._needs_scores and self._sees_all_before(num_new, num_seen):
            return self._attend(q, k, v)
        # The scores are materialised here, so run a few queries at a time, against the keys up to the last of them.
        size = max(WORKSPACE_BYTES // (4 * self.num_heads * num_seen), 1)
        parts, end = [], num_seen - num_new
        for part in q.split(size):
            end += len(part)
            seen_end, mask = end, None
            if key_ends is not None:
                new_end = end - (num_seen - num_new)
                mask = self._visible_to(key_ends[new_end - len(part) : new_end] - first, end, first)
                seen_end = mask.shape[1]
            parts.append(self._attend(part, k[:, :seen_end], v[:, :seen_end], first, mask))
        return torch.cat(parts)

    @property
    def _needs_scores(self) -> bool:
        """Whether SDPA, which does not tell the scores, cannot compute it."""
        return self.logit_softcap is not None or self._sinks is not None or self._slopes is not None

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        first: int = 0,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from the last queries [new, num_heads, head_dim] to k and v [num_kv_heads, seq_len, head_dim].

        Args:
            first: position of the first key.
            mask: bool [new, seq_len], which keys each query attends to; default: `_visible`.
        """
        q = q.transpose(0, 1)
        if self._needs_scores:
            return self._attend_by_scores(q, k, v, first, mask).transpose(0, 1)
        if mask is None:
            mask = self._visible(q.shape[1], k.shape[1], q.device, first)
        out = F.scaled_dot_product_attention(
            q.unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return out.squeeze(0).transpose(0, 1)

    def _attend_by_scores(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        first: int,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with a soft cap, sinks or ALiBi, which SDPA does not support or only as a mask in memory.

        q is [num_heads, new, head_dim], k and v are [num_kv_heads, seq_len, head_dim].
        """
        num_new, seq_len = q.shape[1], k.shape[1]
        grouped = q.reshape(self.num_kv_heads, -1, self.head_dim)
        scores = torch.matmul(grouped, k.transpose(1, 2)).float() * self.scale
        scores = self._cap(scores).view(self.num_heads, num_new, seq_len)
        if self._slopes is not None:
            keys = torch.arange(seq_len, device=q.device)
            scores += self._slopes[:, None, None] * (keys - keys[seq_len - num_new :, None])
        if mask is None:
            mask = self._visible(num_new, seq_len, q.device, first)
        if mask is None:
            mask = torch.ones(num_new, seq_len, dtype=torch.bool, device=q.device).tril()
        probs = self._probabilities(scores.masked_fill_(~mask, float("-inf"))).to(q.dtype)
        return torch.matmul(probs.view(self.num_kv_heads, -1, seq_len), v).view(q.shape)

    def _probabilities(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the softmax of scores [..., num_heads, queries, keys] over the keys and the head's sink."""
        if self._sinks is None:
            return torch.softmax(scores, dim=-1)
        sinks = self._sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]

    def _visible(self, num_new: int, seq_len: int, device: torch.device, first: int) -> torch.Tensor | None:
        """Return the mask of the tokens that each of the last num_new tokens attends to, bool [num_new, seq_len].

        None means plain causal attention without context.
        """
        if self._sees_all_before(num_new, seq_len):
            return None
        context, window = seq_len - num_new, self.sliding_window
        # The causal mask is aligned bottom-right: query i sees the context and the new tokens up to itself.
        mask = torch.ones(num_new, seq_len, dtype=torch.bool, device=device).tril(context)
        if window is not None:
            mask = mask.triu(context - window + 1)
        if self.chunk_size is not None:
            chunks = torch.arange(first, first + seq_len, device=device) // self.chunk_size
            mask &= chunks[context:, None] == chunks
        return mask

    def _visible_to(self, key_ends: torch.Tensor, end: int, first: int) -> torch.Tensor:
        """Return the mask of the tokens that each of the last tokens before `end` attends to, some of which attend to
        tokens after them, bool [new, seq_len].

        Args:
            key_ends: int32 [new], where the keys of each end.
            first: position of the first key.
        """
        num_new, device = len(key_ends), key_ends.device
        mask = self._visible(num_new, end, device, first)
        if mask is None:
            mask = torch.ones(num_new, end, dtype=torch.bool, device=device).tril()
        seq_len = max(end, int(key_ends.max()))
        keys, own = torch.arange(seq_len, device=device), torch.arange(end - num_new, end, device=device)
        later = (keys > own[:, None]) & (keys < key_ends[:, None])
        return F.pad(mask, (0, seq_len - end)) | later

    def _sees_all_before(self, num_new: int, seq_len: int) -> bool:
        """Whether all tokens are new and within window and chunk, so that SDPA needs no mask."""
        reach = min(self.sliding_window or seq_len, self.chunk_size or seq_len)
        return num_new == seq_len and reach >= seq_len

    def _cap(self, scores: torch.Tensor) -> torch.Tensor:
        cap = self.logit_softcap
        return scores if cap is None else torch.tanh(scores / cap) * cap


_MAX_FP8 = 448.0
"""Largest float8_e4m3fn number."""


def _write(
    cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, scale: torch.Tensor | None
) -> None:
    """Write keys or values [T, num_kv_heads, head_dim] to their slots of a cache [num_blocks, block_size, num_kv_heads,
    head_dim]."""
    if scale is not None:
        stored = (values.float() / scale).clamp(-_MAX_FP8, _MAX_FP8).to(cache.dtype)
        # torch copies FP8 by index only as bytes.
        cache, values = cache.view(torch.uint8), stored.view(torch.uint8)
    if cache.is_contiguous():
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, values)
    else:
        block_size = cache.shape[1]
        cache.index_put_((slots // block_size, slots % block_size), values)


def _read(
    cache: torch.Tensor, blocks: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return blocks of keys or values in the activations' dtype."""
    if scale is None:
        return cache.index_select(0, blocks)
    stored = cache.view(torch.uint8).index_select(0, blocks).view(cache.dtype)
    return (stored.float() * scale).to(dtype)


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


_BUCKET_TOKENS = 256
"""Decodes whose lengths round up to the same multiple share a padded batch."""


class DecodeBatch(NamedTuple):
    """Decodes that are computed together."""

    rows: torch.Tensor | slice
    """Their rows in the step, int64 on their device, or all of them."""
    shortest: int
    """Tokens of the shortest sequence."""
    longest: int


def decode_batches(
    meta: AttentionMetadata, token_bytes: int, workspace_bytes: int = WORKSPACE_BYTES
) -> Iterator[DecodeBatch]:
    """Cut a step's decodes into batches.

    Sequences of a batch have similar lengths, so that one long request does not slow down the others, and what is
    gathered stays within `workspace_bytes`, but for a single sequence.

    Args:
        token_bytes: gathered per token of a sequence.
    """
    seq_lens = meta.seq_lens_cpu[: meta.num_decodes].tolist()
    buckets: dict[int, list[int]] = {}
    for row, seq_len in enumerate(seq_lens):
        buckets.setdefault(-(-seq_len // _BUCKET_TOKENS), []).append(row)
    for bucket, rows in buckets.items():
        size = max(workspace_bytes // (bucket * _BUCKET_TOKENS * token_bytes), 1)
        if meta.num_decodes <= size and len(buckets) == 1:
            yield DecodeBatch(slice(0, meta.num_decodes), min(seq_lens), max(seq_lens))
            return
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            lengths = [seq_lens[row] for row in part]
            yield DecodeBatch(torch.tensor(part, device=meta.seq_lens.device), min(lengths), max(lengths))
