"""Arrivals: when each request of a benchmark is sent.

Owns: request rate, burstiness and ramp-up. Must not know: clocks and requests. Invariant: times never decrease, and
without a ramp-up the last one is at `count / rate`, so that runs with different seeds offer the same load.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np

RampUpStrategy = Literal["linear", "exponential"]


class RampUp(msgspec.Struct, frozen=True):
    """A request rate that grows from the first request to the last."""

    strategy: RampUpStrategy
    start_rps: float
    end_rps: float

    def rates(self, count: int) -> np.ndarray:
        """Return the rate at each request, in requests per second; float64 [count]."""
        progress = np.arange(count) / max(count - 1, 1)
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return self.start_rps * (self.end_rps / self.start_rps) ** progress


def arrival_times(
    count: int, rate: float, burstiness: float, ramp_up: RampUp | None, rng: np.random.Generator
) -> list[float]:
    """Return when each request is sent, in seconds after the start.

    Intervals follow a gamma distribution of shape `burstiness` with mean 1 / rate: 1 is a Poisson process, less is more
    bursty, `inf` is even.

    Args:
        count: number of requests, at least 1.
        rate: requests per second; `inf` sends all of them at once. Of no account with `ramp_up`.
        burstiness: above 0.
        ramp_up: rates per request instead of `rate`.
    """
    if ramp_up is None and math.isinf(rate):
        return [0.0] * count
    means = 1.0 / (np.full(count, rate) if ramp_up is None else np.maximum(ramp_up.rates(count), _MIN_RATE))
    intervals = means if math.isinf(burstiness) else rng.gamma(burstiness, means / burstiness)
    times = np.cumsum(intervals)
    if ramp_up is None and times[-1] > 0:
        times *= count / rate / times[-1]
    return times.tolist()


_MIN_RATE = 0.1
"""Requests per second at least: a ramp that starts at 0 would never send its first request."""
