"""Answers of two requests, whose floating-point numbers may differ in their last digits.

How prompts and tokens are put together into steps differs from request to request, and so do the sums in a step.
"""

from __future__ import annotations

from typing import Any

import pytest

ROUNDING = 1e-4
"""Of log probabilities and probabilities computed in float32."""


def within_rounding(value: Any) -> Any:
    """Return what equals a JSON value but for rounding of its floating-point numbers."""
    match value:
        case float():
            return pytest.approx(value, abs=ROUNDING)
        case dict():
            return {name: within_rounding(each) for name, each in value.items()}
        case list() | tuple():
            return type(value)(map(within_rounding, value))
    return value
