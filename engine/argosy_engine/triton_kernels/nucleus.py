"""Top-k, top-p and min-p without a sort: finds each row's cut, the lowest logit that is kept.

Tokens are ordered by descending logit, ties by id, and each limit keeps the first tokens of this order: top-k the first
k, top-p the fewest whose mass reaches its share of what top-k keeps, min-p those whose weight is at least its share of
the best token's. A weight is exp((logit - best) / temperature), and mass is the sum of weights as integers (MASS_UNITS
to a weight of 1). Integers add up to the same in any order, so a cut depends on its row alone, however the vocabulary
is split.

1. `_measure_reaches` counts and weighs the tokens within some distances (reaches) of the best one.
2. `_collect_candidates` copies, by ascending id, the tokens within the shortest reach that surely contains the cut.
   Usually they are few. If there are more than the buffer holds, the search goes over the whole row instead: slower,
   with the same result.
3. `find_cut`, part of the kernel that draws, searches the candidates' ordered keys for the cut.

A key is a float32's bits, as an int32 that compares as the floats do, so that searches and maxima over logits are
exact. A packed key is an int64 of a key and a token id; the greatest one is that of the highest value, and among equal
values that of the lowest id. Integers have one maximum whatever the order in which a device compares them.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_KEY = tl.constexpr(-(1 << 63))
"""Below every packed key."""
LOWEST_KEY = tl.constexpr(-2139095040)
"""Key of the lowest finite float32."""


@triton.jit
def load_logits(row_ptr, ids, vocab_size):
    """Load logits as float32, minus infinity for NaN and beyond the vocabulary."""
    x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def order_key(x):
    """Return the int32 keys of float32 numbers. Both zeros have the same key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of_key(key):
    """Return the float32 numbers of int32 keys."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack(x, ids):
    """Return the packed keys of float32 values and int32 token ids."""
    return (order_key(x).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def unpack(packed):
    """Return the values and token ids of packed keys."""
    ids = 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)
    return float_of_key((packed >> 32).to(tl.int32)), ids


NUM_REACHES = 8
NUM_PIVOTS = 4
"""Keys that a step of the search tries at once: more of them would spill registers."""
MAX_CANDIDATES = 8192
"""Candidates per row that the buffer holds: 64 KiB."""
MAX_VOCAB_SIZE = 1 << 22
"""The sum of as many weights fits into an int64."""

MASS_UNITS = tl.constexpr(float(1 << 40))
"""Weights below 2^-40 have no mass; those of all tokens of a large vocabulary are 1e-7 of the best token's."""
_ENOUGH = tl.constexpr(1 - 1e-6)
"""Factor on top-p's limit: tolerates a mass that falls short by rounding (`sample/torch_sampler.py`)."""


