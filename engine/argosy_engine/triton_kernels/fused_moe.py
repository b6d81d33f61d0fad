"""A mixture of experts as grouped matrix products over tokens sorted by expert (arXiv 2211.15841), and the routing of
tokens to experts.

Five launches: two to route, the experts' gate and up projections with the activation (without a gate, up alone), their
down projections, either of the two with the routing weight, and the sum over a token's experts. Grids have the size of
the worst case; programs past the last tile return at once. Weights in FP8 are widened to the activations' dtype on
their way to the tensor cores, and so are those in MXFP4 (OCP Microscaling Formats 1.0), by `tl.dot_scaled`: small
batches are bound by reading weights, of which this leaves a half or a quarter, and activations are not quantised.

Routing is top-k, then a counting sort of (token, expert) pairs by expert, without synchronisation: how many pairs an
expert gets is known on the device alone, so buffers have the size of the worst case. The sort is stable and uses no
atomics, hence results do not vary between runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.activations import gelu_tanh, silu, squared_relu, swigluoai
from argosy_engine.triton_kernels.launch import DeviceTraits, cdiv, device_traits, launch, next_power_of_2

_TILE_ELEMENTS = 2048
"""Elements of the (rows, experts) tiles that a program holds in registers: 8 per thread of 8 warps."""
_MAX_CHUNK_PAIRS = 512
"""Pairs that one program sorts. Each reads the counts of all chunks, so chunks grow with the batch up to here."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Which expert computes which token, on the device. A pair is token * k + rank.

    A tile is up to `tile_rows` consecutive entries of `pairs` with the same expert.
    """

    weights: torch.Tensor
    """float32 [T, k]: of each chosen expert, highest logit first. 0 in padding rows."""
    experts: torch.Tensor
    """int32 [T, k], counted from the first one held; -1 for others and in padding rows."""
    pairs: torch.Tensor
    """int32 [T * k], sorted by expert, then by pair. Undefined past the pairs that have one."""
    tile_experts: torch.Tensor
    """int32 [max_tiles]. Undefined past `num_tiles`, as the next two."""
    tile_starts: torch.Tensor
    """int32 [max_tiles]: index into `pairs`."""
    tile_ends: torch.Tensor
    """int32 [max_tiles]: end of the expert's pairs, so a tile's rows end there or after `tile_rows`."""
    num_tiles: torch.Tensor
    """int32 [1]"""
    tile_rows: int


@triton.jit
def _of_best_groups(
    wanted,
    expert,
    size: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_TAKEN: tl.constexpr,
    ADDS_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
):
    """Return the scores [ROWS, experts] with -inf outside of each row's best groups."""
    group = expert // size
    index = tl.arange(0, GROUP_BLOCK)[None, :]
    best_of = tl.full([ROWS, GROUP_BLOCK], -float("inf"), dtype=tl.float32)
    for number in range(NUM_GROUPS):
        of_group = tl.where(group == number, wanted, -float("inf"))
        best, place = tl.max(of_group, axis=1, return_indices=True)
        if ADDS_TWO:
            best += tl.max(tl.where(expert == place[:, None], -float("inf"), of_group), axis=1)
        best_of = tl.where(index == number, best[:, None], best_of)
    is_taken = (group < 0) & (wanted > 0)
    for _ in range(GROUPS_TAKEN):
        _, place = tl.max(best_of, axis=1, return_indices=True)
        is_taken = is_taken | (group == place[:, None])
        best_of = tl.where(index == place[:, None], -float("inf"), best_of)
    return tl.where(is_taken, wanted, -float("inf"))


