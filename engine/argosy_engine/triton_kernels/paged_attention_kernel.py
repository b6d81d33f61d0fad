"""The kernel of paged attention: one query tile and KV head per program.

A program computes up to BLOCK_M rows, which are the tile's queries times the query heads that share the KV head (GQA
packing), so that a key is read once for all heads of its group. It walks the keys in tiles of TILE positions with the
online softmax of FlashAttention-2 (arXiv 2307.08691), in base 2. Tiles of keys that every row masks (the future, or
left of the sliding window) are not visited, and slots that no row sees are not read: whatever they hold, NaN included,
stays out of the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from argosy_engine.triton_kernels.fp8_rows import to_fp8


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


@triton.jit
def _attend(
    accumulator,
    denominator,
    maximum,
    q,
    position,
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
    kv_stride_block,
    kv_stride_slot,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Visit the key tiles from first_tile to last_tile; unless IS_MASKED, every row sees all of their keys.

    Keys are read from position `begin` to `end` only.
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
        if IS_MASKED:
            is_visible = key[None, :] <= position[:, None]
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
    k_scale_ptr,
    v_scale_ptr,
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

    end = context_len + tl.minimum((query_tile + 1) * BLOCK_Q, query_len)
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
