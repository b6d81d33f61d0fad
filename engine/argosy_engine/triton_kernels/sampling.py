"""Sampling on the device: temperature, top-k, top-p, min-p and the draw, in at most four launches.

A row's token depends only on its own logits, parameters, seed and position, never on other rows, on padding or on how
the vocabulary is split among programs. Greedy rows take the best token, the lowest id among ties. The others run a race
among the tokens that are kept (`nucleus`). NaN counts as minus infinity; a row whose best logit is infinite is greedy.

1. `_scan_logits` finds each part's best token and, for rows without limits, its winner. With no limit in the batch, the
   logits are read once.
2. and 3. `nucleus` measures the distances and collects the candidates of the rows with limits.
4. `_draw_tokens` finds the cuts, runs the race among the candidates, and writes the tokens.

The race is the exponential one, equivalent to the Gumbel-max trick: each token has an exponential variate, a pure
function of (seed, position, token id), and the token with the least quotient of variate and probability has the
probabilities' distribution. So a draw needs no cumulative sum and no order: each part of the vocabulary finds its
winner, and the best winner wins. The numbers come from Philox-4x32-10 (Salmon et al. 2011, "Parallel Random Numbers:
As Easy as 1, 2, 3") with the seed as key. They are not the CPU's (`sample/torch_sampler.py`): the distribution is the
same, the tokens of a seed are not. The noise has the resolution of a float32 of the magnitude of logit / temperature
(2^-18 at 64) in rows without limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.launch import cdiv, device_traits, launch
from argosy_engine.triton_kernels.nucleus import (
    MAX_CANDIDATES,
    MAX_VOCAB_SIZE,
    NUM_PIVOTS,
    NUM_REACHES,
    _collect_candidates,
    _measure_reaches,
    best_of_row,
    choose_reach,
    find_cut,
    float_of_key,
    has_choice,
    inverse_of,
    is_cut_by,
    load_candidates,
    load_logits,
    order_key,
    pack,
    unpack,
)

PAIR = tl.constexpr(512)
"""Distance of the two tokens that share one call of Philox."""


@triton.jit
def exponential_pair(seed, position, first_ids):
    """Return the variates of the tokens `first_ids` and of `first_ids` + PAIR, where `first_ids` // PAIR is even.

    Args:
        seed: int64.
        position: int64, index in its sequence of the token to draw; its lower 32 bits count.
        first_ids: int32 block.
    """
    zero = first_ids * 0
    counter = (first_ids // (2 * PAIR)) * PAIR + first_ids % PAIR
    a, b, c, d = tl.philox(seed, counter, zero + position.to(tl.int32), zero, zero)
    return _exponential(a, b), _exponential(c, d)


@triton.jit
def exponential(seed, position, ids):
    """Return the variates of any tokens [N]."""
    is_second = (ids // PAIR) % 2 == 1
    first, second = exponential_pair(seed, position, tl.where(is_second, ids - PAIR, ids))
    return tl.where(is_second, second, first)


@triton.jit
def _exponential(high, low):
    """Return -log(1 - v) of a uniform v in (0, 1), from 64 random bits.

    The winner of a race has a small variate, so v keeps its full precision near 0, where the logarithm is a series.
    """
    v = high.to(tl.float32) * (2.0**-32) + (low.to(tl.float32) + 1.0) * (2.0**-64)
    v = tl.minimum(v, 1.0 - 2.0**-24)
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * 0.25)))
    return tl.where(v < 2.0**-6, series, -tl.log(1.0 - v))


_MAX_SPLITS = 256
_FEW_SPLITS = 16
"""Kernels are compiled for up to this many parts of a row, and for up to the maximum: for two sizes of batches."""
_TILE = 2 * PAIR.value
_KEY_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Low bits of ordered keys that say nothing about logits of a dtype: a float32 has so many more bits of mantissa."""
_DRAW_BLOCK = 1024
"""Candidates that the search for a cut visits at a time."""


@dataclass(slots=True)
class DeviceSamplingBatch:
    """Parallel arrays [R] on the device, one entry per row of the logits."""

    temperature: torch.Tensor
    """float32; 0: greedy."""
    top_k: torch.Tensor
    """int32; 0: off."""
    top_p: torch.Tensor
    """float32; 1: off."""
    min_p: torch.Tensor
    """float32; 0: off."""
    seeds: torch.Tensor
    """int64"""
    positions: torch.Tensor
    """int64, index, in its sequence, of the token to sample; -1: padding, whose token is 0."""


class Cuts(NamedTuple):
    """What each row keeps: tokens above a logit, and of those at it the lowest ids."""

    logits: torch.Tensor
    """float32 [R], the lowest kept logit; minus infinity where all tokens are kept."""
    token_ids: torch.Tensor
    """int32 [R], the highest kept id among the tokens of that logit."""


