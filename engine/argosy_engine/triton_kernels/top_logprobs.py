"""Log probabilities of drawn tokens, their ranks, and the best alternatives, in two launches and without a sort; for
`--logprobs-mode processed_logprobs` and `processed_logits` of the logits that tokens are drawn from, which take one
more.

Every tile of 4096 tokens yields its share of the sum of exponentials, of the rank, and its own best tokens, each found
as a maximum after the ones before it. The second kernel merges the tiles. A tile does not depend on the batch, so the
results of a row do not either.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.launch import cdiv, launch, next_power_of_2
from argosy_engine.triton_kernels.nucleus import inverse_of, load_logits, pack, unpack
from argosy_engine.triton_kernels.sampling import Cuts, DeviceSamplingBatch

MAX_TOP_LOGPROBS = 128
"""Alternatives per token that the kernels find; each takes one more pass over registers."""

_TILE = 4096


class DeviceLogprobs(NamedTuple):
    """Scores of N tokens with k alternatives each, as `sample/sampler.py` reports them."""

    token_ids: torch.Tensor
    """int64 [N, 1 + k]: the token itself, then the best in descending order, ties by id."""
    logprobs: torch.Tensor
    """float32 [N, 1 + k]"""
    ranks: torch.Tensor
    """int64 [N]; 1 is the most probable."""


def top_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    count: int,
    *,
    rows: torch.Tensor | None = None,
    is_normalized: bool = True,
    out: DeviceLogprobs | None = None,
) -> DeviceLogprobs:
    """Score one token per row and find the row's best tokens.

    NaN counts as minus infinity, whose score is minus infinity.

    Args:
        logits: [R, vocab_size], bfloat16, float16 or float32; rows may be apart, a row is contiguous.
        token_ids: int64 [R], one token per row of the logits.
        count: number of alternatives, k; at most the vocabulary's size are found.
        rows: int32 [N], the rows to score; -1: padding, whose results are not written. None: all.
        is_normalized: report log probabilities; otherwise logits.
        out: receives the results.

    Raises:
        ValueError: `count` is negative or above 128.
    """
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        raise ValueError(
            f"{count} alternatives; the kernels find up to {MAX_TOP_LOGPROBS}: use gather_logprobs"
        )
    vocab_size, device = logits.shape[1], logits.device
    num_rows = len(token_ids) if rows is None else len(rows)
    count = min(count, vocab_size)
    num_tiles = cdiv(vocab_size, _TILE)
    if out is None:
        out = DeviceLogprobs(
            torch.empty(num_rows, 1 + count, dtype=torch.int64, device=device),
            torch.empty(num_rows, 1 + count, dtype=torch.float32, device=device),
            torch.empty(num_rows, dtype=torch.int64, device=device),
        )
    tiles: dict[str, Any] = {
        "logits_ptr": logits,
        "rows_ptr": rows,
        "token_ids_ptr": token_ids,
        "highest_ptr": torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device),
        "sums_ptr": torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device),
        "higher_ptr": torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device),
        "best_ptr": torch.empty(num_rows, num_tiles, count, dtype=torch.int64, device=device),
        "row_stride": logits.stride(0),
        "num_tiles": num_tiles,
        "count": count,
    }
    launch(_score_tiles, (num_rows, num_tiles), **tiles, vocab_size=vocab_size, TILE=_TILE, num_warps=8)
    merged = next_power_of_2(max(num_tiles * count, 1))
    launch(
        _merge_tiles,
        (num_rows,),
        **tiles,
        out_ids_ptr=out.token_ids,
        out_logprobs_ptr=out.logprobs,
        out_ranks_ptr=out.ranks,
        IS_NORMALIZED=is_normalized,
        TILES=next_power_of_2(num_tiles),
        MERGED=merged,
        num_warps=4 if merged <= 4096 else 16,
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _score_tiles(
    logits_ptr,
    rows_ptr,
    token_ids_ptr,
    highest_ptr,
    sums_ptr,
    higher_ptr,
    best_ptr,
    vocab_size,
    row_stride,
    num_tiles,
    count,
    TILE: tl.constexpr,
):
    index, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = index
    if rows_ptr is not None:
        row = tl.load(rows_ptr + index).to(tl.int64)
    if row < 0:
        return
    row_ptr = logits_ptr + row * row_stride
    ids = tile * TILE + tl.arange(0, TILE)
    x = load_logits(row_ptr, ids, vocab_size)
    chosen = load_logits(row_ptr, tl.load(token_ids_ptr + row), vocab_size)
    highest = tl.max(x, axis=0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    at = index * num_tiles + tile
    tl.store(highest_ptr + at, highest)
    tl.store(sums_ptr + at, tl.sum(tl.exp(x - base), axis=0))
    tl.store(higher_ptr + at, tl.sum((x > chosen).to(tl.int32), axis=0))
    keys = tl.where(ids < vocab_size, pack(x, ids), -9223372036854775808)
    for place in range(count):
        best = tl.max(keys, axis=0)
        tl.store(best_ptr + at * count + place, best)
        keys = tl.where(keys == best, -9223372036854775808, keys)


@triton.jit(do_not_specialize=["count"])
def _merge_tiles(
    logits_ptr,
    rows_ptr,
    token_ids_ptr,
    highest_ptr,
    sums_ptr,
    higher_ptr,
    best_ptr,
    out_ids_ptr,
    out_logprobs_ptr,
    out_ranks_ptr,
    row_stride,
    num_tiles,
    count,
    IS_NORMALIZED: tl.constexpr,
    TILES: tl.constexpr,
    MERGED: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = index
    if rows_ptr is not None:
        row = tl.load(rows_ptr + index).to(tl.int64)
    if row < 0:
        return
    tiles = tl.arange(0, TILES)
    at = index * num_tiles + tiles
    highest = tl.load(highest_ptr + at, mask=tiles < num_tiles, other=float("-inf"))
    sums = tl.load(sums_ptr + at, mask=tiles < num_tiles, other=0.0)
    higher = tl.load(higher_ptr + at, mask=tiles < num_tiles, other=0)
    best = tl.max(highest, axis=0)
    base = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(sums * tl.exp(highest - base), axis=0)
    log_total = tl.log(tl.where(best == float("-inf"), 1.0, total))
    token = tl.load(token_ids_ptr + row)
    chosen = tl.load(logits_ptr + row * row_stride + token).to(tl.float32)
    chosen = tl.where(chosen == chosen, chosen, float("-inf"))
    out_at = index * (1 + count)
    tl.store(out_ranks_ptr + index, tl.sum(higher, axis=0).to(tl.int64) + 1)
    tl.store(out_ids_ptr + out_at, token)
    tl.store(out_logprobs_ptr + out_at, _score(chosen, base, log_total, IS_NORMALIZED))
    merged = tl.arange(0, MERGED)
    keys = tl.load(
        best_ptr + index * num_tiles * count + merged,
        mask=merged < num_tiles * count,
        other=-9223372036854775808,
    )
    for place in range(count):
        key = tl.max(keys, axis=0)
        x, best_id = unpack(key)
        tl.store(out_ids_ptr + out_at + 1 + place, best_id.to(tl.int64))
        tl.store(out_logprobs_ptr + out_at + 1 + place, _score(x, base, log_total, IS_NORMALIZED))
        keys = tl.where(keys == key, -9223372036854775808, keys)


@triton.jit
def _score(x, base, log_total, IS_NORMALIZED: tl.constexpr):
    if IS_NORMALIZED:
        x = (x - base) - log_total
    return x


_CUT_BLOCK = 4096


def cut_logits(
    logits: torch.Tensor, batch: DeviceSamplingBatch, cuts: Cuts, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return float32 logits [R, vocab_size] over the temperature, minus infinity where a limit drops the token.

    Rows of temperature 0 are not scaled; padding is not written. Takes one launch.

    Args:
        logits: [R, vocab_size], as given to `sample_tokens`.
        cuts: what `sample_tokens` kept.
        out: receives the result; may be the logits themselves.
    """
    num_rows, vocab_size = logits.shape
    if out is None:
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    launch(
        _cut_logits,
        (num_rows, cdiv(vocab_size, _CUT_BLOCK)),
        logits_ptr=logits,
        out_ptr=out,
        temperature_ptr=batch.temperature,
        positions_ptr=batch.positions,
        cut_logits_ptr=cuts.logits,
        cut_ids_ptr=cuts.token_ids,
        vocab_size=vocab_size,
        row_stride=logits.stride(0),
        out_stride=out.stride(0),
        BLOCK=_CUT_BLOCK,
    )
    return out


@triton.jit
def _cut_logits(
    logits_ptr,
    out_ptr,
    temperature_ptr,
    positions_ptr,
    cut_logits_ptr,
    cut_ids_ptr,
    vocab_size,
    row_stride,
    out_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(positions_ptr + row) < 0:
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab_size, other=0.0).to(tl.float32)
    cut = tl.load(cut_logits_ptr + row)
    is_kept = (x > cut) | ((x == cut) & (ids <= tl.load(cut_ids_ptr + row)))
    x = tl.where(is_kept, x * inverse_of(tl.load(temperature_ptr + row)), float("-inf"))
    tl.store(out_ptr + row * out_stride + ids, x, mask=ids < vocab_size)
