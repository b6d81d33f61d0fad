"""Sampling noise on the device: for each token an exponential variate, a pure function of (seed, position, token id).

The token with the least quotient of variate and probability has the probabilities' distribution (the exponential race,
equivalent to the Gumbel-max trick), so a draw needs no cumulative sum and no order: each part of the vocabulary finds
its winner, and the best winner wins. The numbers come from Philox-4x32-10 (Salmon et al. 2011, "Parallel Random
Numbers: As Easy as 1, 2, 3") with the seed as key. They are not the CPU's (`sample/noise.py`): the same seed draws
other tokens there.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
