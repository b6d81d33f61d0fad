"""Attention over the paged KV cache: one launch for decodes, chunked prefill and whole prompts.

This module chooses the layout of the query tiles, from shapes:

- packed: the tiles of all requests follow one another, and a program finds its request by binary search in
  `query_start_loc` (as vLLM's unified kernel does). For prompts, also mixed with decodes.
- one tile per request: where every request's queries fit one tile (decode, verification of drafts, short prompts). If
  there are few such tiles for the device, their keys are split into segments too (`split_kv`).

`paged_attention_kernel` does the work. It can write its result in FP8, as the input of an FP8 product, with a scale
that is known. A scale per token depends on all heads, which different programs compute: only the kernel that merges
segments can know it (`split_kv`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton

from argosy_engine.triton_kernels.attention_tiles import (
    MAX_GROUP_SIZE,
    MAX_WIDE_GROUP_SIZE,
    WIDE_HEAD_DIM,
    AttentionTiles,
    choose_tiles,
    with_two_stages,
)
from argosy_engine.triton_kernels.device_traits import device_traits
from argosy_engine.triton_kernels.launch import launch
from argosy_engine.triton_kernels.paged_attention_kernel import paged_attention_kernel
from argosy_engine.triton_kernels.split_kv import MAX_SEGMENTS, choose_num_segments, merge_segments

MAX_HEAD_DIM = 512

_FP8 = torch.float8_e4m3fn
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    num_segments: int | None = None,
    out: torch.Tensor | None = None,
    row_scales: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention of each request's last queries over its keys and values in the cache.

    The launches depend on shapes and on the Python arguments only. A request of no queries (a row of padding, where
    `query_start_loc` repeats) writes nothing, nor does a token before `query_start_loc[0]` or from
    `query_start_loc[R]` on. So a batch can also be computed in two calls, decodes and prompts, on slices of
    `query_start_loc`, `seq_lens` and `block_table` with the same q and out.

    With one value of num_segments (such as 1) and of max_query_len, a request's result does not depend on the other
    requests of the batch.

    Args:
        q: [T, num_heads, head_dim], bfloat16, float16 or float32; any strides with contiguous heads.
        kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim] of q's dtype or float8_e4m3fn. It holds this
            step's keys and values already.
        query_start_loc: int32 [R + 1], index of each request's first query in q, and the end of the last one.
        seq_lens: int32 [R], tokens of each request including its queries.
        block_table: int32 [R, max_blocks], block ids of each request; entries that its tokens do not reach, or that
            are behind window or chunk, are not read.
        max_query_len: upper bound on the queries of a request. A request with more gets a wrong result.
        scale: factor on the scores, usually 1 / sqrt(head_dim).
        sliding_window: number of tokens that a token attends to, itself included; None: all tokens before it.
        chunk_size: a token attends to those before it in its chunk of this many positions (Llama 4); None: no chunks.
        logit_softcap: scores become cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118).
        sinks: [num_heads], a logit per head that takes part in the softmax and has no value (gpt-oss).
        k_scale: float32 [1], factor on the keys of an FP8 cache; None: 1.
        v_scale: float32 [1], factor on its values; None: 1.
        num_segments: parts that a request's keys are split into, in [1, 32]; None: chosen by shapes.
        out: [T, num_heads, head_dim] of q's dtype with contiguous heads, or float8_e4m3fn; None: allocated.
        row_scales: float32 [T, 1], gets each token's scale if out is in FP8; see `paged_attention_fp8`.
        out_scale: float32 [1], the scale of all tokens then; None: each has its own.

    Returns:
        out; rows that belong to no request are undefined if it was allocated here.

    Raises:
        ValueError: a shape, dtype or option that the kernel does not support.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[3]
    _check(q, kv_cache, device_traits(q.device).has_fp8, sliding_window, logit_softcap, num_segments)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_requests = len(block_table)
    if num_requests == 0 or min(max_query_len, num_tokens) == 0:
        return out
    layout = _choose_layout(q, kv_cache, block_table, max_query_len, num_segments)
    tiles, num_segments = layout.tiles, layout.num_segments
    lse = largest = None
    target = out.unsqueeze(2)
    if num_segments > 1:
        target = q.new_empty((num_tokens, num_heads, num_segments, head_dim), dtype=torch.float32)
        lse = q.new_empty((num_tokens, num_heads, num_segments), dtype=torch.float32)
        if row_scales is not None and out_scale is None:
            largest = torch.empty_like(lse)
    elif row_scales is not None and out_scale is None:
        raise ValueError("scales of tokens need their keys to be split into segments; give an out_scale")
    writes_fp8 = row_scales is not None and num_segments == 1
    launch(
        paged_attention_kernel,
        (layout.num_programs, num_segments),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        out_ptr=target,
        lse_ptr=lse,
        largest_ptr=largest,
        out_scale_ptr=out_scale if writes_fp8 else None,
        row_scales_ptr=row_scales if writes_fp8 else None,
        q_ptr=q,
        k_ptr=kv_cache[0],
        v_ptr=kv_cache[1],
        query_start_loc_ptr=query_start_loc,
        seq_lens_ptr=seq_lens,
        block_table_ptr=block_table,
        sinks_ptr=sinks,
        k_scale_ptr=k_scale,
        v_scale_ptr=v_scale,
        scale=float(scale),
        logit_softcap=logit_softcap,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        num_requests=num_requests,
        num_kv_heads=num_kv_heads,
        out_stride_token=target.stride(0),
        out_stride_head=target.stride(1),
        out_stride_segment=target.stride(2),
        q_stride_token=q.stride(0),
        q_stride_head=q.stride(1),
        kv_stride_block=kv_cache.stride(1),
        kv_stride_slot=kv_cache.stride(2),
        kv_stride_head=kv_cache.stride(3),
        block_table_stride=block_table.stride(0),
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=triton.next_power_of_2(head_dim),
        GROUP_SIZE=num_heads // num_kv_heads,
        BLOCK_SIZE=kv_cache.shape[2],
        BLOCK_M=tiles.block_m,
        BLOCK_Q=layout.block_q,
        TILE=tiles.tile,
        IS_PACKED=layout.is_packed,
    )
    if lse is not None:
        merge_segments(
            out, target, lse, query_start_loc, row_scales=row_scales, largest=largest, out_scale=out_scale
        )
    return out


def paged_attention_fp8(
    q: torch.Tensor, kv_cache: torch.Tensor, *, out_scale: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `paged_attention` in float8_e4m3fn, [T, num_heads, head_dim], and the scale of each token, float32 [T, 1].

    If only a further launch could know the scales, return the plain result and None.

    Args:
        out_scale: float32 [1], of all tokens; None: each has a scale that maps its magnitudes to at most 448, the
            largest FP8 number.
        options: of `paged_attention`, without outputs.
    """
    if out_scale is None:
        num_segments = 1
        if len(options["block_table"]) and min(options["max_query_len"], len(q)):
            chosen = options["block_table"], options["max_query_len"], options.get("num_segments")
            num_segments = _choose_layout(q, kv_cache, *chosen).num_segments
        if num_segments == 1:
            return paged_attention(q, kv_cache, **options), None
    out = torch.empty(q.shape, dtype=_FP8, device=q.device)
    row_scales = torch.empty((len(q), 1), dtype=torch.float32, device=q.device)
    paged_attention(q, kv_cache, out=out, row_scales=row_scales, out_scale=out_scale, **options)
    return out, row_scales


