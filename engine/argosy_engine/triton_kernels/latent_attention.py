"""Attention over a paged cache of latents (MLA, DeepSeek-V2, arXiv 2405.04434), absorbed: one launch for decodes,
chunks and prompts; and what comes before it, in one launch.

All heads attend to the same vectors, so the rows of a query tile are queries times heads, and what was read of a token
serves its score, as latent and rotated key, and then its value, as latent alone. A latent is wider than the heads of
`paged_attention`: a tile has few keys, and heads are divided among programs. Layouts and segments are those of
`paged_attention`.

`latent_rope_and_cache` norms a token's latent, rotates its key and the queries' rotated parts (arXiv 2104.09864), and
writes latent and key to their slot of the paged cache. Arithmetic is in float32 and results are rounded once.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.launch import DeviceTraits, cdiv, device_traits, launch, next_power_of_2
from argosy_engine.triton_kernels.paged_attention import AttentionTiles, find_request
from argosy_engine.triton_kernels.split_kv import MAX_SEGMENTS, choose_num_segments, merge_segments

MAX_LATENT_DIM = 512
MAX_LATENT_ROPE_DIM = 128
_MIN_ROWS = 16
"""Rows of the smallest matrix product on tensor cores."""
_AMPLE_SHARED_MEMORY = 160 << 10
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def latent_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_query_len: int,
    scale: float,
    num_segments: int | None = None,
) -> torch.Tensor:
    """Attend causally from each request's last queries to its latents.

    The launches depend on shapes and on the Python arguments only. A request of no queries writes nothing.

    Args:
        q_latent: [T, num_heads, kv_lora_rank], queries brought to the latents; bfloat16, float16 or float32; any
            strides with contiguous heads.
        q_rope: [T, num_heads, qk_rope_head_dim], their rotated part, of the same dtype; likewise.
        kv_cache: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim] of the same dtype, the latent first. It
            holds this step's tokens already.
        query_start_loc: int32 [R + 1], index of each request's first query, and the end of the last one.
        seq_lens: int32 [R], tokens of each request including its queries.
        block_table: int32 [R, max_blocks]; entries that a request's tokens do not reach are not read.
        max_query_len: upper bound on the queries of a request. A request with more gets a wrong result.
        scale: factor on the scores.
        num_segments: parts that a request's keys are split into, in [1, 32]; None: chosen by shapes.

    Returns:
        The attended latents, [T, num_heads, kv_lora_rank]; rows that belong to no request are undefined.

    Raises:
        ValueError: a shape, dtype or option that the kernel does not support.
    """
    num_tokens, num_heads, rank = q_latent.shape
    rope = q_rope.shape[2]
    _check(q_latent, q_rope, kv_cache, num_segments)
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    num_requests, max_blocks = block_table.shape
    max_query_len = min(max_query_len, num_tokens)
    if num_requests == 0 or max_query_len == 0:
        return out
    traits = device_traits(q_latent.device)
    tiles = _choose_tiles(traits, q_latent.dtype, rank, max_query_len * num_heads)
    group = min(num_heads, tiles.block_m)
    block_q = tiles.block_m // group
    num_head_tiles = cdiv(num_heads, group)
    is_packed = max_query_len > block_q
    num_query_tiles = num_tokens // block_q + num_requests if is_packed else num_requests
    num_programs = num_query_tiles * num_head_tiles
    if num_segments is None:
        max_tiles = cdiv(max_blocks * kv_cache.shape[1], tiles.tile)
        num_segments = 1 if is_packed else choose_num_segments(traits, num_programs, max_tiles)
    lse = None
    target = out.unsqueeze(2)
    if num_segments > 1:
        target = out.new_empty((num_tokens, num_heads, num_segments, rank), dtype=torch.float32)
        lse = out.new_empty((num_tokens, num_heads, num_segments), dtype=torch.float32)
    launch(
        latent_attention_kernel,
        (num_programs, num_segments),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        out_ptr=target,
        lse_ptr=lse,
        q_latent_ptr=q_latent,
        q_rope_ptr=q_rope,
        cache_ptr=kv_cache,
        query_start_loc_ptr=query_start_loc,
        seq_lens_ptr=seq_lens,
        block_table_ptr=block_table,
        scale=float(scale),
        num_requests=num_requests,
        num_heads=num_heads,
        num_head_tiles=num_head_tiles,
        out_stride_token=target.stride(0),
        out_stride_head=target.stride(1),
        out_stride_segment=target.stride(2),
        q_latent_stride_token=q_latent.stride(0),
        q_latent_stride_head=q_latent.stride(1),
        q_rope_stride_token=q_rope.stride(0),
        q_rope_stride_head=q_rope.stride(1),
        cache_stride_block=kv_cache.stride(0),
        cache_stride_slot=kv_cache.stride(1),
        block_table_stride=block_table.stride(0),
        RANK=rank,
        RANK_PADDED=max(next_power_of_2(rank), 16),
        ROPE=rope,
        ROPE_PADDED=max(next_power_of_2(rope), 16),
        GROUP=group,
        BLOCK_SIZE=kv_cache.shape[1],
        BLOCK_M=tiles.block_m,
        BLOCK_Q=block_q,
        TILE=tiles.tile,
        IS_PACKED=is_packed,
    )
    if lse is not None:
        merge_segments(out, target, lse, query_start_loc)
    return out


@lru_cache(maxsize=256)
def _choose_tiles(traits: DeviceTraits, dtype: torch.dtype, rank: int, num_rows: int) -> AttentionTiles:
    """Choose the configuration for requests of up to `num_rows` queries times heads.

    A key is as wide as several heads. So a tile has few of them, and as many rows use each as registers hold sums over
    the latent of: no configuration may spill. Float32 is for comparisons: it is multiplied without tensor cores, in the
    smallest tiles.
    """
    if dtype is torch.float32:
        return AttentionTiles(_MIN_ROWS, 16, 8, 1)
    rows = min(max(next_power_of_2(num_rows), _MIN_ROWS), 64 if rank <= 256 else 32)
    tile = 32 if traits.shared_memory >= _AMPLE_SHARED_MEMORY else 16
    return AttentionTiles(rows, tile, 8 if rows > _MIN_ROWS else 4, 2)


def _check(
    q_latent: torch.Tensor, q_rope: torch.Tensor, kv_cache: torch.Tensor, num_segments: int | None
) -> None:
    rank, rope = q_latent.shape[2], q_rope.shape[2]
    if q_latent.dtype not in _DTYPES or not q_latent.dtype == q_rope.dtype == kv_cache.dtype:
        raise ValueError(
            f"queries of {q_latent.dtype} and {q_rope.dtype} and a cache of {kv_cache.dtype}: latent attention takes "
            "one dtype, bfloat16, float16 or float32"
        )
    if kv_cache.shape[2] != rank + rope or rank > MAX_LATENT_DIM or rope > MAX_LATENT_ROPE_DIM:
        raise ValueError(
            f"a cache of {kv_cache.shape[2]} elements per token for a kv_lora_rank of {rank} and a qk_rope_head_dim of "
            f"{rope}: it must have as many as both, which may be up to {MAX_LATENT_DIM} and {MAX_LATENT_ROPE_DIM}"
        )
    if num_segments is not None and not 1 <= num_segments <= MAX_SEGMENTS:
        raise ValueError(f"num_segments is {num_segments}: it must be between 1 and {MAX_SEGMENTS}")


@triton.jit(do_not_specialize=["num_requests", "block_table_stride"])
def latent_attention_kernel(
    out_ptr,
    lse_ptr,
    q_latent_ptr,
    q_rope_ptr,
    cache_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    scale,
    num_requests,
    num_heads,
    num_head_tiles,
    out_stride_token,
    out_stride_head,
    out_stride_segment,
    q_latent_stride_token,
    q_latent_stride_head,
    q_rope_stride_token,
    q_rope_stride_head,
    cache_stride_block,
    cache_stride_slot,
    block_table_stride,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    IS_PACKED: tl.constexpr,
):
    """Attend from one query tile and head tile to one segment of the request's keys.

    The order of programs is that of `paged_attention_kernel`. Slots that no row sees are not read.
    """
    head_tile = tl.program_id(0) % num_head_tiles
    query_tile = tl.program_id(0) // num_head_tiles
    if IS_PACKED:
        query_tile = tl.num_programs(0) // num_head_tiles - 1 - query_tile
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
    latent = tl.arange(0, RANK_PADDED)
    rope = tl.arange(0, ROPE_PADDED)
    query = query_tile * BLOCK_Q + row // GROUP
    token = (first_token + query).to(tl.int64)
    head = head_tile * GROUP + row % GROUP
    is_row = (query < query_len) & (row < BLOCK_Q * GROUP) & (head < num_heads)
    mask = is_row[:, None] & (latent < RANK)[None, :]
    q_latent = tl.load(
        q_latent_ptr
        + token[:, None] * q_latent_stride_token
        + head[:, None] * q_latent_stride_head
        + latent[None, :],
        mask=mask,
        other=0.0,
    )
    q_rope = tl.load(
        q_rope_ptr
        + token[:, None] * q_rope_stride_token
        + head[:, None] * q_rope_stride_head
        + rope[None, :],
        mask=is_row[:, None] & (rope < ROPE)[None, :],
        other=0.0,
    )
    position = context_len + query

    end = context_len + tl.minimum((query_tile + 1) * BLOCK_Q, query_len)
    first_tile = 0
    last_tile = tl.cdiv(end, TILE)
    segment = tl.program_id(1)
    if lse_ptr is not None:
        tiles_per_segment = tl.cdiv(last_tile, tl.num_programs(1))
        first_tile = segment * tiles_per_segment
        last_tile = tl.minimum(first_tile + tiles_per_segment, last_tile)

    score_scale = scale * 1.4426950408889634  # log2(e): the softmax is in base 2
    accumulator = tl.zeros([BLOCK_M, RANK_PADDED], tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    table_ptr = block_table_ptr + request.to(tl.int64) * block_table_stride
    for tile in range(first_tile, last_tile):
        key = tile * TILE + tl.arange(0, TILE)
        is_read = key < end
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=is_read, other=0)
        slot = cache_ptr + block.to(tl.int64) * cache_stride_block + (key % BLOCK_SIZE) * cache_stride_slot
        k_latent = tl.load(
            slot[:, None] + latent[None, :], mask=is_read[:, None] & (latent < RANK)[None, :], other=0.0
        )
        k_rope = tl.load(
            slot[:, None] + RANK + rope[None, :], mask=is_read[:, None] & (rope < ROPE)[None, :], other=0.0
        )
        scores = tl.dot(q_latent, tl.trans(k_latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee") * score_scale
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        # A row may have seen no key yet.
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        probabilities = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(maximum - reference)
        denominator = denominator * decay + tl.sum(probabilities, axis=1)
        accumulator = accumulator * decay[:, None]
        accumulator = tl.dot(probabilities.to(k_latent.dtype), k_latent, accumulator, input_precision="ieee")
        maximum = new_maximum

    is_empty = denominator == 0.0  # a row beyond the queries, or one that sees no key of this segment
    denominator = tl.where(is_empty, 1.0, denominator)
    if lse_ptr is not None:
        lse = tl.where(is_empty, float("-inf"), maximum + tl.log2(denominator))
        rows = token * num_heads + head
        tl.store(lse_ptr + rows * tl.num_programs(1) + segment, lse, mask=is_row)
    attended = accumulator * (1.0 / denominator)[:, None]
    out_offsets = token[:, None] * out_stride_token + head[:, None] * out_stride_head + latent[None, :]
    tl.store(
        out_ptr + out_offsets + segment * out_stride_segment, attended.to(out_ptr.dtype.element_ty), mask=mask
    )


_FEW_ELEMENTS, _MANY_ELEMENTS = 1024, 4096
"""Elements of queries that a program rotates, in small batches and in those that fill the device anyway."""


@triton.jit
def _latent_rope_and_cache(
    q_ptr,
    compressed_ptr,
    positions_ptr,
    cosines_ptr,
    sines_ptr,
    slots_ptr,
    cache_ptr,
    norm_ptr,
    eps,
    q_stride,
    compressed_stride,
    table_stride,
    cache_block_stride,
    cache_slot_stride,
    num_heads,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    HALF: tl.constexpr = ROPE // 2
    half = tl.arange(0, HALF_BLOCK)[None, :]
    table = tl.load(positions_ptr + token).to(tl.int64) * table_stride + half
    cosine = tl.load(cosines_ptr + table, mask=half < HALF, other=0.0)
    sine = tl.load(sines_ptr + table, mask=half < HALF, other=0.0)
    if program == 0:
        compressed = compressed_ptr + token * compressed_stride
        cached = cache_ptr + slot // BLOCK_SIZE * cache_block_stride + slot % BLOCK_SIZE * cache_slot_stride
        column = tl.arange(0, RANK_BLOCK)
        mask = column < RANK
        latent = tl.load(compressed + column, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(norm_ptr + column, mask=mask, other=0.0).to(tl.float32)
        latent *= tl.rsqrt(tl.sum(latent * latent, axis=0) / RANK + eps) * weight
        tl.store(cached + column, latent.to(cache_ptr.dtype.element_ty), mask=mask)
        _rotate(
            compressed + RANK, cached + RANK, tl.full([1, 1], 0, tl.int32), 0, half < HALF, half, cosine, sine,
            HALF,
        )  # fmt: skip
    else:
        head = ((program - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        q = q_ptr + token * q_stride + NOPE
        is_rotated = (head < num_heads) & (half < HALF)
        _rotate(q, q, head, NOPE + ROPE, is_rotated, half, cosine, sine, HALF)


@triton.jit
def _rotate(
    x,
    out,
    head,
    head_stride,
    mask,
    half,
    cosine,
    sine,
    HALF: tl.constexpr,
):
    """Rotate halves of parts of heads from x and write them to out; head is [heads, 1]."""
    first_at = head * head_stride + half
    second_at = first_at + HALF
    first = tl.load(x + first_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + second_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + first_at, (first * cosine - second * sine).to(out.dtype.element_ty), mask=mask)
    tl.store(out + second_at, (second * cosine + first * sine).to(out.dtype.element_ty), mask=mask)


def latent_rope_and_cache(
    q: torch.Tensor,
    compressed: torch.Tensor,
    positions: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    norm: torch.Tensor,
    eps: float,
) -> None:
    """Rotate the queries in place; norm the latents, rotate the keys, and write both to the cache.

    Args:
        q: [T, num_heads, qk_nope_head_dim + qk_rope_head_dim], of which the end is rotated; float32, bfloat16 or
            float16; heads contiguous.
        compressed: [T, kv_lora_rank + qk_rope_head_dim], of q's dtype; rows may be strided. It is left as it is.
        positions: int32 or int64 [T], below the length of the tables.
        cosines: float32 [positions, qk_rope_head_dim / 2].
        sines: the same.
        slot_mapping: int64 [T], block * block_size + offset. Rows with -1 are padding and left alone.
        kv_cache: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], of q's dtype.
        norm: weight [kv_lora_rank] of the RMSNorm of latents.
        eps: of this norm.
    """
    num_heads, head_dim = q.shape[1:]
    rope = 2 * cosines.shape[1]
    rank = kv_cache.shape[2] - rope
    tokens, traits = len(slot_mapping), device_traits(q.device)
    for elements in (_MANY_ELEMENTS, _FEW_ELEMENTS):
        heads = min(next_power_of_2(num_heads), max(elements // next_power_of_2(rope), 1))
        programs = cdiv(num_heads, heads)
        if tokens * (programs + 1) >= 4 * traits.num_sms:
            break
    launch(
        _latent_rope_and_cache,
        (tokens, programs + 1),
        num_warps=4,
        num_stages=1,
        q_ptr=q,
        compressed_ptr=compressed,
        positions_ptr=positions,
        cosines_ptr=cosines,
        sines_ptr=sines,
        slots_ptr=slot_mapping,
        cache_ptr=kv_cache,
        norm_ptr=norm,
        eps=eps,
        q_stride=q.stride(0),
        compressed_stride=compressed.stride(0),
        table_stride=cosines.stride(0),
        cache_block_stride=kv_cache.stride(0),
        cache_slot_stride=kv_cache.stride(1),
        num_heads=num_heads,
        BLOCK_SIZE=kv_cache.shape[1],
        RANK=rank,
        RANK_BLOCK=next_power_of_2(rank),
        NOPE=head_dim - rope,
        ROPE=rope,
        HALF_BLOCK=next_power_of_2(max(rope // 2, 1)),
        HEADS=heads,
    )