def sample_tokens(
    logits: torch.Tensor,
    batch: DeviceSamplingBatch,
    *,
    has_limits: bool = True,
    token_counts: torch.Tensor | None = None,
    count_entries: torch.Tensor | None = None,
    cuts: Cuts | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw token ids, int64 [R], in two launches, or in four if `has_limits`.

    Small batches split each row among programs of at least 1024 tokens, so that a single row occupies a device; large
    ones use up to 16 programs per row, and about 16 per SM.

    Args:
        logits: [R, vocab_size], bfloat16, float16 or float32; rows may be apart, a row is contiguous.
        has_limits: whether any row may use top-k, top-p or min-p. If false, these are ignored.
        token_counts: int32 [E, vocab_size] of `process_logits`, in which the drawn tokens are counted.
        count_entries: int32 [R], each row's entry in `token_counts`; -1: not counted.
        cuts: receives what each row keeps; needs `has_limits`.
        out: int64 [R], receives the tokens.

    Raises:
        ValueError: the vocabulary is empty or larger than 2^22.
    """
    num_rows, vocab_size = logits.shape
    if not 0 < vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"a vocabulary of {vocab_size} tokens; sampling takes 1 to {MAX_VOCAB_SIZE}")
    device = logits.device
    chunk = choose_chunk(num_rows, vocab_size, device_traits(device).num_sms)
    num_splits = cdiv(vocab_size, chunk)
    splits = _FEW_SPLITS if num_splits <= _FEW_SPLITS else _MAX_SPLITS
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=device)
    best_keys, drawn_keys = torch.empty(2, num_rows, num_splits, dtype=torch.int64, device=device).unbind(0)
    row: dict[str, Any] = {
        "logits_ptr": logits,
        "temperature_ptr": batch.temperature,
        "top_k_ptr": batch.top_k,
        "top_p_ptr": batch.top_p,
        "min_p_ptr": batch.min_p,
        "positions_ptr": batch.positions,
        "best_keys_ptr": best_keys,
        "vocab_size": vocab_size,
        "row_stride": logits.stride(0),
    }
    launch(
        _scan_logits,
        (num_rows, num_splits),
        **row,
        seeds_ptr=batch.seeds,
        drawn_keys_ptr=drawn_keys,
        chunk=chunk,
        num_splits=num_splits,
        HAS_LIMITS=has_limits,
        PAIR=PAIR.value,
    )
    capacity = min(MAX_CANDIDATES, vocab_size) if has_limits else 0
    counts = torch.empty(num_rows, NUM_REACHES, num_splits, dtype=torch.int32, device=device)
    masses = torch.empty(num_rows, NUM_REACHES, num_splits, dtype=torch.int64, device=device)
    candidates = torch.empty(num_rows, capacity, dtype=torch.float32, device=device)
    candidate_ids = torch.empty(num_rows, capacity, dtype=torch.int32, device=device)
    if has_limits:
        split: dict[str, Any] = {"num_splits": num_splits, "NUM_REACHES": NUM_REACHES, "SPLITS": splits}
        sums: dict[str, Any] = {"counts_ptr": counts, "masses_ptr": masses}
        launch(
            _measure_reaches,
            (num_rows, num_splits),
            **row,
            **sums,
            **split,
            chunk=chunk,
            BLOCK=512,
            num_warps=8,
        )
        launch(
            _collect_candidates,
            (num_rows, num_splits),
            **row,
            **sums,
            **split,
            candidates_ptr=candidates,
            candidate_ids_ptr=candidate_ids,
            chunk=chunk,
            capacity=capacity,
            BLOCK=1024,
        )
    launch(
        _draw_tokens,
        (num_rows,),
        **row,
        seeds_ptr=batch.seeds,
        drawn_keys_ptr=drawn_keys,
        counts_ptr=counts,
        masses_ptr=masses,
        candidates_ptr=candidates,
        candidate_ids_ptr=candidate_ids,
        cut_logits_ptr=None if cuts is None else cuts.logits,
        cut_ids_ptr=None if cuts is None else cuts.token_ids,
        token_counts_ptr=token_counts,
        count_entries_ptr=count_entries,
        out_ptr=out,
        num_splits=num_splits,
        capacity=capacity,
        HAS_LIMITS=has_limits,
        NUM_REACHES=NUM_REACHES,
        NUM_PIVOTS=NUM_PIVOTS,
        SHIFT=_KEY_SHIFTS[logits.dtype],
        SPLITS=splits,
        BLOCK=_DRAW_BLOCK,
        num_warps=16,
    )
    return out


def choose_chunk(num_rows: int, vocab_size: int, num_sms: int) -> int:
    """Return the tokens per program when rows are split among programs: a multiple of 1024.

    Programs wait for memory, which many short ones hide better than few long ones. But up to _FEW_SPLITS parts of a
    row are cheaper to add up than more.
    """
    num_rows = max(num_rows, 1)
    few = min(cdiv(16 * num_sms, num_rows), _FEW_SPLITS)
    wanted = max(cdiv(4 * num_sms, num_rows), few)
    splits = min(wanted, cdiv(vocab_size, _TILE), _MAX_SPLITS)
    return int(cdiv(cdiv(vocab_size, splits), _TILE) * _TILE)


@triton.jit(do_not_specialize=["num_splits"])
def _scan_logits(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    best_keys_ptr,
    drawn_keys_ptr,
    vocab_size,
    row_stride,
    chunk,
    num_splits,
    HAS_LIMITS: tl.constexpr,
    PAIR: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions_ptr + row)
    if position < 0:
        return
    temperature = tl.load(temperature_ptr + row)
    is_plain = temperature > 0.0
    if HAS_LIMITS:
        is_plain = is_plain & ~is_cut_by(
            tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        )
    seed = tl.load(seeds_ptr + row)
    inverse = inverse_of(temperature)
    row_ptr = logits_ptr + row * row_stride
    best = tl.full([PAIR], -9223372036854775808, tl.int64)
    drawn = tl.full([PAIR], -9223372036854775808, tl.int64)
    for start in range(split * chunk, tl.minimum((split + 1) * chunk, vocab_size), 2 * PAIR):
        first = start + tl.arange(0, PAIR)
        second = first + PAIR
        x, y = load_logits(row_ptr, first, vocab_size), load_logits(row_ptr, second, vocab_size)
        best = tl.maximum(best, tl.maximum(pack(x, first), pack(y, second)))
        if is_plain:
            x_time, y_time = exponential_pair(seed, position, first)
            x, y = tl.fma(x, inverse, -tl.log(x_time)), tl.fma(y, inverse, -tl.log(y_time))
            drawn = tl.maximum(drawn, tl.maximum(pack(x, first), pack(y, second)))
    tl.store(best_keys_ptr + row * num_splits + split, tl.max(best, axis=0))
    tl.store(drawn_keys_ptr + row * num_splits + split, tl.max(drawn, axis=0))


@triton.jit(do_not_specialize=["num_splits"])
def _draw_tokens(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    best_keys_ptr,
    drawn_keys_ptr,
    counts_ptr,
    masses_ptr,
    candidates_ptr,
    candidate_ids_ptr,
    cut_logits_ptr,
    cut_ids_ptr,
    token_counts_ptr,
    count_entries_ptr,
    out_ptr,
    vocab_size,
    row_stride,
    num_splits,
    capacity,
    HAS_LIMITS: tl.constexpr,
    NUM_REACHES: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
    SHIFT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row)
    if position < 0:
        tl.store(out_ptr + row, 0)
        return
    temperature = tl.load(temperature_ptr + row)
    best, token = best_of_row(best_keys_ptr, row, num_splits, SPLITS)
    cut_logit = tl.full((), float("-inf"), tl.float32)
    cut_id = tl.full((), 0x7FFFFFFF, tl.int32)
    if has_choice(best, temperature):
        _, token = best_of_row(drawn_keys_ptr, row, num_splits, SPLITS)
        if HAS_LIMITS:
            top_k, top_p = tl.load(top_k_ptr + row).to(tl.int64), tl.load(top_p_ptr + row)
            min_p = tl.load(min_p_ptr + row)
            if is_cut_by(top_k, top_p, min_p):
                _, num_candidates, num_possible, mass = choose_reach(
                    counts_ptr, masses_ptr, row, num_splits, top_k, top_p, NUM_REACHES, SPLITS
                )
                is_collected = num_candidates <= capacity
                length = tl.where(is_collected, num_candidates, vocab_size)
                inverse = inverse_of(temperature)
                row_ptr = logits_ptr + row * row_stride
                row_candidates_ptr = candidates_ptr + row * capacity
                row_ids_ptr = candidate_ids_ptr + row * capacity
                cut, cut_id = find_cut(
                    top_k,
                    top_p,
                    num_possible,
                    mass,
                    row_ptr,
                    row_candidates_ptr,
                    row_ids_ptr,
                    length,
                    is_collected,
                    best,
                    inverse,
                    min_p,
                    NUM_PIVOTS,
                    SHIFT,
                    BLOCK,
                )
                cut_logit = float_of_key(cut.to(tl.int32))
                seed = tl.load(seeds_ptr + row)
                drawn = tl.full([BLOCK], -9223372036854775808, tl.int64)
                for start in range(0, length, BLOCK):
                    x, ids = load_candidates(
                        row_ptr, row_candidates_ptr, row_ids_ptr, start, length, is_collected, BLOCK
                    )
                    key = order_key(x).to(tl.int64)
                    is_kept = (key > cut) | ((key == cut) & (ids <= cut_id))
                    if tl.max(is_kept.to(tl.int32), axis=0) > 0:
                        time = exponential(seed, position, ids)
                        score = tl.fma(x - best, inverse, -tl.log(time))
                        drawn = tl.maximum(drawn, tl.where(is_kept, pack(score, ids), -9223372036854775808))
                _, token = unpack(tl.max(drawn, axis=0))
    tl.store(out_ptr + row, token.to(tl.int64))
    if cut_logits_ptr is not None:
        tl.store(cut_logits_ptr + row, cut_logit)
        tl.store(cut_ids_ptr + row, cut_id)
    if token_counts_ptr is not None:
        entry = tl.load(count_entries_ptr + row).to(tl.int64)
        if entry >= 0:
            tl.atomic_add(token_counts_ptr + entry * vocab_size + token, 1)
