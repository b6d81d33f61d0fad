"""RMSNorm (arXiv 1910.07467), alone, or after adding to the residual stream what may have a norm of its own.

One program normalises one row and keeps it in registers, so that memory is read and written once. Arithmetic is in
float32; only the sum with the residual is rounded to the model's dtype before it is normalised, because that is what
the next layer reads.

The result can be written in FP8, as the input of an FP8 product: the row's largest magnitude is known before it is
written. It is not rounded to the model's dtype in between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.activations import row_scale, to_fp8
from argosy_engine.triton_kernels.launch import launch, next_power_of_2

MAX_WIDTH = 16384
"""Widest row that a program holds in registers without spilling: 32 elements per thread."""


@triton.jit
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    x_weight_ptr,
    out_ptr,
    scale_ptr,
    row_scales_ptr,
    x_stride,
    residual_stride,
    out_stride,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if x_weight_ptr is not None:
        x = _normed(x, x_weight_ptr, columns, mask, width, eps, ADDS_ONE)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0)
        total = (x + residual.to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * residual_stride + columns, total, mask=mask)
        x = total.to(tl.float32)
    x = _normed(x, weight_ptr, columns, mask, width, eps, ADDS_ONE)
    if row_scales_ptr is None:
        out = x.to(out_ptr.dtype.element_ty)
    else:
        if scale_ptr is None:
            scale = row_scale(tl.max(tl.abs(x), axis=0))
        else:
            scale = tl.load(scale_ptr)
        tl.store(row_scales_ptr + row, scale)
        out = to_fp8(x, scale)
    tl.store(out_ptr + row * out_stride + columns, out, mask=mask)


@triton.jit
def _normed(x, weight_ptr, columns, mask, width, eps, ADDS_ONE: tl.constexpr):
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if ADDS_ONE:
        weight += 1.0
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps) * weight


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    adds_one: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x / rms(x) * weight over the last dimension.

    Args:
        x: [T, width], float32, bfloat16 or float16; rows may be strided. It may be `out` itself.
        weight: [width], of any of these dtypes.
        adds_one: multiply by 1 + weight, for Gemma's weights as its checkpoints store them.
        out: [T, width]; default: allocated with x's dtype.

    Raises:
        ValueError: width is above `MAX_WIDTH`.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _launch(x, None, weight, None, eps, adds_one, out)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    x_weight: torch.Tensor | None = None,
    adds_one: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add x to the residual [T, width] in place and return the RMSNorm of the sum; see `rms_norm`.

    Args:
        x_weight: [width], of an RMSNorm of x before it is added (Gemma's norms after attention and MLP); None: there
            is none. It has the same eps and `adds_one`.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _launch(x, residual, weight, x_weight, eps, adds_one, out)


def rms_norm_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rms_norm` in float8_e4m3fn, [T, width], and the scale of each row, float32 [T, 1].

    Args:
        scale: float32 [1], of all rows; None: each row's largest magnitude becomes 448, the largest FP8 number.
    """
    out, row_scales = _fp8_rows(x)
    return _launch(x, None, weight, None, eps, False, out, scale, row_scales), row_scales


def add_rms_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
    *,
    x_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `add_rms_norm` in FP8, and the scales; see `rms_norm_fp8`."""
    out, row_scales = _fp8_rows(x)
    return _launch(x, residual, weight, x_weight, eps, False, out, scale, row_scales), row_scales


def _fp8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device),
        torch.empty((len(x), 1), dtype=torch.float32, device=x.device),
    )


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    x_weight: torch.Tensor | None,
    eps: float,
    adds_one: bool,
    out: torch.Tensor,
    scale: torch.Tensor | None = None,
    row_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    rows, width = x.shape
    if width > MAX_WIDTH:
        raise ValueError(f"RMSNorm of rows of {width} elements; at most {MAX_WIDTH} fit in registers")
    block = next_power_of_2(width)
    launch(
        _rms_norm,
        (rows,),
        # 8 elements per thread are one 16-byte load of a 16-bit dtype; wider rows take several per thread.
        num_warps=min(max(block // 256, 1), 4 if block <= 2048 else 8 if block <= 4096 else 16),
        num_stages=1,
        x_ptr=x,
        residual_ptr=residual,
        weight_ptr=weight,
        x_weight_ptr=x_weight,
        out_ptr=out,
        scale_ptr=scale,
        row_scales_ptr=row_scales,
        x_stride=x.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        out_stride=out.stride(0),
        width=width,
        eps=eps,
        HAS_RESIDUAL=residual is not None,
        ADDS_ONE=adds_one,
        BLOCK=block,
    )
    return out
