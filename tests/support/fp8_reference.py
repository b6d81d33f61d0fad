"""What rows in FP8 must be, given the exact numbers."""

from __future__ import annotations

import torch


def assert_fp8_rows(
    values: torch.Tensor,
    scales: torch.Tensor,
    expected: torch.Tensor,
    scale: float | None,
    *,
    looseness: float = 1.0,
    tolerance: float = 0.0,
) -> None:
    """Check that values * scales is `expected`, [T, width], as exactly as FP8 can have it.

    Args:
        scale: of all rows; None: a row's largest magnitude becomes 448.
        looseness: how many times larger than necessary the scale of a row may be.
        tolerance: relative error of `expected`.
    """
    assert values.dtype is torch.float8_e4m3fn
    assert (values.shape, scales.shape) == (expected.shape, (len(expected), 1))
    expected = expected.float()
    if scale is None:
        necessary = (expected.abs().amax(dim=1, keepdim=True) / 448).clamp(min=1e-12)
        assert (scales >= necessary * (0.999 - tolerance)).all()
        assert (scales <= necessary * looseness * (1.001 + tolerance)).all()
    else:
        assert (scales == scale).all()
        expected = expected.clamp(-448 * scale, 448 * scale)
    # Half a step of 3 mantissa bits, and of the smallest numbers; a tie may go either way.
    allowed = expected.abs() * (2**-3.9 + tolerance) + scales * 2**-9.9
    assert ((values.float() * scales - expected).abs() <= allowed).all()