@triton.jit(do_not_specialize=["num_tokens"])
def _route(
    logits_ptr,
    correction_ptr,
    scales_ptr,
    slots_ptr,
    weights_ptr,
    experts_ptr,
    counts_ptr,
    logits_stride,
    num_tokens,
    scaling,
    epsilon,
    K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    FIRST_HELD: tl.constexpr,
    NUM_HELD: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    NORMALISES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_TAKEN: tl.constexpr,
    ADDS_TWO: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0)
    expert = tl.arange(0, EXPERT_BLOCK)[None, :]
    rank = tl.arange(0, K_BLOCK)[None, :]
    counts = tl.zeros([EXPERT_BLOCK], dtype=tl.int32)
    for start in range(0, CHUNK, ROWS):
        row = chunk * CHUNK + start + tl.arange(0, ROWS)
        is_row = row < num_tokens
        is_token = is_row
        if slots_ptr is not None:
            is_token = tl.load(slots_ptr + row, mask=is_row, other=-1) >= 0
        mask = is_token[:, None] & (expert < NUM_EXPERTS)
        offset = row.to(tl.int64)[:, None] * logits_stride + expert
        logits = tl.load(logits_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        # Finite, NaN included: below, -inf marks what must not be chosen, and a chosen expert must exist.
        logits = tl.where(logits > -3.0e38, logits, -3.0e38)
        logits = tl.where(expert < NUM_EXPERTS, logits, -float("inf"))
        top = tl.max(logits, axis=1)
        if IS_SIGMOID:
            scores = tl.sigmoid(logits)
            total = tl.full([ROWS], 1.0, dtype=tl.float32)
        else:
            scores = tl.exp(logits - top[:, None])
            total = tl.sum(scores, axis=1)
        left = logits
        if correction_ptr is not None or GROUPS_TAKEN < NUM_GROUPS:
            left = scores / total[:, None]
            if correction_ptr is not None:
                left += tl.load(correction_ptr + expert, mask=expert < NUM_EXPERTS, other=0.0)
                left = tl.where(left > -1.0e38, left, -1.0e38)
            left = tl.where(expert < NUM_EXPERTS, left, -float("inf"))
        if GROUPS_TAKEN < NUM_GROUPS:
            left = _of_best_groups(
                left, expert, NUM_EXPERTS // NUM_GROUPS, NUM_GROUPS, GROUPS_TAKEN, ADDS_TWO, ROWS, GROUP_BLOCK
            )
        weights = tl.zeros([ROWS, K_BLOCK], dtype=tl.float32)
        chosen = tl.zeros([ROWS, K_BLOCK], dtype=tl.int32)
        for index in range(K):
            best, choice = tl.max(left, axis=1, return_indices=True)
            is_choice = expert == choice[:, None]
            if IS_SIGMOID or correction_ptr is not None or GROUPS_TAKEN < NUM_GROUPS:
                score = tl.sum(tl.where(is_choice, scores, 0.0), axis=1)
            else:  # takes fewer registers
                score = tl.exp(best - top)
            weights = tl.where(rank == index, score[:, None], weights)
            chosen = tl.where(rank == index, choice[:, None], chosen)
            left = tl.where(is_choice, -float("inf"), left)
            counts += tl.sum((is_choice & is_token[:, None]).to(tl.int32), axis=0)
        if NORMALISES:
            total = tl.sum(weights, axis=1) + epsilon
        weights = tl.where(is_token[:, None], weights / total[:, None] * scaling, 0.0)
        if scales_ptr is not None:
            weights *= tl.load(scales_ptr + chosen, mask=rank < K, other=0.0)
        chosen -= FIRST_HELD
        chosen = tl.where(is_token[:, None] & (chosen >= 0) & (chosen < NUM_HELD), chosen, -1)
        pair = row[:, None] * K + rank
        store_mask = is_row[:, None] & (rank < K)
        tl.store(weights_ptr + pair, weights, mask=store_mask)
        tl.store(experts_ptr + pair, chosen, mask=store_mask)
    column = tl.arange(0, EXPERT_BLOCK) - FIRST_HELD
    tl.store(counts_ptr + chunk * NUM_HELD + column, counts, mask=(column >= 0) & (column < NUM_HELD))


@triton.jit(do_not_specialize=["num_pairs", "num_chunks"])
def _sort_by_expert(
    experts_ptr,
    counts_ptr,
    pairs_ptr,
    tile_experts_ptr,
    tile_starts_ptr,
    tile_ends_ptr,
    num_tiles_ptr,
    num_pairs,
    num_chunks,
    NUM_EXPERTS: tl.constexpr,
    CHUNK_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    chunk = tl.program_id(0)
    expert = tl.arange(0, EXPERT_BLOCK)
    is_expert = expert < NUM_EXPERTS
    total = tl.zeros([EXPERT_BLOCK], dtype=tl.int32)
    before = tl.zeros([EXPERT_BLOCK], dtype=tl.int32)
    for first in range(0, num_chunks, PAIRS):
        other = first + tl.arange(0, PAIRS)
        counts = tl.load(
            counts_ptr + other[:, None] * NUM_EXPERTS + expert[None, :],
            mask=(other < num_chunks)[:, None] & is_expert[None, :],
            other=0,
        )
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((other < chunk)[:, None], counts, 0), axis=0)
    end = tl.cumsum(total, axis=0)

    # Every program writes its share of the tiles: of each expert, tiles chunk, chunk + num_chunks, ...
    tiles = (total + TILE_ROWS - 1) // TILE_ROWS
    first_tile = tl.cumsum(tiles, axis=0) - tiles
    for nth in range(chunk, tl.max(tiles, axis=0), num_chunks):
        tile = first_tile + nth
        is_tile = nth < tiles
        tl.store(tile_experts_ptr + tile, expert, mask=is_tile)
        tl.store(tile_starts_ptr + tile, end - total + nth * TILE_ROWS, mask=is_tile)
        tl.store(tile_ends_ptr + tile, end, mask=is_tile)
    if chunk == 0:
        tl.store(num_tiles_ptr, tl.sum(tiles, axis=0))

    place = end - total + before
    for first in range(0, CHUNK_PAIRS, PAIRS):
        index = first + tl.arange(0, PAIRS)
        pair = chunk * CHUNK_PAIRS + index
        is_pair = (index < CHUNK_PAIRS) & (pair < num_pairs)
        chosen = tl.load(experts_ptr + pair, mask=is_pair, other=-1)
        is_chosen = (chosen[:, None] == expert[None, :]).to(tl.int32)
        earlier = tl.cumsum(is_chosen, axis=0) - is_chosen
        target = tl.sum(is_chosen * (earlier + place[None, :]), axis=1)
        tl.store(pairs_ptr + target, pair, mask=chosen >= 0)
        place += tl.sum(is_chosen, axis=0)


def route(
    logits: torch.Tensor,
    experts_per_token: int,
    *,
    normalises: bool,
    tile_rows: int,
    slot_mapping: torch.Tensor | None = None,
    held: range | None = None,
    is_sigmoid: bool = False,
    correction: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
    num_groups: int = 1,
    groups_per_token: int = 1,
    adds_two: bool = True,
    scaling: float = 1.0,
    epsilon: float = 1e-20,
) -> Routing:
    """Choose each token's experts by their scores and top-k, and sort the pairs by expert.

    Args:
        logits: [T, num_experts], float32, bfloat16 or float16. Of equal ones the lower expert is chosen first; NaN
            counts as the lowest number.
        experts_per_token: k, at most num_experts.
        normalises: whether to scale a token's k weights to sum to 1 (`norm_topk_prob`).
        tile_rows: rows of the tiles, a power of two.
        slot_mapping: int64 [T]; rows with -1 are padding and get no expert.
        held: experts to compute; pairs with others get none. None: all.
        is_sigmoid: scores are the logits' sigmoids, instead of their softmax.
        correction: float32 [num_experts], added to scores where experts are chosen, and to weights not.
        expert_scales: float32 [num_experts], factors on the weights.
        num_groups: of consecutive experts, as many in each.
        groups_per_token: a token takes experts of this many groups, those of the highest scores.
        adds_two: a group's score is the sum of its two best, instead of its best.
        scaling: factor on the weights.
        epsilon: added to the sum by which weights are divided to sum to 1.
    """
    tokens, num_experts = logits.shape
    held = range(num_experts) if held is None else held
    held_block = next_power_of_2(len(held))
    k, device = experts_per_token, logits.device
    expert_block = next_power_of_2(num_experts)
    rows = max(_TILE_ELEMENTS // max(expert_block, next_power_of_2(k)), 1)
    keeps_scores = is_sigmoid or correction is not None or groups_per_token < num_groups
    if keeps_scores:  # registers hold them beside what is left to choose from
        rows = max(rows // 2, 1)
    most = max(_MAX_CHUNK_PAIRS // next_power_of_2(k), 1)
    chunk = min(next_power_of_2(max(cdiv(tokens, 32), 1)), most)
    num_chunks = cdiv(tokens, chunk)
    pairs = tokens * k
    max_tiles = min(pairs // tile_rows + min(len(held), pairs), pairs)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    counts = empty(num_chunks, len(held))
    routing = Routing(
        weights=empty(tokens, k, dtype=torch.float32),
        experts=empty(tokens, k),
        pairs=empty(pairs),
        tile_experts=empty(max_tiles),
        tile_starts=empty(max_tiles),
        tile_ends=empty(max_tiles),
        num_tiles=empty(1),
        tile_rows=tile_rows,
    )
    launch(
        _route,
        (num_chunks,),
        num_warps=8 if min(rows, chunk) * expert_block * (1 + keeps_scores) >= _TILE_ELEMENTS else 4,
        num_stages=1,
        logits_ptr=logits,
        correction_ptr=correction,
        scales_ptr=expert_scales,
        slots_ptr=slot_mapping,
        weights_ptr=routing.weights,
        experts_ptr=routing.experts,
        counts_ptr=counts,
        logits_stride=logits.stride(0),
        num_tokens=tokens,
        scaling=scaling,
        epsilon=epsilon,
        K=k,
        NUM_EXPERTS=num_experts,
        FIRST_HELD=held.start,
        NUM_HELD=len(held),
        IS_SIGMOID=is_sigmoid,
        NORMALISES=normalises,
        NUM_GROUPS=num_groups,
        GROUPS_TAKEN=groups_per_token,
        ADDS_TWO=adds_two,
        GROUP_BLOCK=next_power_of_2(num_groups),
        CHUNK=chunk,
        ROWS=min(rows, chunk),
        K_BLOCK=next_power_of_2(k),
        EXPERT_BLOCK=expert_block,
    )
    launch(
        _sort_by_expert,
        (num_chunks,),
        num_warps=4,
        num_stages=1,
        experts_ptr=routing.experts,
        counts_ptr=counts,
        pairs_ptr=routing.pairs,
        tile_experts_ptr=routing.tile_experts,
        tile_starts_ptr=routing.tile_starts,
        tile_ends_ptr=routing.tile_ends,
        num_tiles_ptr=routing.num_tiles,
        num_pairs=pairs,
        num_chunks=num_chunks,
        NUM_EXPERTS=len(held),
        CHUNK_PAIRS=chunk * k,
        PAIRS=min(max(_TILE_ELEMENTS // held_block, 1), 32),
        EXPERT_BLOCK=held_block,
        TILE_ROWS=tile_rows,
    )
    return routing


Activation = Literal["silu", "gelu", "swigluoai", "relu2"]
_GROUP = 8
"""Tiles that run over the same columns of the weights one after another, so that they find them in the L2 cache."""


@triton.jit
def _tile_and_column(num_tiles, columns, GROUP: tl.constexpr):
    """Return this program's tile and column; the tile may be num_tiles or above, where there is nothing to do."""
    program = tl.program_id(0)
    first = program // (GROUP * columns) * GROUP
    size = tl.minimum(tl.maximum(num_tiles - first, 1), GROUP)
    within = program % (GROUP * columns)
    column = within // size
    tile = first + within % size
    # A group that is not full has fewer programs to use: those past its columns have no tile.
    return tl.where(column < columns, tile, num_tiles), column


@triton.jit
def _gate_up_experts(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    routing_weights_ptr,
    pairs_ptr,
    tile_experts_ptr,
    tile_starts_ptr,
    tile_ends_ptr,
    num_tiles_ptr,
    x_stride,
    expert_stride,
    weight_stride,
    expert_scale_stride,
    scale_stride,
    scale_block_stride,
    hidden,
    inner,
    columns,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    IS_MXFP4: tl.constexpr,
    IS_EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    num_tiles = tl.load(num_tiles_ptr)
    tile, column = _tile_and_column(num_tiles, columns, GROUP)
    if tile >= num_tiles:
        return
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    row = tl.load(tile_starts_ptr + tile) + tl.arange(0, BLOCK_M)
    is_row = row < tl.load(tile_ends_ptr + tile)
    pair = tl.load(pairs_ptr + row, mask=is_row, other=0)
    token = (pair // K).to(tl.int64)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Columns past the end wrap around, so that loads need no mask for them; they are not stored.
    gate_row = n % inner
    x = x_ptr + token[:, None] * x_stride + k[None, :]
    if IS_MXFP4:  # two columns in a byte
        stored = tl.arange(0, BLOCK_K // 2)
    else:
        stored = k
    gate_weight = weight_ptr + expert * expert_stride + gate_row[None, :] * weight_stride + stored[:, None]
    if ACTIVATION == "relu2":  # there is no gate
        up_weight = gate_weight
    else:
        up_weight = gate_weight + inner * weight_stride
        gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if SCALE_BLOCK > 0 or IS_MXFP4:
        scale = scale_ptr + expert * expert_scale_stride + gate_row * scale_stride
    for start in range(0, hidden, BLOCK_K):
        if IS_MXFP4:
            a = tl.load(x + start, mask=is_row[:, None], other=0.0)
            exponents = scale[:, None] + start // 32 + tl.arange(0, BLOCK_K // 32)[None, :]
            if ACTIVATION != "relu2":
                gate_b = tl.load(gate_weight + start // 2)
                gate = tl.dot_scaled(a, None, "bf16", gate_b, tl.load(exponents), "e2m1", gate)
                exponents += inner * scale_stride
            up_b = tl.load(up_weight + start // 2)
            up = tl.dot_scaled(a, None, "bf16", up_b, tl.load(exponents), "e2m1", up)
        elif IS_EVEN:
            a = tl.load(x + start, mask=is_row[:, None], other=0.0)
            if ACTIVATION != "relu2":
                gate_b = tl.load(gate_weight + start)
            up_b = tl.load(up_weight + start)
        else:
            in_row = start + k < hidden
            a = tl.load(x + start, mask=is_row[:, None] & in_row[None, :], other=0.0)
            if ACTIVATION != "relu2":
                gate_b = tl.load(gate_weight + start, mask=in_row[:, None], other=0.0)
            up_b = tl.load(up_weight + start, mask=in_row[:, None], other=0.0)
        if SCALE_BLOCK > 0:
            factor = scale + start // SCALE_BLOCK * scale_block_stride
            if ACTIVATION != "relu2":
                sums = tl.dot(a, gate_b.to(a.dtype), input_precision=PRECISION)
                gate += sums * tl.load(factor)[None, :]
                factor += inner * scale_stride
            up += tl.dot(a, up_b.to(a.dtype), input_precision=PRECISION) * tl.load(factor)[None, :]
        elif not IS_MXFP4:
            if ACTIVATION != "relu2":
                gate = tl.dot(a, gate_b.to(a.dtype), gate, input_precision=PRECISION)
            up = tl.dot(a, up_b.to(a.dtype), up, input_precision=PRECISION)
    if scale_ptr is not None and SCALE_BLOCK == 0 and not IS_MXFP4:
        scale = scale_ptr + expert * expert_scale_stride + gate_row * scale_stride
        if ACTIVATION != "relu2":
            gate *= tl.load(scale)[None, :]
            scale += inner * scale_stride
        up *= tl.load(scale)[None, :]
    if routing_weights_ptr is not None:
        routing_weight = tl.load(routing_weights_ptr + pair, mask=is_row, other=0.0)
        if ACTIVATION != "relu2":
            gate *= routing_weight[:, None]
        up *= routing_weight[:, None]
    if bias_ptr is not None:
        if ACTIVATION == "relu2":
            bias = bias_ptr + expert * inner + gate_row
        else:
            bias = bias_ptr + expert * 2 * inner + gate_row
            gate += tl.load(bias).to(tl.float32)[None, :]
            bias += inner
        up += tl.load(bias).to(tl.float32)[None, :]
    if ACTIVATION == "gelu":
        product = gelu_tanh(gate) * up
    elif ACTIVATION == "swigluoai":
        product = swigluoai(gate, up)
    elif ACTIVATION == "relu2":
        product = squared_relu(up)
    else:
        product = silu(gate) * up
    out = out_ptr + row.to(tl.int64)[:, None] * inner + n[None, :]
    tl.store(out, product.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (n < inner)[None, :])


@triton.jit
def _down_experts(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    routing_weights_ptr,
    pairs_ptr,
    tile_experts_ptr,
    tile_starts_ptr,
    tile_ends_ptr,
    num_tiles_ptr,
    expert_stride,
    weight_stride,
    expert_scale_stride,
    scale_stride,
    scale_block_stride,
    hidden,
    inner,
    columns,
    SCALE_BLOCK: tl.constexpr,
    IS_MXFP4: tl.constexpr,
    IS_EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    num_tiles = tl.load(num_tiles_ptr)
    tile, column = _tile_and_column(num_tiles, columns, GROUP)
    if tile >= num_tiles:
        return
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    row = tl.load(tile_starts_ptr + tile) + tl.arange(0, BLOCK_M)
    is_row = row < tl.load(tile_ends_ptr + tile)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x = x_ptr + row.to(tl.int64)[:, None] * inner + k[None, :]
    if IS_MXFP4:
        stored = tl.arange(0, BLOCK_K // 2)
    else:
        stored = k
    weight = weight_ptr + expert * expert_stride + (n % hidden)[None, :] * weight_stride + stored[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if SCALE_BLOCK > 0 or IS_MXFP4:
        scale = scale_ptr + expert * expert_scale_stride + (n % hidden) * scale_stride
    for start in range(0, inner, BLOCK_K):
        if IS_MXFP4:
            a = tl.load(x + start, mask=is_row[:, None], other=0.0)
            b = tl.load(weight + start // 2)
            exponents = tl.load(scale[:, None] + start // 32 + tl.arange(0, BLOCK_K // 32)[None, :])
            total = tl.dot_scaled(a, None, "bf16", b, exponents, "e2m1", total)
        elif IS_EVEN:
            a = tl.load(x + start, mask=is_row[:, None], other=0.0)
            b = tl.load(weight + start)
        else:
            in_row = start + k < inner
            a = tl.load(x + start, mask=is_row[:, None] & in_row[None, :], other=0.0)
            b = tl.load(weight + start, mask=in_row[:, None], other=0.0)
        if SCALE_BLOCK > 0:
            factor = tl.load(scale + start // SCALE_BLOCK * scale_block_stride)
            total += tl.dot(a, b.to(a.dtype), input_precision=PRECISION) * factor[None, :]
        elif not IS_MXFP4:
            total = tl.dot(a, b.to(a.dtype), total, input_precision=PRECISION)
    if scale_ptr is not None and SCALE_BLOCK == 0 and not IS_MXFP4:
        total *= tl.load(scale_ptr + expert * expert_scale_stride + (n % hidden) * scale_stride)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + expert * hidden + n % hidden).to(tl.float32)[None, :]
    pair = tl.load(pairs_ptr + row, mask=is_row, other=0)
    if routing_weights_ptr is not None:
        total *= tl.load(routing_weights_ptr + pair, mask=is_row, other=0.0)[:, None]
    out = out_ptr + pair.to(tl.int64)[:, None] * hidden + n[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (n < hidden)[None, :])


@triton.jit
def _sum_experts(x_ptr, experts_ptr, out_ptr, out_stride, hidden, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for rank in range(K):
        pair = token * K + rank
        # A pair without an expert was not computed: what is there may be anything.
        end = tl.where(tl.load(experts_ptr + pair) >= 0, hidden, 0)
        total += tl.load(x_ptr + pair * hidden + column, mask=column < end, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * out_stride + column, total.to(out_ptr.dtype.element_ty), mask=column < hidden)


def fused_moe(
    x: torch.Tensor,
    logits: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    experts_per_token: int,
    *,
    normalises: bool,
    scales_inputs: bool = False,
    activation: Activation = "silu",
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    first_expert: int = 0,
    out: torch.Tensor | None = None,
    **choice: Any,
) -> torch.Tensor:
    """Run each token through its k best experts and return the weighted sum, [T, hidden].

    Experts are gated MLPs or, with the activation `relu2`, have no gate.

    The weights may be those of consecutive experts only, of which a token may then have fewer than k, or none.

    Args:
        x: [T, hidden], float32, bfloat16 or float16; rows may be strided.
        logits: the router's, [T, number of all experts].
        w1: gate and up projections, [num_experts, 2 * inner, hidden], or up alone, [num_experts, inner, hidden]; x's
            dtype, float8_e4m3fn, or uint8 of pairs in MXFP4 (e2m1), [num_experts, rows, hidden / 2], the first in the
            lower half of a byte, for x in bfloat16.
        w2: down projections, [num_experts, hidden, inner], w1's dtype.
        experts_per_token: k.
        normalises: whether to scale a token's k weights to sum to 1 (`norm_topk_prob`).
        scales_inputs: whether a token's weights are factors on what its experts get, instead of on what they give.
        activation: of the gates; `gelu` by its approximation with tanh, `swigluoai` that of gpt-oss (`activations`),
            `relu2` the square of a ReLU, without a gate.
        w1_scale: float32 factors of FP8 weights: [num_experts], or one for each of w1's rows, [num_experts, rows], or
            for each 128 inputs of a row, [num_experts, blocks, rows]. Of MXFP4: uint8 exponents of 2, plus 127, for
            each 32 inputs, [num_experts, rows, hidden / 32].
        w2_scale: [num_experts], [num_experts, hidden] or [num_experts, blocks, hidden]; of MXFP4 [num_experts, hidden,
            inner / 32].
        w1_bias: one for each of w1's rows, contiguous; None: none.
        w2_bias: [num_experts, hidden], contiguous.
        slot_mapping: int64 [T]; rows with -1 are padding: no expert computes them and their output is 0.
        first_expert: index of the first expert of the weights.
        out: [T, hidden]; default: allocated with x's dtype.
        choice: further arguments of `route`, for other ways to choose experts.

    Raises:
        ValueError: the device has no FP8 for FP8 weights, or quantised weights have no scales, or others have them, or
            x is not in bfloat16 beside MXFP4.
    """
    tokens, hidden = x.shape
    is_fp8, is_mxfp4 = w1.dtype is torch.float8_e4m3fn, w1.dtype is torch.uint8
    inner, k = w2.shape[2] * (2 if is_mxfp4 else 1), experts_per_token
    traits = device_traits(x.device)
    if is_mxfp4 and (x.dtype is not torch.bfloat16 or hidden % 32 or inner % 32):
        raise ValueError("weights in MXFP4 need activations in bfloat16 and sizes that are multiples of 32")
    if is_fp8 and not traits.has_fp8:
        raise ValueError("FP8 weights on a device without FP8: load a checkpoint in bfloat16")
    if any((is_fp8 or is_mxfp4) != (each is not None) for each in (w1_scale, w2_scale)):
        raise ValueError("w1_scale and w2_scale belong to quantised weights, which need both")
    tile_rows = _tile_rows(tokens * k / logits.shape[1], x.dtype)
    held = range(first_expert, first_expert + len(w1))
    routing = route(
        logits, k, normalises=normalises, tile_rows=tile_rows, slot_mapping=slot_mapping, held=held, **choice
    )
    activated = torch.empty((tokens * k, inner), dtype=x.dtype, device=x.device)
    products = torch.empty((tokens * k, hidden), dtype=x.dtype, device=x.device)
    if out is None:
        out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    products_at_once = 1 if activation == "relu2" else 2
    has_blocks = w1_scale is not None and w1_scale.dim() == 3
    tiling = _Tiling.choose(
        traits,
        x.dtype,
        w1.dtype,
        tile_rows,
        depth=hidden,
        products=products_at_once,
        has_blocks=has_blocks,
    )
    columns = cdiv(inner, tiling.block_n)
    launch(
        _gate_up_experts,
        (_programs(routing, columns),),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        x_ptr=x,
        weight_ptr=w1,
        scale_ptr=w1_scale,
        bias_ptr=w1_bias,
        out_ptr=activated,
        routing_weights_ptr=routing.weights if scales_inputs else None,
        **_tiles(routing),
        x_stride=x.stride(0),
        expert_stride=w1.stride(0),
        weight_stride=w1.stride(1),
        **_scale_strides(w1_scale),
        hidden=hidden,
        inner=inner,
        columns=columns,
        K=k,
        ACTIVATION=activation,
        **tiling.constants(hidden),
    )
    tiling = _Tiling.choose(
        traits, x.dtype, w2.dtype, tile_rows, depth=inner, products=1, has_blocks=has_blocks
    )
    columns = cdiv(hidden, tiling.block_n)
    launch(
        _down_experts,
        (_programs(routing, columns),),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        x_ptr=activated,
        weight_ptr=w2,
        scale_ptr=w2_scale,
        bias_ptr=w2_bias,
        out_ptr=products,
        routing_weights_ptr=None if scales_inputs else routing.weights,
        **_tiles(routing),
        expert_stride=w2.stride(0),
        weight_stride=w2.stride(1),
        **_scale_strides(w2_scale),
        hidden=hidden,
        inner=inner,
        columns=columns,
        **tiling.constants(inner),
    )
    block = min(next_power_of_2(hidden), 1024)
    launch(
        _sum_experts,
        (tokens, cdiv(hidden, block)),
        num_warps=max(block // 256, 1),
        num_stages=1,
        x_ptr=products,
        experts_ptr=routing.experts,
        out_ptr=out,
        out_stride=out.stride(0),
        hidden=hidden,
        K=k,
        BLOCK=block,
    )
    return out


def _tile_rows(rows_per_expert: float, dtype: torch.dtype) -> int:
    """Choose the rows of a tile: about what an expert gets, because rows past its tokens are computed in vain."""
    # float32 does without tensor cores, where a large tile takes more registers than there are.
    most = 32 if dtype is torch.float32 else 128
    return int(min(max(next_power_of_2(int(rows_per_expert)), 16), most))


@dataclass(frozen=True, slots=True)
class _Tiling:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    precision: str

    @classmethod
    def choose(
        cls,
        traits: DeviceTraits,
        dtype: torch.dtype,
        weight_dtype: torch.dtype,
        tile_rows: int,
        *,
        depth: int,
        products: int,
        has_blocks: bool = False,
    ) -> _Tiling:
        """Choose the shape of a program's matrix products.

        Few rows: narrow columns give more programs, and deep blocks keep more bytes of the weights in flight. Many
        rows: 128 x 128 results per program, the most that 8 warps hold in registers; 128 x 64 of data-center Blackwell
        if scales of blocks multiply sums on their way from tensor memory.
        """
        is_wide = dtype is torch.float32
        if is_wide:
            block_n, block_k = 32, 32
        elif tile_rows <= 32:
            block_n, block_k = 64 // products, 128
        else:
            most = 64 if has_blocks and traits.capability == 100 else 128
            block_n, block_k = min(128 // products, most), 64
        if depth % block_k:
            block_k = next((size for size in (64, 32) if size < block_k and depth % size == 0), 32)
        weights = products * block_n * block_k
        stage = tile_rows * block_k * dtype.itemsize + weights * weight_dtype.itemsize
        widened = weights * dtype.itemsize if weight_dtype is not dtype else 0
        num_stages = min(max((traits.shared_memory - widened - 2048) // stage, 2), 4)
        return cls(
            block_m=tile_rows,
            block_n=block_n,
            block_k=block_k,
            # Weights that are widened pass through registers: more warps share them.
            num_warps=8 if tile_rows >= 128 or (widened and tile_rows == 32 and not is_wide) else 4,
            num_stages=2 if is_wide else num_stages,
            precision="ieee" if is_wide else "tf32",
        )

    def constants(self, depth: int) -> dict[str, object]:
        return {
            "IS_EVEN": depth % self.block_k == 0,
            "PRECISION": self.precision,
            "GROUP": _GROUP,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
        }


def _programs(routing: Routing, columns: int) -> int:
    """Count the programs: whole groups of tiles, see `_tile_and_column`."""
    return -(-len(routing.tile_experts) // _GROUP) * _GROUP * columns


def _tiles(routing: Routing) -> dict[str, torch.Tensor]:
    return {
        "pairs_ptr": routing.pairs,
        "tile_experts_ptr": routing.tile_experts,
        "tile_starts_ptr": routing.tile_starts,
        "tile_ends_ptr": routing.tile_ends,
        "num_tiles_ptr": routing.num_tiles,
    }


_SCALE_BLOCK = 128
"""Inputs with one scale, which blocks of the kernels divide."""


def _scale_strides(scale: torch.Tensor | None) -> dict[str, int | bool]:
    expert = row = block = 0
    is_mxfp4 = scale is not None and scale.dtype is torch.uint8
    if scale is not None:
        expert = scale.stride(0)
        if is_mxfp4:
            row = scale.stride(1)
        elif scale.dim() == 3:
            block, row = scale.stride(1), scale.stride(2)
        elif scale.dim() == 2 and scale.shape[1] > 1:
            row = scale.stride(1)
    return {
        "expert_scale_stride": expert,
        "scale_stride": row,
        "scale_block_stride": block,
        "SCALE_BLOCK": _SCALE_BLOCK if block else 0,
        "IS_MXFP4": is_mxfp4,
    }
