"""Stateless sampling noise: uniform numbers as a pure function of (seed, position).

There is no generator state, so a seeded request draws the same noise in any batch, after a preemption, and on another
replica that resumes it. The mixing function is SplitMix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniform(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return uniform numbers in [0, 1) for parallel arrays of seeds and token positions (prompt included)."""
    with np.errstate(over="ignore"):
        state = _mix(seeds.astype(np.uint64) + _GAMMA) ^ (positions.astype(np.uint64) * _GAMMA)
        bits = _mix(state + _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
