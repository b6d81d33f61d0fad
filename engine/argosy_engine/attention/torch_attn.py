"""Backend `torch`: paged attention in plain torch, portable and the reference for all kernels.

Decodes run as padded batches grouped by length, so that one long request does not slow down the others; prompts run one
by one over their gathered blocks. Both are split so that gathered keys and values, or scores, stay within
`WORKSPACE_BYTES`. The cache is `[2, num_blocks, block_size, num_kv_heads, head_dim]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from argosy_engine.attention import WORKSPACE_BYTES
from argosy_engine.attention.backend import AttentionWeights, DecoderParts
from argosy_engine.attention.decode_batches import decode_batches
from argosy_engine.attention.latent import LatentWeights
from argosy_engine.attention.latent_torch import TorchLatentAttention
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.params import AttentionParams, LatentAttentionParams
from argosy_engine.attention.rotary import RotaryEmbedding
from argosy_engine.attention.torch_rms_norm import rms_norm

_MAX_FP8 = 448.0
"""Largest float8_e4m3fn number."""


class TorchBackend:
    """Attention in plain torch, on any device and in any dtype."""

    uses_triton = False

    def __init__(self, dtype: torch.dtype, *, has_fp8_kv_cache: bool = False) -> None:
        self.kv_cache_dtype = torch.float8_e4m3fn if has_fp8_kv_cache else dtype

    def attention(self, params: AttentionParams, weights: AttentionWeights) -> TorchAttention:
        return TorchAttention(params, weights)

    def latent_attention(self, params: LatentAttentionParams, weights: LatentWeights) -> TorchLatentAttention:
        return TorchLatentAttention(params, weights)

    def fuse_decoder(self, layers: Sequence[DecoderParts]) -> None:
        return None


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
            out[prompt] = self._prefill(q[prompt], kv_cache, meta.block_table[row], seq_lens[row])
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
        probs = self._probabilities(scores).to(q.dtype).view(batch, self.num_kv_heads, groups, -1)
        return torch.matmul(probs, v.permute(0, 2, 1, 3)).view(batch, self.num_heads, self.head_dim)

    def _prefill(
        self, q: torch.Tensor, kv_cache: torch.Tensor, table: torch.Tensor, seq_len: int
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
        if not self._needs_scores and self._sees_all_before(num_new, num_seen):
            return self._attend(q, k, v)
        # The scores are materialised here, so run a few queries at a time, against the keys up to the last of them.
        size = max(WORKSPACE_BYTES // (4 * self.num_heads * num_seen), 1)
        parts, end = [], num_seen - num_new
        for part in q.split(size):
            end += len(part)
            parts.append(self._attend(part, k[:, :end], v[:, :end], first))
        return torch.cat(parts)

    @property
    def _needs_scores(self) -> bool:
        """Whether SDPA, which does not tell the scores, cannot compute it."""
        return self.logit_softcap is not None or self._sinks is not None

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Attend from the last queries [new, num_heads, head_dim] to k and v [num_kv_heads, seq_len, head_dim].

        Args:
            first: position of the first key.
        """
        q = q.transpose(0, 1)
        if self._needs_scores:
            return self._attend_by_scores(q, k, v, first).transpose(0, 1)
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
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int
    ) -> torch.Tensor:
        """Attend with a soft cap or sinks, which SDPA does not support.

        q is [num_heads, new, head_dim], k and v are [num_kv_heads, seq_len, head_dim].
        """
        num_new, seq_len = q.shape[1], k.shape[1]
        grouped = q.reshape(self.num_kv_heads, -1, self.head_dim)
        scores = torch.matmul(grouped, k.transpose(1, 2)).float() * self.scale
        scores = self._cap(scores).view(self.num_heads, num_new, seq_len)
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

    def _sees_all_before(self, num_new: int, seq_len: int) -> bool:
        """Whether all tokens are new and within window and chunk, so that SDPA needs no mask."""
        reach = min(self.sliding_window or seq_len, self.chunk_size or seq_len)
        return num_new == seq_len and reach >= seq_len

    def _cap(self, scores: torch.Tensor) -> torch.Tensor:
        cap = self.logit_softcap
        return scores if cap is None else torch.tanh(scores / cap) * cap
