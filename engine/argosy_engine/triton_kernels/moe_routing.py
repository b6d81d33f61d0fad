"""Routing of tokens to experts on the device: top-k, then a counting sort of (token, expert) pairs by expert.

Two launches and no synchronisation: how many pairs an expert gets is known on the device alone, so buffers and grids
have the size of the worst case. The sort is stable and uses no atomics, hence results do not vary between runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.launch import launch

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
    held_block = triton.next_power_of_2(len(held))
    k, device = experts_per_token, logits.device
    expert_block = triton.next_power_of_2(num_experts)
    rows = max(_TILE_ELEMENTS // max(expert_block, triton.next_power_of_2(k)), 1)
    keeps_scores = is_sigmoid or correction is not None or groups_per_token < num_groups
    if keeps_scores:  # registers hold them beside what is left to choose from
        rows = max(rows // 2, 1)
    most = max(_MAX_CHUNK_PAIRS // triton.next_power_of_2(k), 1)
    chunk = min(triton.next_power_of_2(max(triton.cdiv(tokens, 32), 1)), most)
    num_chunks = triton.cdiv(tokens, chunk)
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
        GROUP_BLOCK=triton.next_power_of_2(num_groups),
        CHUNK=chunk,
        ROWS=min(rows, chunk),
        K_BLOCK=triton.next_power_of_2(k),
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
