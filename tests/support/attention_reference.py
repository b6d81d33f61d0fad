"""Batches over a paged KV cache, and their attention computed the plain way in float32."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch

UNWRITTEN = 7.0
"""What an output holds before the kernel runs."""


@dataclass
class PagedBatch:
    """A batch of requests with random queries, keys and values, each request with (queries, tokens) of its own.

    Every slot of the cache that no query may see holds NaN, as does block 0, which block tables name wherever a
    request has no block: beyond its tokens, and left of the window. Behind the batch are `padding` tokens.
    """

    requests: list[tuple[int, int]]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float16
    kv_dtype: torch.dtype | None = None
    padding: int = 2
    sliding_window: int | None = None
    chunk_size: int | None = None
    logit_softcap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False
    span: tuple[int, int] | None = None
    """Position of the first token of an image, and after the last one, which attend to all of it."""
    q: torch.Tensor = field(init=False)
    kv_cache: torch.Tensor = field(init=False)
    expected: torch.Tensor = field(init=False)
    options: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        kv_dtype = self.kv_dtype or self.dtype
        heads = (self.num_heads, self.head_dim)
        queries = [num_queries for num_queries, _ in self.requests]
        starts = [0, *itertools.accumulate(queries)]
        num_tokens = starts[-1] + self.padding
        # As in a fused projection: a token's queries have other values behind them.
        self.q = torch.randn(num_tokens, self.num_heads + 1, self.head_dim).to(self.dtype)[
            :, : self.num_heads
        ]
        self.expected = torch.full((num_tokens, *heads), UNWRITTEN)
        max_blocks = max((-(-total // self.block_size) for _, total in self.requests), default=1) + 1
        num_blocks = len(self.requests) * max_blocks + 1
        ids = (torch.randperm(num_blocks - 1) + 1).view(len(self.requests), max_blocks)
        shape = (2, num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        self.kv_cache = torch.full(shape, torch.nan).to(kv_dtype)
        block_table = torch.zeros(ids.shape, dtype=torch.int32)
        sinks = torch.randn(self.num_heads).to(self.dtype) if self.has_sinks else None
        slopes = torch.rand(self.num_heads) if self.has_alibi else None
        is_scaled = kv_dtype != self.dtype
        k_scale, v_scale = (0.5, 3.0) if is_scaled else (1.0, 1.0)
        scale = self.head_dim**-0.5
        key_ends = torch.zeros(num_tokens, dtype=torch.int32)
        for row, (new, total) in enumerate(self.requests):
            first = 0
            if self.sliding_window is not None:
                first = max(total - new + 1 - self.sliding_window, 0)
            if self.chunk_size is not None:
                first = max(first, (total - new) // self.chunk_size * self.chunk_size)
            keys = torch.randn(total, self.num_kv_heads, self.head_dim).to(kv_dtype)
            values = torch.randn(total, self.num_kv_heads, self.head_dim).to(kv_dtype)
            if new:
                for block in range(first // self.block_size, -(-total // self.block_size)):
                    block_table[row, block] = ids[row, block]
            for position in range(first if new else total, total):
                block = ids[row, position // self.block_size]
                self.kv_cache[0, block, position % self.block_size] = keys[position]
                self.kv_cache[1, block, position % self.block_size] = values[position]
            end = starts[row] + new
            ends = torch.arange(total - new, total) + 1
            if self.span is not None:
                assert new == 0 or self.span[1] <= total or self.span[0] >= total
                ends = torch.where((ends > self.span[0]) & (ends <= self.span[1]), self.span[1], ends)
            key_ends[starts[row] : end] = ends
            self.expected[starts[row] : end] = attention_reference(
                self.q[starts[row] : end].float(),
                keys.float() * k_scale,
                values.float() * v_scale,
                scale=scale,
                sliding_window=self.sliding_window,
                chunk_size=self.chunk_size,
                logit_softcap=self.logit_softcap,
                sinks=None if sinks is None else sinks.float(),
                alibi_slopes=slopes,
                key_ends=ends,
            )
        self.options = {
            "query_start_loc": torch.tensor(starts, dtype=torch.int32),
            "seq_lens": torch.tensor([total for _, total in self.requests], dtype=torch.int32),
            "block_table": block_table,
            "max_query_len": max(queries, default=0),
            "scale": scale,
            "sliding_window": self.sliding_window,
            "chunk_size": self.chunk_size,
            "logit_softcap": self.logit_softcap,
            "sinks": sinks,
            "alibi_slopes": slopes,
            "k_scale": torch.tensor([k_scale]) if is_scaled else None,
            "v_scale": torch.tensor([v_scale]) if is_scaled else None,
            "key_ends": None if self.span is None else key_ends,
        }

    def output(self) -> torch.Tensor:
        """Return an output buffer that nothing was written to."""
        return torch.full(self.expected.shape, UNWRITTEN, dtype=self.dtype)


def attention_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    key_ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention of the last tokens' queries, causal unless `key_ends` says otherwise.

    q is float32 [new, num_heads, head_dim], keys and values float32 [tokens, num_kv_heads, head_dim]; the result has
    q's shape. `key_ends` [new] is the position after the last key of each query.
    """
    groups = q.shape[1] // keys.shape[1]
    keys, values = (side.repeat_interleave(groups, dim=1) for side in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    if logit_softcap is not None:
        scores = logit_softcap * torch.tanh(scores / logit_softcap)
    position = torch.arange(len(keys) - len(q), len(keys)).unsqueeze(1)
    key = torch.arange(len(keys))
    if alibi_slopes is not None:
        scores = scores + alibi_slopes[:, None, None] * (key - position)
    is_hidden = key > position if key_ends is None else key >= key_ends.unsqueeze(1)
    if sliding_window is not None:
        is_hidden |= key <= position - sliding_window
    if chunk_size is not None:
        is_hidden |= key < position // chunk_size * chunk_size
    scores = scores.masked_fill(is_hidden, float("-inf"))
    if sinks is not None:
        column = sinks[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, column], dim=2)
    probabilities = torch.softmax(scores, dim=2)[:, :, : len(keys)]
    return torch.einsum("hqk,khd->qhd", probabilities, values)
