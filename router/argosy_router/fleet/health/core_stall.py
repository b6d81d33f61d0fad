"""Bounds on the silence of an engine's core: how old its last step may be while its HTTP server still reports."""

from __future__ import annotations

from typing import Final

SUSPECT_STEP_AGE_S: Final = 15.0
"""A core that has not stepped for this long while its HTTP server reports is stuck in a kernel, or dead. Longer than a
long prefill step."""
MIN_STALL_S: Final = 5.0
"""A core that has work and has been silent for less is not stalled, however short its steps are: kernels are compiled,
and machines pause."""
STALL_STEPS: Final = 5.0
"""A core with work may be silent for this multiple of its longest recent step."""


def stall_bound_s(longest_step_s: float) -> float:
    """Return how long a core with work may be silent before its requests move to other replicas.

    Args:
        longest_step_s: its longest recent step; zero if unknown.
    """
    if not longest_step_s:
        return SUSPECT_STEP_AGE_S
    return max(MIN_STALL_S, STALL_STEPS * longest_step_s)