class _Layout(NamedTuple):
    tiles: AttentionTiles
    block_q: int
    """Queries of a tile."""
    is_packed: bool
    num_programs: int
    """Of each segment."""
    num_segments: int


def _choose_layout(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    max_query_len: int,
    num_segments: int | None,
) -> _Layout:
    """Choose the layout of a batch with queries, from shapes. Arguments: `paged_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    _, _, block_size, num_kv_heads, _ = kv_cache.shape
    traits = device_traits(q.device)
    num_requests, max_blocks = block_table.shape
    max_query_len = min(max_query_len, num_tokens)
    group_size = num_heads // num_kv_heads
    tiles = choose_tiles(traits, q.dtype, kv_cache.dtype, head_dim, group_size, max_query_len)
    block_q = tiles.block_m // group_size
    is_packed = max_query_len > block_q
    if is_packed:
        num_query_tiles = num_tokens // block_q + num_requests
    else:
        num_query_tiles = num_requests
    num_programs = num_query_tiles * num_kv_heads
    if num_segments is None:
        max_tiles = triton.cdiv(max_blocks * block_size, tiles.tile)
        num_segments = 1 if is_packed else choose_num_segments(traits, num_programs, max_tiles)
    if not is_packed and num_segments == 1 and num_programs >= 2 * traits.num_sms:
        # There are programs enough to wait for memory in: on an H200 a third tile in flight cost 13 % for 64 requests.
        tiles = with_two_stages(tiles)
    return _Layout(tiles, block_q, is_packed, num_programs, num_segments)


def _check(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    has_fp8: bool,
    sliding_window: int | None,
    logit_softcap: float | None,
    num_segments: int | None,
) -> None:
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv_cache.shape[3]
    if q.dtype not in _DTYPES:
        raise ValueError(f"queries are {q.dtype}; paged attention takes bfloat16, float16 and float32")
    if kv_cache.dtype not in (q.dtype, _FP8):
        raise ValueError(
            f"a KV cache of {kv_cache.dtype} for queries of {q.dtype}: use their dtype or {_FP8}"
        )
    if kv_cache.dtype is _FP8 and not has_fp8:
        raise ValueError(
            "this GPU has no FP8 (it needs compute capability 8.9): use a KV cache of the model's dtype"
        )
    if kv_cache.shape[4] != head_dim or head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim is {head_dim} in the queries and {kv_cache.shape[4]} in the KV cache: "
            f"it must be the same, and up to {MAX_HEAD_DIM}"
        )
    if num_heads % num_kv_heads or num_heads > MAX_GROUP_SIZE * num_kv_heads:
        raise ValueError(
            f"{num_heads} heads share {num_kv_heads} KV heads: "
            f"it must be a multiple, up to {MAX_GROUP_SIZE} times as many"
        )
    if head_dim > WIDE_HEAD_DIM and num_heads > MAX_WIDE_GROUP_SIZE * num_kv_heads:
        raise ValueError(
            f"{num_heads} heads of {head_dim} elements share {num_kv_heads} KV heads: up to {MAX_WIDE_GROUP_SIZE} may "
            f"share one of more than {WIDE_HEAD_DIM}"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(
            f"sliding_window is {sliding_window}: it counts the token itself, so it is 1 or more"
        )
    if logit_softcap is not None and not 0 < logit_softcap < math.inf:
        raise ValueError(f"logit_softcap is {logit_softcap}: it must be positive; None turns it off")
    if num_segments is not None and not 1 <= num_segments <= MAX_SEGMENTS:
        raise ValueError(f"num_segments is {num_segments}: it must be between 1 and {MAX_SEGMENTS}")
