"""What a replica that has not measured itself is assumed to do: the median of its measured peers, else a prior.

Owns: priors. Must not know: policies.
"""

from __future__ import annotations

from collections.abc import Sequence

from argosy_router.policy.base import Candidate

PRIOR_PREFILL_TOKENS_PER_S = 8000.0
"""A mid-size GPU with an 8B model (SMG's mock worker takes the same). Only ratios between terms depend on it."""
PRIOR_DECODE_STEP_S = 0.02
"""50 tokens per second and sequence."""
PRIOR_MAX_NUM_SEQS = 256
"""vLLM's usual default."""


def prefill_rate(candidates: Sequence[Candidate]) -> float:
    """Tokens per second for candidates that have not measured theirs."""
    measured = [c.prefill_tokens_per_s for c in candidates if c.prefill_tokens_per_s > 0.0]
    return median(measured) if measured else PRIOR_PREFILL_TOKENS_PER_S


def decode_step(candidates: Sequence[Candidate]) -> float:
    """Seconds per decode step for candidates that have not measured theirs."""
    measured = [c.decode_step_s for c in candidates if c.decode_step_s > 0.0]
    return median(measured) if measured else PRIOR_DECODE_STEP_S


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