@triton.jit
def is_cut_by(top_k, top_p, min_p):
    """Whether any limit is on."""
    return (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def best_of_row(best_keys_ptr, row, num_splits, SPLITS: tl.constexpr):
    """Return the value and the id of a row's best logit, from the packed keys of its splits."""
    splits = tl.arange(0, SPLITS)
    keys = tl.load(
        best_keys_ptr + row * num_splits + splits, mask=splits < num_splits, other=-9223372036854775808
    )
    return unpack(tl.max(keys, axis=0))


@triton.jit
def has_choice(best, temperature):
    """Whether a row is drawn at random: it is not greedy, and the best logit over the temperature is finite."""
    inverse = inverse_of(temperature)
    return (temperature > 0.0) & (inverse < float("inf")) & (tl.abs(best * inverse) < float("inf"))


@triton.jit
def inverse_of(temperature):
    """Return 1 / temperature, and 1 for a greedy row."""
    return 1.0 / tl.where(temperature > 0.0, temperature, 1.0)


@triton.jit
def weigh(x, best, inverse, min_p):
    """Return whether tokens can be kept at all, and their int64 masses."""
    weight = tl.exp((x - best) * inverse)
    is_possible = (x > float("-inf")) & (weight >= min_p)
    return is_possible, tl.where(is_possible, weight * MASS_UNITS, 0.0).to(tl.int64)


@triton.jit
def _reaches(NUM_REACHES: tl.constexpr):
    """Distances from the best logit, in units of the temperature: 1, 1.7, 2.8, 4.8, 8, 13, 23, infinite."""
    step = tl.arange(0, NUM_REACHES)
    return tl.where(step == NUM_REACHES - 1, float("inf"), tl.exp2(step.to(tl.float32) * 0.75))


@triton.jit(do_not_specialize=["num_splits"])
def _measure_reaches(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    positions_ptr,
    best_keys_ptr,
    counts_ptr,
    masses_ptr,
    vocab_size,
    row_stride,
    chunk,
    num_splits,
    NUM_REACHES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    min_p = tl.load(min_p_ptr + row)
    if (tl.load(positions_ptr + row) < 0) | ~is_cut_by(
        tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), min_p
    ):
        return
    temperature = tl.load(temperature_ptr + row)
    best, _ = best_of_row(best_keys_ptr, row, num_splits, SPLITS)
    if ~has_choice(best, temperature):
        return
    inverse = inverse_of(temperature)
    reaches = _reaches(NUM_REACHES)
    counts = tl.zeros([NUM_REACHES, BLOCK], tl.int32)
    masses = tl.zeros([NUM_REACHES, BLOCK], tl.int64)
    end = tl.minimum((split + 1) * chunk, vocab_size)
    for start in range(split * chunk, end, BLOCK):
        x = load_logits(logits_ptr + row * row_stride, start + tl.arange(0, BLOCK), end)
        is_possible, mass = weigh(x, best, inverse, min_p)
        is_within = is_possible[None, :] & (((best - x) * inverse)[None, :] <= reaches[:, None])
        counts += is_within.to(tl.int32)
        masses += tl.where(is_within, mass[None, :], 0)
    at = (row * NUM_REACHES + tl.arange(0, NUM_REACHES)) * num_splits + split
    tl.store(counts_ptr + at, tl.sum(counts, axis=1))
    tl.store(masses_ptr + at, tl.sum(masses, axis=1))


@triton.jit
def choose_reach(
    counts_ptr,
    masses_ptr,
    row,
    num_splits,
    top_k,
    top_p,
    NUM_REACHES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Return the index of the shortest reach that contains all kept tokens, the number of tokens within it, the number
    of tokens that can be kept at all, and their mass."""
    reach, splits = tl.arange(0, NUM_REACHES), tl.arange(0, SPLITS)
    at = (row * NUM_REACHES + reach[:, None]) * num_splits + splits[None, :]
    is_split = (splits < num_splits)[None, :]
    counts = tl.sum(tl.load(counts_ptr + at, mask=is_split, other=0), axis=1)
    masses = tl.sum(tl.load(masses_ptr + at, mask=is_split, other=0), axis=1)
    num_possible, mass = tl.max(counts, axis=0), tl.max(masses, axis=0)
    is_enough = counts >= num_possible
    if (top_k > 0) & (top_k < num_possible):
        is_enough = counts >= top_k
    elif top_p < 1.0:
        is_enough = masses >= _mass_limit(mass, top_p)
    chosen = tl.min(tl.where(is_enough, reach, NUM_REACHES - 1), axis=0)
    return chosen, tl.sum(tl.where(reach == chosen, counts, 0), axis=0), num_possible, mass


@triton.jit
def _mass_limit(mass, top_p):
    limit = mass.to(tl.float64) * top_p.to(tl.float64) * _ENOUGH
    return tl.maximum(limit.to(tl.int64), 1)


@triton.jit(do_not_specialize=["num_splits"])
def _collect_candidates(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    positions_ptr,
    best_keys_ptr,
    counts_ptr,
    masses_ptr,
    candidates_ptr,
    candidate_ids_ptr,
    vocab_size,
    row_stride,
    chunk,
    num_splits,
    capacity,
    NUM_REACHES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    min_p, top_k, top_p = tl.load(min_p_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    if (tl.load(positions_ptr + row) < 0) | ~is_cut_by(top_k, top_p, min_p):
        return
    temperature = tl.load(temperature_ptr + row)
    best, _ = best_of_row(best_keys_ptr, row, num_splits, SPLITS)
    if ~has_choice(best, temperature):
        return
    chosen, num_candidates, _num_possible, _total_mass = choose_reach(
        counts_ptr, masses_ptr, row, num_splits, top_k, top_p, NUM_REACHES, SPLITS
    )
    splits = tl.arange(0, SPLITS)
    counts_at = counts_ptr + (row * NUM_REACHES + chosen) * num_splits + splits
    counts = tl.load(counts_at, mask=splits <= split, other=0)
    own = tl.sum(tl.where(splits == split, counts, 0), axis=0)
    if (num_candidates > capacity) | (own == 0):
        return
    inverse = inverse_of(temperature)
    reaches = _reaches(NUM_REACHES)
    reach = tl.max(tl.where(tl.arange(0, NUM_REACHES) == chosen, reaches, 0.0), axis=0)
    offset = tl.sum(counts, axis=0) - own
    end = tl.minimum((split + 1) * chunk, vocab_size)
    for start in range(split * chunk, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = load_logits(logits_ptr + row * row_stride, ids, end)
        is_possible, _mass = weigh(x, best, inverse, min_p)
        is_within = (is_possible & ((best - x) * inverse <= reach)).to(tl.int32)
        at = row * capacity + offset + tl.cumsum(is_within, axis=0) - 1
        tl.store(candidates_ptr + at, x, mask=is_within > 0)
        tl.store(candidate_ids_ptr + at, ids, mask=is_within > 0)
        offset += tl.sum(is_within, axis=0)


@triton.jit
def load_candidates(row_ptr, candidates_ptr, ids_ptr, start, length, is_collected, BLOCK: tl.constexpr):
    """Load logits and ids of collected candidates, or of the whole row's tokens; in ascending order of ids."""
    at = start + tl.arange(0, BLOCK)
    if is_collected:
        x = tl.load(candidates_ptr + at, mask=at < length, other=float("-inf"))
        ids = tl.load(ids_ptr + at, mask=at < length, other=0)
    else:
        x = load_logits(row_ptr, at, length)
        ids = at
    return x, ids


@triton.jit
def _sums_from(
    pivots,
    row_ptr,
    candidates_ptr,
    ids_ptr,
    length,
    is_collected,
    best,
    inverse,
    min_p,
    NUM_PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the number and the mass of the candidates whose keys are at least each of the pivots."""
    counts = tl.zeros([NUM_PIVOTS, BLOCK], tl.int32)
    masses = tl.zeros([NUM_PIVOTS, BLOCK], tl.int64)
    for start in range(0, length, BLOCK):
        x, _ = load_candidates(row_ptr, candidates_ptr, ids_ptr, start, length, is_collected, BLOCK)
        is_possible, mass = weigh(x, best, inverse, min_p)
        key = order_key(x).to(tl.int64)
        is_above = is_possible[None, :] & (key[None, :] >= pivots[:, None])
        counts += is_above.to(tl.int32)
        masses += tl.where(is_above, mass[None, :], 0)
    return tl.sum(counts, axis=1), tl.sum(masses, axis=1)


@triton.jit
def _highest_key(
    num_wanted,
    mass_wanted,
    low,
    high,
    row_ptr,
    candidates_ptr,
    ids_ptr,
    length,
    is_collected,
    best,
    inverse,
    min_p,
    NUM_PIVOTS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the highest key from `low`, which suffices, to `high` such that the candidates from there on suffice.

    Each step tries NUM_PIVOTS keys at once, so a search takes at most 17 steps, and 8 for bfloat16, whose SHIFT lowest
    bits are known: keys of numbers below 0 have ones there.
    """
    step = tl.arange(0, NUM_PIVOTS)
    low, high = low >> SHIFT, high >> SHIFT
    while low < high:
        pivots = low + ((high - low) * (step + 1) + NUM_PIVOTS - 1) // NUM_PIVOTS
        counts, masses = _sums_from(
            pivots << SHIFT,
            row_ptr,
            candidates_ptr,
            ids_ptr,
            length,
            is_collected,
            best,
            inverse,
            min_p,
            NUM_PIVOTS,
            BLOCK,
        )
        is_enough = (counts >= num_wanted) & (masses >= mass_wanted)
        low = tl.max(tl.where(is_enough, pivots, low), axis=0)
        high = tl.min(tl.where(is_enough, high, pivots - 1), axis=0)
    return (low << SHIFT) + tl.where(low < 0, (1 << SHIFT) - 1, 0)


@triton.jit
def find_cut(
    top_k,
    top_p,
    num_possible,
    mass,
    row_ptr,
    candidates_ptr,
    ids_ptr,
    length,
    is_collected,
    best,
    inverse,
    min_p,
    NUM_PIVOTS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the int64 key of the lowest kept logit, and the highest id that is kept among the tokens of that logit.

    Args:
        num_possible: number of the row's tokens that min-p keeps.
        mass: their mass.
        length: number of candidates, or the vocabulary size if they were not collected.
    """
    highest = order_key(best).to(tl.int64)
    lowest = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for start in range(0, length, BLOCK):
        x, _ = load_candidates(row_ptr, candidates_ptr, ids_ptr, start, length, is_collected, BLOCK)
        is_possible, _ = weigh(x, best, inverse, min_p)
        lowest = tl.minimum(lowest, tl.where(is_possible, order_key(x), 0x7FFFFFFF))
    cut = tl.min(lowest, axis=0).to(tl.int64)
    num_ties = tl.full((), 0x7FFFFFFF, tl.int64)
    kept_ties = num_ties
    if (top_k > 0) & (top_k < num_possible):
        cut = _highest_key(
            top_k,
            0,
            cut,
            highest,
            row_ptr,
            candidates_ptr,
            ids_ptr,
            length,
            is_collected,
            best,
            inverse,
            min_p,
            NUM_PIVOTS,
            SHIFT,
            BLOCK,
        )
        num_above, mass_above, num_ties, tie_mass = _ties(
            cut,
            row_ptr,
            candidates_ptr,
            ids_ptr,
            length,
            is_collected,
            best,
            inverse,
            min_p,
            NUM_PIVOTS,
            BLOCK,
        )
        kept_ties = top_k - num_above
        mass = mass_above + kept_ties * tie_mass
    if top_p < 1.0:
        limit = _mass_limit(mass, top_p)
        top_p_cut = _highest_key(
            0,
            limit,
            cut,
            highest,
            row_ptr,
            candidates_ptr,
            ids_ptr,
            length,
            is_collected,
            best,
            inverse,
            min_p,
            NUM_PIVOTS,
            SHIFT,
            BLOCK,
        )
        _, mass_above, num_ties, tie_mass = _ties(
            top_p_cut,
            row_ptr,
            candidates_ptr,
            ids_ptr,
            length,
            is_collected,
            best,
            inverse,
            min_p,
            NUM_PIVOTS,
            BLOCK,
        )
        most = tl.where(top_p_cut == cut, kept_ties, num_ties)
        kept_ties = tl.minimum(_num_shares(limit - mass_above, tl.maximum(tie_mass, 1)), most)
        cut = top_p_cut
    cut_id = tl.full((), 0x7FFFFFFF, tl.int32)
    if kept_ties < num_ties:
        cut_id = _id_of_tie(
            cut,
            kept_ties,
            row_ptr,
            candidates_ptr,
            ids_ptr,
            length,
            is_collected,
            best,
            inverse,
            min_p,
            BLOCK,
        )
    return cut, cut_id


@triton.jit
def _ties(
    cut,
    row_ptr,
    candidates_ptr,
    ids_ptr,
    length,
    is_collected,
    best,
    inverse,
    min_p,
    NUM_PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the number and the mass of the candidates above a cut, and the number of those at it and the mass of
    each, as int64."""
    step = tl.arange(0, NUM_PIVOTS)
    counts, masses = _sums_from(
        tl.where(step == 0, cut + 1, cut),
        row_ptr,
        candidates_ptr,
        ids_ptr,
        length,
        is_collected,
        best,
        inverse,
        min_p,
        NUM_PIVOTS,
        BLOCK,
    )
    num_above = tl.sum(tl.where(step == 0, counts, 0), axis=0).to(tl.int64)
    mass_above = tl.sum(tl.where(step == 0, masses, 0), axis=0)
    num_ties = tl.sum(tl.where(step == 1, counts, 0), axis=0).to(tl.int64) - num_above
    _, tie_mass = weigh(float_of_key(cut.to(tl.int32)), best, inverse, min_p)
    return num_above, mass_above, num_ties, tie_mass


@triton.jit
def _num_shares(mass, share):
    """Return the least number, at least 1, of shares that reach a mass.

    An int64 division is a call of a function on a device: estimate the number by a float32 and count up from there.
    """
    number = tl.maximum((mass.to(tl.float32) / share.to(tl.float32)).to(tl.int64) - 2, 1)
    for _ in tl.static_range(4):
        number += (number * share < mass).to(tl.int64)
    return number


@triton.jit
def _id_of_tie(
    cut,
    rank,
    row_ptr,
    candidates_ptr,
    ids_ptr,
    length,
    is_collected,
    best,
    inverse,
    min_p,
    BLOCK: tl.constexpr,
):
    """Return the id of the tie of this rank (the lowest id has rank 1)."""
    num_seen = tl.full((), 0, tl.int32)
    found = tl.full([BLOCK], -1, tl.int32)
    for start in range(0, length, BLOCK):
        x, ids = load_candidates(row_ptr, candidates_ptr, ids_ptr, start, length, is_collected, BLOCK)
        is_possible, _ = weigh(x, best, inverse, min_p)
        is_tie = (is_possible & (order_key(x).to(tl.int64) == cut)).to(tl.int32)
        ranks = num_seen + tl.cumsum(is_tie, axis=0)
        found = tl.where((is_tie > 0) & (ranks == rank), ids, found)
        num_seen += tl.sum(is_tie, axis=0)
    return tl.max(found, axis=0)
