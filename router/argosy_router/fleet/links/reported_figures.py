"""Bounds of the figures that replicas report of themselves, by telemetry or in their metrics.

Owns: what a figure may be. Must not know: frames, metrics, what figures are used for.
An engine's image is its tenant's choice, and so is what it says. Figures of all services are in one load report, which
JSON could not carry, or the operator not read, with a value that is not a number. Invariant: a figure is finite and
within its bounds, whatever was reported.
"""

from __future__ import annotations

from math import isnan
from typing import Final

MAX_REQUESTS: Final = 1_000_000
"""Sequences at one replica."""
MAX_TOKENS: Final = 1_000_000_000
"""Prompt tokens that wait there."""
MAX_CORES: Final = 1024
MAX_RATE: Final = 1e9
"""Tokens per second."""
MAX_SECONDS: Final = 86_400.0
"""Of a step, or since one."""


def count(reported: int, most: int) -> int:
    """A whole number from 0 to `most`."""
    return 0 if reported < 0 else most if reported > most else reported


def number(reported: float, most: float) -> float:
    """A number from 0 to `most`; 0 in place of what is none."""
    if isnan(reported) or reported < 0.0:
        return 0.0
    return most if reported > most else reported


def rate(reported: float, least: float, most: float) -> float:
    """A rate or duration that is divided by, or by whose inverse: 0, which stands for unknown, or at least `least`."""
    bounded = number(reported, most)
    return bounded if bounded >= least else 0.0
