"""Rows in FP8 (e4m3), for use inside kernels: the scale of a row, and the rounding (arXiv 2209.05433)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_scale(largest):
    """Return the scale of a row whose magnitudes are up to `largest`: that becomes 448, the largest FP8 number."""
    return tl.maximum(largest / 448.0, 1e-12)  # not 0, for rows of zeros


@triton.jit
def to_fp8(x, scale):
    """Return x / scale in FP8. Beyond 448 it saturates; NaN stays NaN."""
    return tl.clamp(x / scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
