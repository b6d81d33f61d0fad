"""Random steps of paged attention with a float64 reference: prompts, chunks and decodes over shuffled blocks."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import torch

from argosy_engine.attention.backend import AttentionMetadata, AttentionWeights, ModelInputs
from argosy_engine.attention.params import AttentionParams
from argosy_engine.models.registry import CausalLM
from argosy_engine.worker.input_batch import with_groups
from argosy_engine.worker.model_runner import bind_kv_cache, layer_groups

Span = tuple[int, int]
"""First and end (exclusive) position of the tokens that a request computes."""


@dataclass(frozen=True, slots=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    sliding_window: int | None
    logit_softcap: float | None
    chunk_size: int | None
    has_sinks: bool
    has_alibi: bool = False

    @property
    def params(self) -> AttentionParams:
        return AttentionParams(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            sliding_window=self.sliding_window,
            logit_softcap=self.logit_softcap,
            chunk_size=self.chunk_size,
            has_sinks=self.has_sinks,
            has_alibi=self.has_alibi,
        )


def attention_metadata(spans: list[Span], tables: torch.Tensor, block_size: int) -> AttentionMetadata:
    """Return the metadata of a step on the CPU.

    Args:
        spans: per request; those of one token come first.
        tables: block table of each request, [R, max_blocks].
    """
    query_lens = [end - start for start, end in spans]
    starts = np.cumsum([0, *query_lens], dtype=np.int32)
    ends = np.array([end for _, end in spans], np.int32)
    positions = [position for start, end in spans for position in range(start, end)]
    rows = [row for row, (start, end) in enumerate(spans) for _ in range(start, end)]
    slots = [
        int(tables[row, position // block_size]) * block_size + position % block_size
        for row, position in zip(rows, positions, strict=True)
    ]
    return AttentionMetadata(
        num_decodes=query_lens.count(1),
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(ends),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        block_table=tables.to(torch.int32),
        query_start_loc_cpu=starts,
        seq_lens_cpu=ends,
    )


def model_inputs(token_ids: list[int], start: int, tables: torch.Tensor, block_size: int) -> ModelInputs:
    """Return a step of one request that computes these tokens, of which the first is at position `start`."""
    end = start + len(token_ids)
    return ModelInputs(
        token_ids=torch.tensor(token_ids),
        positions=torch.arange(start, end),
        meta=attention_metadata([(start, end)], tables, block_size),
    )


def sequence_inputs(
    model: CausalLM, token_ids: list[int], start: int, num_tokens: int, block_size: int
) -> ModelInputs:
    """Return a step of one request of `num_tokens` tokens, as `model_inputs`, for a model that `bind_sequence` has
    bound, with any KV cache groups."""
    groups, count = layer_groups(model, block_size), -(-num_tokens // block_size)
    end = start + len(token_ids)
    metas = []
    for index, group in enumerate(groups):
        table = torch.ones(count) if group.spec.is_state else torch.arange(count) + count * index
        metas.append(attention_metadata([(start, end)], table.int().unsqueeze(0), block_size))
    return ModelInputs(
        token_ids=torch.tensor(token_ids), positions=torch.arange(start, end), meta=with_groups(metas)
    )


def bind_sequence(model: CausalLM, num_tokens: int, block_size: int) -> None:
    """Give a model the KV cache and the states of one request."""
    groups = layer_groups(model, block_size)
    num_blocks = len(groups) * -(-num_tokens // block_size)
    bind_kv_cache(model, groups, num_blocks, block_size, torch.device("cpu"), num_states=2)


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of sequences; q, k and v of each are [length, heads, head_dim]."""

    shape: Shape
    spans: list[Span]
    """Tokens that the step under test computes. The cache already holds all tokens before the spans."""
    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    sinks: torch.Tensor | None
    """float32 [num_heads]"""
    slopes: torch.Tensor | None
    """float32 [num_heads]: of ALiBi"""
    tables: torch.Tensor
    num_blocks: int

    @property
    def weights(self) -> AttentionWeights:
        return AttentionWeights(sinks=self.sinks, alibi_slopes=self.slopes)

    def empty_cache(self) -> torch.Tensor:
        """Return a cache filled with NaN, because stale values in a block must not affect results."""
        shape = self.shape
        size = (2, self.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        return torch.full(size, math.nan, dtype=self.q[0].dtype)

    def metadata(self, rows: list[int], spans: list[Span]) -> AttentionMetadata:
        """Return the metadata of a step that computes spans[i] of sequence rows[i]."""
        return attention_metadata(spans, self.tables[rows].contiguous(), self.shape.block_size)

    def qkv(self, rows: list[int], spans: list[Span]) -> torch.Tensor:
        """Return the fused projection of the spans, [T, (num_heads + 2 num_kv_heads) * head_dim]."""
        return torch.cat([self.rows(tensors, rows, spans) for tensors in (self.q, self.k, self.v)], dim=1)

    def rows(self, tensors: list[torch.Tensor], rows: list[int], spans: list[Span]) -> torch.Tensor:
        """Concatenate the spans of q, k or v: [T, heads * head_dim]."""
        parts = [tensors[row][start:end].flatten(1) for row, (start, end) in zip(rows, spans, strict=True)]
        return torch.cat(parts)

    def expected(self) -> torch.Tensor:
        """Compute attention of the spans in float64, [T, num_heads * head_dim]."""
        return torch.cat([self._attend(row, *span).flatten(1) for row, span in enumerate(self.spans)])

    def _attend(self, row: int, start: int, end: int) -> torch.Tensor:
        shape = self.shape
        group = shape.num_heads // shape.num_kv_heads
        q = self.q[row][start:end].double()
        k = self.k[row][:end].repeat_interleave(group, 1).double()
        v = self.v[row][:end].repeat_interleave(group, 1).double()
        scores = torch.einsum("nhd,lhd->hnl", q, k) * shape.head_dim**-0.5
        if shape.logit_softcap is not None:
            scores = torch.tanh(scores / shape.logit_softcap) * shape.logit_softcap
        position, key = torch.arange(start, end)[:, None], torch.arange(end)
        if self.slopes is not None:
            scores = scores + self.slopes.double()[:, None, None] * (key - position)
        is_seen = key <= position
        if shape.sliding_window is not None:
            is_seen &= key > position - shape.sliding_window
        if shape.chunk_size is not None:
            is_seen &= key >= position // shape.chunk_size * shape.chunk_size
        scores = scores.masked_fill(~is_seen, -math.inf)
        if self.sinks is not None:
            sinks = self.sinks.double().view(-1, 1, 1).expand(-1, end - start, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        probs = scores.softmax(-1)[..., :end]
        return torch.einsum("hnl,lhd->nhd", probs, v)


def random_case(rng: random.Random, dtype: torch.dtype) -> Case:
    num_kv_heads = rng.choice((1, 2, 4))
    shape = Shape(
        num_heads=num_kv_heads * rng.choice((1, 2, 3, 7)),
        num_kv_heads=num_kv_heads,
        head_dim=rng.choice((16, 32, 64, 80, 128)),
        block_size=rng.choice((16, 32, 48)),
        sliding_window=rng.choice((None, None, 1, 17, 200)),
        logit_softcap=rng.choice((None, None, 5.0)),
        chunk_size=rng.choice((None, None, None, 16, 70)),
        has_sinks=rng.choice((False, False, True)),
        has_alibi=rng.choice((False, False, True)),
    )
    spans = []
    for _ in range(rng.randrange(1, 6)):
        start = rng.choice((0, 1, 15, 16, 100, 300))
        spans.append((start, start + rng.choice((1, 1, 1, 2, 30, 150))))
    spans.sort(key=lambda span: span[1] - span[0] > 1)
    return make_case(rng, dtype, shape, spans)


def make_case(rng: random.Random, dtype: torch.dtype, shape: Shape, spans: list[Span]) -> Case:
    """Draw a batch; spans of one token come first."""
    needed = [-(-end // shape.block_size) for _, end in spans]
    num_blocks = sum(needed) + 3
    blocks = rng.sample(range(1, num_blocks), sum(needed))
    tables = torch.zeros(len(spans), max(needed) + 1, dtype=torch.int64)
    for row, count in enumerate(needed):
        tables[row, :count] = torch.tensor([blocks.pop() for _ in range(count)])
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def draw(heads: int) -> list[torch.Tensor]:
        return [torch.randn(end, heads, shape.head_dim, generator=generator).to(dtype) for _, end in spans]

    q, k, v = draw(shape.num_heads), draw(shape.num_kv_heads), draw(shape.num_kv_heads)
    sinks = torch.randn(shape.num_heads, generator=generator) * 2 if shape.has_sinks else None
    slopes = torch.rand(shape.num_heads, generator=generator) if shape.has_alibi else None
    return Case(shape, spans, q, k, v, sinks, slopes, tables, num_blocks)
