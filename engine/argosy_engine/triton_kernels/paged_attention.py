"""Attention over the paged KV cache: one launch for decodes, chunked prefill and whole prompts.

The layout of the query tiles is chosen from shapes:

- packed: the tiles of all requests follow one another, and a program finds its request by binary search in
  `query_start_loc` (as vLLM's unified kernel does). For prompts, also mixed with decodes.
- one tile per request: where every request's queries fit one tile (decode, verification of drafts, short prompts). If
  there are few such tiles for the device, their keys are split into segments too (`split_kv`).

A program computes up to BLOCK_M rows, which are the tile's queries times the query heads that share the KV head (GQA
packing), so that a key is read once for all heads of its group. It walks the keys in tiles of TILE positions with the
online softmax of FlashAttention-2 (arXiv 2307.08691), in base 2. Tiles of keys that every row masks (the future, or
left of the sliding window) are not visited, and slots that no row sees are not read: whatever they hold, NaN included,
stays out of the result.

It can write its result in FP8, as the input of an FP8 product, with a scale that is known. A scale per token depends on
all heads, which different programs compute: only the kernel that merges segments can know it (`split_kv`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.activations import to_fp8
from argosy_engine.triton_kernels.launch import DeviceTraits, cdiv, device_traits, launch, next_power_of_2
from argosy_engine.triton_kernels.split_kv import MAX_SEGMENTS, choose_num_segments, merge_segments

MAX_GROUP_SIZE = 64
"""Query heads that may share one KV head: they are rows of one tile."""
_MIN_ROWS = 16
"""Rows of the smallest matrix product on tensor cores."""
WIDE_HEAD_DIM = 256
"""Larger heads leave registers for the smallest tile only."""
MAX_WIDE_GROUP_SIZE = _MIN_ROWS
"""Query heads that may share one of these."""
_MAX_FEW_ROWS = 32
_AMPLE_SHARED_MEMORY = 160 << 10
"""Of data-centre GPUs (A100, H100, B200); the others have 99 KiB."""
_OPERANDS_IN_SHARED_MEMORY = (9, 10)
"""Major capabilities whose matrix products read shared memory (`wgmma`, `tcgen05`). The products of the others
(`mma.sync`) take keys and values from registers."""


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """One configuration of the paged attention kernel."""

    block_m: int
    """Rows of a query tile: queries times the query heads of one KV head."""
    tile: int
    """Keys visited at a time."""
    num_warps: int
    num_stages: int


@cache
def with_two_stages(tiles: AttentionTiles) -> AttentionTiles:
    """Return the configuration with at most one tile of keys in flight beside the one that is computed."""
    return replace(tiles, num_stages=min(tiles.num_stages, 2))


@lru_cache(maxsize=1024)
def choose_tiles(
    traits: DeviceTraits,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    group_size: int,
    max_query_len: int,
) -> AttentionTiles:
    """Choose the configuration for requests of up to `max_query_len` queries.

    Few rows (decode) wait for memory: the tile is as small as tensor cores allow, so that several programs fit an SM,
    and the next tile's keys are in flight while one is computed, two tiles ahead where shared memory is ample. Many
    rows (prefill) wait for tensor cores: 128 rows are two warp groups of an H100 and use each key that was read 128
    times. Registers limit both, as the accumulator is [block_m, head_dim] in float32, and keys in FP8 are widened in
    registers: no configuration may spill.

    Float32 is for comparisons: it is multiplied without tensor cores, in the smallest tiles.

    Args:
        dtype: of the queries.
        kv_dtype: of the KV cache.
        group_size: query heads per KV head, up to MAX_GROUP_SIZE.
    """
    if dtype is torch.float32:
        return AttentionTiles(max(_MIN_ROWS, next_power_of_2(group_size)), 16, 8, 2)
    if head_dim > WIDE_HEAD_DIM:
        return AttentionTiles(_MIN_ROWS, 16, 8 if kv_dtype is dtype else 4, 2)
    num_stages = 3 if traits.shared_memory >= _AMPLE_SHARED_MEMORY else 2
    rows = next_power_of_2(max_query_len * group_size)
    if rows <= _MAX_FEW_ROWS:
        tile = 64 if head_dim <= 128 else 32
        if kv_dtype is not dtype and num_stages == 2:
            tile //= 2
        return AttentionTiles(max(_MIN_ROWS, rows), tile, 4, num_stages)
    if head_dim > 128:
        return AttentionTiles(64, 32, 8, 2)
    reads_shared_memory = traits.capability // 10 in _OPERANDS_IN_SHARED_MEMORY
    return AttentionTiles(128, 64 if reads_shared_memory or head_dim <= 64 else 32, 8, num_stages)


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
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    key_ends: torch.Tensor | None = None,
    num_segments: int | None = None,
    out: torch.Tensor | None = None,
    row_scales: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    halves: tuple[torch.Tensor, torch.Tensor] | None = None,
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
        alibi_slopes: float32 [num_heads], what a head's scores fall by per position between query and key (ALiBi, arXiv
            2108.12409).
        k_scale: float32 [1], factor on the keys of an FP8 cache; None: 1.
        v_scale: float32 [1], factor on its values; None: 1.
        key_ends: int32 [T], position after the last key that each token attends to, at most its request's `seq_lens`,
            where tokens of an image attend to all of it (Gemma 3); None: the token's own is the last. Later keys are
            within any window or chunk.
        num_segments: parts that a request's keys are split into, in [1, 32]; None: chosen by shapes.
        out: [T, num_heads, head_dim] of q's dtype with contiguous heads, or float8_e4m3fn; None: allocated.
        row_scales: float32 [T, 1], gets each token's scale if out is in FP8; see `paged_attention_fp8`.
        out_scale: float32 [1], the scale of all tokens then; None: each has its own.
        halves: kv_cache[0] and kv_cache[1], for callers that keep them; default: taken here.

    Returns:
        out; rows that belong to no request are undefined if it was allocated here.

    Raises:
        ValueError: a shape, dtype or option that the kernel does not support.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, _, block_size, num_kv_heads, _ = kv_shape = kv_cache.shape
    device = q.device
    _check(
        num_heads, head_dim, num_kv_heads, kv_shape[4], q.dtype, kv_cache.dtype, device_traits(device).has_fp8,
        sliding_window, logit_softcap, num_segments,
    )  # fmt: skip
    if out is None:
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=device)
    num_requests = block_table.shape[0]
    if num_requests == 0 or min(max_query_len, num_tokens) == 0:
        return out
    layout = _choose_layout(q, kv_cache, block_table, max_query_len, num_segments)
    tiles, num_segments = layout.tiles, layout.num_segments
    lse = largest = None
    target = out.unsqueeze(2)
    if num_segments > 1:
        shape = num_tokens, num_heads, num_segments, head_dim
        target = torch.empty(shape, dtype=torch.float32, device=device)
        lse = torch.empty(shape[:3], dtype=torch.float32, device=device)
        if row_scales is not None and out_scale is None:
            largest = torch.empty_like(lse)
    elif row_scales is not None and out_scale is None:
        raise ValueError("scales of tokens need their keys to be split into segments; give an out_scale")
    writes_fp8 = row_scales is not None and num_segments == 1
    keys, values = kv_cache.unbind(0) if halves is None else halves
    out_strides, q_strides, kv_strides = target.stride(), q.stride(), kv_cache.stride()
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
        k_ptr=keys,
        v_ptr=values,
        query_start_loc_ptr=query_start_loc,
        seq_lens_ptr=seq_lens,
        block_table_ptr=block_table,
        sinks_ptr=sinks,
        alibi_slopes_ptr=alibi_slopes,
        k_scale_ptr=k_scale,
        v_scale_ptr=v_scale,
        key_ends_ptr=key_ends,
        scale=float(scale),
        logit_softcap=logit_softcap,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        num_requests=num_requests,
        num_kv_heads=num_kv_heads,
        out_stride_token=out_strides[0],
        out_stride_head=out_strides[1],
        out_stride_segment=out_strides[2],
        q_stride_token=q_strides[0],
        q_stride_head=q_strides[1],
        kv_stride_block=kv_strides[1],
        kv_stride_slot=kv_strides[2],
        kv_stride_head=kv_strides[3],
        block_table_stride=block_table.stride(0),
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=next_power_of_2(head_dim),
        GROUP_SIZE=num_heads // num_kv_heads,
        BLOCK_SIZE=block_size,
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


class Layout(NamedTuple):
    """How the query tiles of a batch are computed; see the top."""

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
) -> Layout:
    """Choose the layout of a batch with queries, from shapes. Arguments: `paged_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    num_requests, max_blocks = block_table.shape
    _, _, block_size, num_kv_heads, _ = kv_cache.shape
    return layout_of(
        device_traits(q.device), q.dtype, kv_cache.dtype, num_tokens, num_heads, num_kv_heads, head_dim, num_requests,
        max_blocks * block_size, min(max_query_len, num_tokens), num_segments,
    )  # fmt: skip


def layout_of(
    traits: DeviceTraits,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_requests: int,
    max_keys: int,
    max_query_len: int,
    num_segments: int | None,
) -> Layout:
    """Choose the layout of attention of these shapes.

    Args:
        max_keys: keys that the block table has room for.
        max_query_len: at most num_tokens.
        num_segments: None: chosen.
    """
    group_size = num_heads // num_kv_heads
    tiles = choose_tiles(traits, dtype, kv_dtype, head_dim, group_size, max_query_len)
    block_q = tiles.block_m // group_size
    is_packed = max_query_len > block_q
    if is_packed:
        num_query_tiles = num_tokens // block_q + num_requests
    else:
        num_query_tiles = num_requests
    num_programs = num_query_tiles * num_kv_heads
    if num_segments is None:
        max_tiles = cdiv(max_keys, tiles.tile)
        num_segments = 1 if is_packed else choose_num_segments(traits, num_programs, max_tiles)
    if not is_packed and num_segments == 1 and num_programs >= 2 * traits.num_sms:
        # There are programs enough to wait for memory in: on an H200 a third tile in flight cost 13 % for 64 requests.
        tiles = with_two_stages(tiles)
    return Layout(tiles, block_q, is_packed, num_programs, num_segments)


@lru_cache(maxsize=256)
def _check(
    num_heads: int,
    head_dim: int,
    num_kv_heads: int,
    kv_head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    has_fp8: bool,
    sliding_window: int | None,
    logit_softcap: float | None,
    num_segments: int | None,
) -> None:
    if dtype not in _DTYPES:
        raise ValueError(f"queries are {dtype}; paged attention takes bfloat16, float16 and float32")
    if kv_dtype not in (dtype, _FP8):
        raise ValueError(f"a KV cache of {kv_dtype} for queries of {dtype}: use their dtype or {_FP8}")
    if kv_dtype is _FP8 and not has_fp8:
        raise ValueError(
            "this GPU has no FP8 (it needs compute capability 8.9): use a KV cache of the model's dtype"
        )
    if kv_head_dim != head_dim or head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim is {head_dim} in the queries and {kv_head_dim} in the KV cache: "
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


@triton.jit(do_not_specialize=["num_requests", "block_table_stride"])
def paged_attention_kernel(
    out_ptr,
    lse_ptr,
    largest_ptr,
    out_scale_ptr,
    row_scales_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    sinks_ptr,
    alibi_slopes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    key_ends_ptr,
    scale,
    logit_softcap,
    sliding_window,
    chunk_size,
    num_requests,
    num_kv_heads,
    out_stride_token,
    out_stride_head,
    out_stride_segment,
    q_stride_token,
    q_stride_head,
    kv_stride_block,
    kv_stride_slot,
    kv_stride_head,
    block_table_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    IS_PACKED: tl.constexpr,
):
    """Attend from one query tile and KV head to one segment of the request's keys.

    Programs along axis 0 are (query tile, KV head), with the heads of a tile beside each other because their keys are
    neighbours in memory. The packed layout starts with the last tile: prompts follow decodes in a batch, and the end
    of a prompt sees the most keys, so the longest programs start first.

    With out_scale_ptr the result is written in FP8, and with largest_ptr each segment's largest magnitude of a head.
    """
    kv_head = tl.program_id(0) % num_kv_heads
    query_tile = tl.program_id(0) // num_kv_heads
    if IS_PACKED:
        query_tile = tl.num_programs(0) // num_kv_heads - 1 - query_tile
        request, query_tile = find_request(query_start_loc_ptr, query_tile, num_requests, BLOCK_Q)
    else:
        request = query_tile
        query_tile = 0
    first_token = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - first_token
    if query_tile * BLOCK_Q >= query_len:
        return
    context_len = tl.load(seq_lens_ptr + request) - query_len

    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, HEAD_DIM_PADDED)
    query = query_tile * BLOCK_Q + row // GROUP_SIZE
    token = (first_token + query).to(tl.int64)
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    is_row = (query < query_len) & (row < BLOCK_Q * GROUP_SIZE)
    mask = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    q_offsets = token[:, None] * q_stride_token + head[:, None] * q_stride_head + dim[None, :]
    q = tl.load(q_ptr + q_offsets, mask=mask, other=0.0)
    position = context_len + query

    last_key = position
    end = context_len + tl.minimum((query_tile + 1) * BLOCK_Q, query_len)
    if key_ends_ptr is not None:
        last_key = tl.load(key_ends_ptr + token, mask=is_row, other=0) - 1
        end = tl.max(last_key, axis=0) + 1
    begin = 0
    if sliding_window is not None:
        begin = tl.maximum(context_len + query_tile * BLOCK_Q + 1 - sliding_window, 0)
    if chunk_size is not None:
        begin = tl.maximum(begin, (context_len + query_tile * BLOCK_Q) // chunk_size * chunk_size)
    first_tile = begin // TILE
    last_tile = tl.cdiv(end, TILE)
    segment = tl.program_id(1)
    if lse_ptr is not None:
        tiles_per_segment = tl.cdiv(last_tile - first_tile, tl.num_programs(1))
        first_tile += segment * tiles_per_segment
        last_tile = tl.minimum(first_tile + tiles_per_segment, last_tile)

    score_scale = scale
    if k_scale_ptr is not None:
        score_scale *= tl.load(k_scale_ptr)
    if logit_softcap is None:
        score_scale *= 1.4426950408889634  # log2(e): the softmax is in base 2
    accumulator = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32)
        maximum = tl.where(segment == 0, sink * 1.4426950408889634, maximum)
        denominator = tl.where(segment == 0, 1.0, denominator)
    slopes = None
    if alibi_slopes_ptr is not None:
        slopes = tl.load(alibi_slopes_ptr + head, mask=is_row, other=0.0) * 1.4426950408889634
    k_ptr += kv_head.to(tl.int64) * kv_stride_head
    v_ptr += kv_head.to(tl.int64) * kv_stride_head
    table_ptr = block_table_ptr + request.to(tl.int64) * block_table_stride
    masked_tile = first_tile
    # A decode is one masked loop, whose loads stay in flight up to its end; a prompt saves the masks of most tiles.
    # (In float32, two loops take more registers than there are.)
    if IS_PACKED and sliding_window is None and chunk_size is None and q.dtype != tl.float32:
        all_visible = (context_len + query_tile * BLOCK_Q + 1) // TILE
        masked_tile = tl.maximum(tl.minimum(all_visible, last_tile), first_tile)
        accumulator, denominator, maximum = _attend(
            accumulator,
            denominator,
            maximum,
            q,
            position,
            last_key,
            k_ptr,
            v_ptr,
            table_ptr,
            begin,
            end,
            first_tile,
            masked_tile,
            score_scale,
            logit_softcap,
            sliding_window,
            chunk_size,
            slopes,
            kv_stride_block,
            kv_stride_slot,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            BLOCK_SIZE,
            TILE,
            IS_MASKED=False,
        )
    accumulator, denominator, maximum = _attend(
        accumulator,
        denominator,
        maximum,
        q,
        position,
        last_key,
        k_ptr,
        v_ptr,
        table_ptr,
        begin,
        end,
        masked_tile,
        last_tile,
        score_scale,
        logit_softcap,
        sliding_window,
        chunk_size,
        slopes,
        kv_stride_block,
        kv_stride_slot,
        HEAD_DIM,
        HEAD_DIM_PADDED,
        BLOCK_SIZE,
        TILE,
        IS_MASKED=True,
    )
    is_empty = denominator == 0.0  # a row beyond the queries, or one that sees no key of this segment
    denominator = tl.where(is_empty, 1.0, denominator)
    if lse_ptr is not None:
        lse = tl.where(is_empty, float("-inf"), maximum + tl.log2(denominator))
        rows = token * (num_kv_heads * GROUP_SIZE) + head
        tl.store(lse_ptr + rows * tl.num_programs(1) + segment, lse, mask=is_row)
    factor = 1.0 / denominator
    if v_scale_ptr is not None:
        factor *= tl.load(v_scale_ptr)
    attended = accumulator * factor[:, None]
    if largest_ptr is not None:
        rows = token * (num_kv_heads * GROUP_SIZE) + head
        largest = tl.max(tl.abs(attended), axis=1)
        tl.store(largest_ptr + rows * tl.num_programs(1) + segment, largest, mask=is_row)
    if out_scale_ptr is None:
        out = attended.to(out_ptr.dtype.element_ty)
    else:
        out_scale = tl.load(out_scale_ptr)
        is_first_head = is_row & (head == 0)
        tl.store(row_scales_ptr + token, tl.zeros([BLOCK_M], tl.float32) + out_scale, mask=is_first_head)
        out = to_fp8(attended, out_scale)
    out_offsets = token[:, None] * out_stride_token + head[:, None] * out_stride_head + dim[None, :]
    tl.store(out_ptr + out_offsets + segment * out_stride_segment, out, mask=mask)


@triton.jit
def _attend(
    accumulator,
    denominator,
    maximum,
    q,
    position,
    last_key,
    k_ptr,
    v_ptr,
    table_ptr,
    begin,
    end,
    first_tile,
    last_tile,
    score_scale,
    logit_softcap,
    sliding_window,
    chunk_size,
    slopes,
    kv_stride_block,
    kv_stride_slot,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Visit the key tiles from first_tile to last_tile; unless IS_MASKED, every row sees all of their keys.

    Keys are read from position `begin` to `end` only. A row at `position` sees none after `last_key`.
    """
    dim = tl.arange(0, HEAD_DIM_PADDED)
    is_dim = dim < HEAD_DIM
    key = first_tile * TILE + tl.arange(0, TILE)
    is_read = (key >= begin) & (key < end)
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=is_read, other=0)
    for tile in range(first_tile, last_tile):
        key = tile * TILE + tl.arange(0, TILE)
        is_read = (key >= begin) & (key < end)
        slot = block.to(tl.int64) * kv_stride_block + (key % BLOCK_SIZE) * kv_stride_slot
        offsets = slot[:, None] + dim[None, :]
        block = tl.load(table_ptr + (key + TILE) // BLOCK_SIZE, mask=(key + TILE) < end, other=0)
        if IS_MASKED:
            mask = is_read[:, None] & is_dim[None, :]
            k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
            v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        elif HEAD_DIM == HEAD_DIM_PADDED:
            k = tl.load(k_ptr + offsets)
            v = tl.load(v_ptr + offsets)
        else:
            k = tl.load(k_ptr + offsets, mask=is_dim[None, :], other=0.0)
            v = tl.load(v_ptr + offsets, mask=is_dim[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * score_scale
        if logit_softcap is not None:
            # tanh(x) = 1 - 2 / (1 + exp(2 * x)), which is 1 from far below the bound on.
            tanh = 1 - 2 / (1 + tl.exp(tl.minimum(scores * (2 / logit_softcap), 40.0)))
            scores = logit_softcap * 1.4426950408889634 * tanh
        if slopes is not None:
            scores += slopes[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
        if IS_MASKED:
            is_visible = key[None, :] <= last_key[:, None]
            if sliding_window is not None:
                is_visible &= key[None, :] > position[:, None] - sliding_window
            if chunk_size is not None:
                is_visible &= key[None, :] >= (position // chunk_size * chunk_size)[:, None]
            scores = tl.where(is_visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        reference = new_maximum
        if IS_MASKED:  # a row may have seen no key yet
            reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        probabilities = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(maximum - reference)
        denominator = denominator * decay + tl.sum(probabilities, axis=1)
        accumulator = accumulator * decay[:, None]
        accumulator = tl.dot(probabilities.to(q.dtype), v.to(q.dtype), accumulator, input_precision="ieee")
        maximum = new_maximum
    return accumulator, denominator, maximum


@triton.jit
def find_request(query_start_loc_ptr, query_tile, num_requests, BLOCK_Q: tl.constexpr):
    """Return the request that a query tile of the packed layout belongs to.

    Request r has the tiles from (query_start_loc[r] - query_start_loc[0]) // BLOCK_Q + r on, which leaves it at least
    ceil(queries / BLOCK_Q); a tile that is left over finds no queries.
    """
    first_token = tl.load(query_start_loc_ptr)
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        first_tile = (tl.load(query_start_loc_ptr + middle) - first_token) // BLOCK_Q + middle
        if first_tile <= query_tile:
            low = middle + 1
        else:
            high = middle
    request = low - 1
    first_tile = (tl.load(query_start_loc_ptr + request) - first_token) // BLOCK_Q + request
    return request, query_tile - first_tile
