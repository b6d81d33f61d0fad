"""Assumed speed of a replica that has reported none: the median of its peers' measurements, else a prior.

Owns: the priors. Must not know: policies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

PRIOR_PREFILL_TOKENS_PER_S = 8000.0
"""A mid-size GPU with an 8B model (SMG's mock worker assumes the same). Only ratios between terms depend on it."""
PRIOR_DECODE_STEP_S = 0.02
"""50 tokens per second per sequence."""
PRIOR_MAX_NUM_SEQS = 256
"""vLLM's usual default."""


class Rates(NamedTuple):
    """A replica's speed. Zero means not measured."""

    prefill_tokens_per_s: float
    decode_step_s: float


PRIOR = Rates(PRIOR_PREFILL_TOKENS_PER_S, PRIOR_DECODE_STEP_S)


def assumed(measured: Iterable[Rates]) -> Rates:
    """Rates to assume for the unmeasured replicas of a service with these measurements."""
    rates = list(measured)
    return Rates(
        _median([rate.prefill_tokens_per_s for rate in rates]) or PRIOR.prefill_tokens_per_s,
        _median([rate.decode_step_s for rate in rates]) or PRIOR.decode_step_s,
    )


def _median(values: list[float]) -> float:
    known = sorted(value for value in values if value > 0.0)
    return known[len(known) // 2] if known else 0.0
