"""Random steps of latent attention with a float64 reference: prompts, chunks and decodes over shuffled blocks."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from argosy_engine.attention.backend import AttentionBackend, LatentAttention, LatentWeights, RotaryEmbedding
from argosy_engine.attention.params import LatentAttentionParams
from attention_cases import Span, attention_metadata

_MAX_POSITIONS = 1024
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LatentCase:
    """A batch of sequences; q and compressed of each are [length, width]."""

    params: LatentAttentionParams
    block_size: int
    spans: list[Span]
    """Tokens that the step under test computes. The cache already holds all tokens before the spans."""
    q: list[torch.Tensor]
    compressed: list[torch.Tensor]
    norm: torch.Tensor
    kv_b: torch.Tensor
    frequencies: torch.Tensor
    tables: torch.Tensor
    num_blocks: int

    def run(self, backend: AttentionBackend, stale: float = math.nan) -> torch.Tensor:
        """Fill the cache, compute the step by a backend and return its result, [T, num_heads * v_head_dim].

        Args:
            stale: what else is in the cache, which must not affect results.
        """
        dtype = self.q[0].dtype
        rotary = RotaryEmbedding(self.frequencies, _MAX_POSITIONS, dtype, torch.device("cpu"))
        weights = LatentWeights.of_kv_b(self.kv_b, self.params.qk_nope_head_dim, rotary, self.norm, EPS)
        layer = LatentAttention(self.params, backend, weights)
        shape = layer.kv_cache_shape(self.num_blocks, self.block_size)
        layer.bind(torch.full(shape, stale, dtype=dtype))
        before = [row for row, (start, _) in enumerate(self.spans) if start]
        if before:
            self._step(layer, before, [(0, self.spans[row][0]) for row in before])
        return self._step(layer, list(range(len(self.spans))), self.spans)

    def _step(self, layer: LatentAttention, rows: list[int], spans: list[Span]) -> torch.Tensor:
        order = sorted(range(len(rows)), key=lambda index: spans[index][1] - spans[index][0] > 1)
        rows, spans = [rows[index] for index in order], [spans[index] for index in order]
        meta = attention_metadata(spans, self.tables[rows].contiguous(), self.block_size)
        q, compressed = (
            torch.cat([each[row][start:end] for row, (start, end) in zip(rows, spans, strict=True)])
            for each in (self.q, self.compressed)
        )
        return layer(q, compressed, meta)

    def expected(self) -> torch.Tensor:
        """Compute the step in float64, by keys and values of each head."""
        return torch.cat([self._attend(row, *span) for row, span in enumerate(self.spans)])

    def _attend(self, row: int, start: int, end: int) -> torch.Tensor:
        params = self.params
        compressed, positions = self.compressed[row][:end].double(), torch.arange(end)
        latent, k_rope = compressed.split([params.kv_lora_rank, params.qk_rope_head_dim], dim=1)
        latent = latent * (latent.square().mean(dim=1, keepdim=True) + EPS).rsqrt() * self.norm.double()
        up = self.kv_b.double()
        k_nope, v = torch.einsum("sr,hdr->shd", latent, up).split(
            [params.qk_nope_head_dim, params.v_head_dim], dim=2
        )
        q_nope, q_rope = (
            self.q[row][start:end]
            .double()
            .view(end - start, params.num_heads, -1)
            .split([params.qk_nope_head_dim, params.qk_rope_head_dim], dim=2)
        )
        k_rope = self._rotated(k_rope.unsqueeze(1), positions).squeeze(1)
        q_rope = self._rotated(q_rope, positions[start:])
        scores = torch.einsum("nhd,shd->hns", q_nope, k_nope) + torch.einsum("nhd,sd->hns", q_rope, k_rope)
        is_seen = positions <= positions[start:, None]
        probs = (scores * params.scale).masked_fill(~is_seen, -math.inf).softmax(-1)
        return torch.einsum("hns,shd->nhd", probs, v).flatten(1)

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate x [T, heads, qk_rope_head_dim] as complex numbers."""
        half = x.shape[2] // 2
        pairs = x.unflatten(2, (2, half)).transpose(2, 3)
        angles = torch.outer(positions.double(), self.frequencies.double()).unsqueeze(1)
        turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(2)


def latent_case(
    params: LatentAttentionParams,
    spans: list[Span],
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> LatentCase:
    """Draw a step. Spans of one token come first."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    needed = [-(-end // block_size) for _, end in spans]
    num_blocks = sum(needed) + 2
    blocks = rng.sample(range(num_blocks), sum(needed))
    tables = torch.zeros(len(spans), max(needed) + 1, dtype=torch.int64)
    for row, count in enumerate(needed):
        tables[row, :count] = torch.tensor([blocks.pop() for _ in range(count)])

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    width = params.num_heads * params.qk_head_dim
    return LatentCase(
        params,
        block_size,
        spans,
        [draw(end, width) for _, end in spans],
        [draw(end, params.cached_dim) for _, end in spans],
        1 + 0.2 * draw(params.kv_lora_rank),
        draw(params.num_heads, params.qk_nope_head_dim + params.v_head_dim, params.kv_lora_rank)
        * params.kv_lora_rank**-0.5,
        100.0 ** -(torch.arange(params.qk_rope_head_dim // 2) / params.qk_rope_head_dim * 2),
        tables,
        num_blocks,
    )
