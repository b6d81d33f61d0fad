"""The activations of MLPs, and the quantisation of rows to FP8 (e4m3, arXiv 2209.05433): in launches of their own, and
as functions that other kernels call.

Activations are silu(gate) * up, Gemma's gelu(gate) * up (arXiv 2002.05202), or without a gate relu(up) ** 2
(2109.08668), in float32. The result can be written in FP8, as the input of an FP8 product. With a scale that is known,
programs share a row as otherwise. A scale per row needs the row's largest magnitude first: one program has the row, and
holds it in registers, or computes it twice if it is too wide, the second time from what the L2 cache has.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.launch import cdiv, launch, next_power_of_2


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def gelu_tanh(x):
    # x * (1 + tanh(y)) / 2 is x * sigmoid(2 y): exact where tanh is close to -1, and needs no libdevice.
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def squared_relu(x):
    kept = tl.where(x < 0.0, 0.0, x)  # NaN is kept
    return kept * kept


@triton.jit
def swigluoai(gate, up):
    """Return gpt-oss' (up + 1) * gate * sigmoid(1.702 gate), of gates of at most 7 and ups within 7."""
    gate = tl.minimum(gate, 7.0)
    up = tl.minimum(tl.maximum(up, -7.0), 7.0)
    return (up + 1.0) * gate * tl.sigmoid(1.702 * gate)


@triton.jit
def row_scale(largest):
    """Return the scale of a row whose magnitudes are up to `largest`: that becomes 448, the largest FP8 number."""
    return tl.maximum(largest / 448.0, 1e-12)  # not 0, for rows of zeros


@triton.jit
def to_fp8(x, scale):
    """Return x / scale in FP8. Beyond 448 it saturates; NaN stays NaN."""
    return tl.clamp(x / scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


_BLOCK = 1024
"""Columns per program: 8 per thread, one 16-byte load each of gate and up in a 16-bit dtype."""
ROW_BLOCK = 16384
"""Columns of a whole row that a program holds in registers: 32 per thread."""
PART_BLOCK = 8192
"""Columns of a wider row that a program has at a time, beside the largest magnitudes so far."""

_Activation = Literal["silu", "gelu", "relu2"]


@triton.jit
def _product(gate_up_ptr, inner, columns, ACTIVATION: tl.constexpr):
    """Return the activation of some columns of the row at gate_up_ptr; 0 beyond its end."""
    mask = columns < inner
    first = tl.load(gate_up_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "relu2":
        product = squared_relu(first)
    else:
        up = tl.load(gate_up_ptr + inner + columns, mask=mask, other=0.0).to(tl.float32)
        if ACTIVATION == "gelu":
            product = gelu_tanh(first) * up
        else:
            product = silu(first) * up
    return product


@triton.jit
def _activation_and_mul(
    gate_up_ptr,
    out_ptr,
    scale_ptr,
    row_scales_ptr,
    gate_up_stride,
    out_stride,
    inner,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of columns of one row per program; in FP8 with one scale for all rows."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    product = _product(gate_up_ptr + row * gate_up_stride, inner, columns, ACTIVATION)
    if scale_ptr is None:
        out = product.to(out_ptr.dtype.element_ty)
    else:
        scale = tl.load(scale_ptr)
        if tl.program_id(1) == 0:
            tl.store(row_scales_ptr + row, scale)
        out = to_fp8(product, scale)
    tl.store(out_ptr + row * out_stride + columns, out, mask=columns < inner)


@triton.jit
def _activation_and_mul_fp8(
    gate_up_ptr,
    out_ptr,
    row_scales_ptr,
    gate_up_stride,
    inner,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    FITS: tl.constexpr,
):
    """One row per program, with a scale of its own."""
    row = tl.program_id(0).to(tl.int64)
    gate_up_ptr += row * gate_up_stride
    out_ptr += row * inner
    columns = tl.arange(0, BLOCK)
    if FITS:
        product = _product(gate_up_ptr, inner, columns, ACTIVATION)
        scale = row_scale(tl.max(tl.abs(product), axis=0))
        tl.store(out_ptr + columns, to_fp8(product, scale), mask=columns < inner)
    else:
        largest = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, inner, BLOCK):
            product = _product(gate_up_ptr, inner, start + columns, ACTIVATION)
            largest = tl.maximum(largest, tl.abs(product))
        scale = row_scale(tl.max(largest, axis=0))
        for start in range(0, inner, BLOCK):
            product = _product(gate_up_ptr, inner, start + columns, ACTIVATION)
            tl.store(out_ptr + start + columns, to_fp8(product, scale), mask=start + columns < inner)
    tl.store(row_scales_ptr + row, scale)


def silu_and_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return silu(gate) * up, [T, inner], computed in float32.

    Args:
        gate_up: [T, 2 * inner], gate before up, float32, bfloat16 or float16; rows may be strided.
        out: [T, inner]; default: allocated with the dtype of gate_up.
    """
    return _launch(gate_up, out, "silu")


def gelu_tanh_and_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return gelu(gate) * up with gelu's tanh approximation; see `silu_and_mul`."""
    return _launch(gate_up, out, "gelu")


def relu2(up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return relu(up) ** 2 of up [T, inner]; see `silu_and_mul`."""
    return _launch(up, out, "relu2")


def silu_and_mul_fp8(gate_up: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `silu_and_mul` in float8_e4m3fn, [T, inner], and the scale of each row, float32 [T, 1].

    Args:
        scale: float32 [1], of all rows; None: each row's largest magnitude becomes 448, the largest FP8 number.
    """
    return _launch_fp8(gate_up, scale, "silu")


def gelu_tanh_and_mul_fp8(
    gate_up: torch.Tensor, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `gelu_tanh_and_mul` in FP8, and the scales; see `silu_and_mul_fp8`."""
    return _launch_fp8(gate_up, scale, "gelu")


def relu2_fp8(up: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `relu2` in FP8, and the scales; see `silu_and_mul_fp8`."""
    return _launch_fp8(up, scale, "relu2")


def _inner(gate_up: torch.Tensor, activation: _Activation) -> int:
    return gate_up.shape[1] if activation == "relu2" else gate_up.shape[1] // 2


def _launch(
    gate_up: torch.Tensor,
    out: torch.Tensor | None,
    activation: _Activation,
    scale: torch.Tensor | None = None,
    row_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    rows, inner = gate_up.shape[0], _inner(gate_up, activation)
    if out is None:
        out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    block = min(_BLOCK, next_power_of_2(inner))
    launch(
        _activation_and_mul,
        (rows, cdiv(inner, block)),
        num_warps=max(block // 256, 1),
        num_stages=1,
        gate_up_ptr=gate_up,
        out_ptr=out,
        scale_ptr=scale,
        row_scales_ptr=row_scales,
        gate_up_stride=gate_up.stride(0),
        out_stride=out.stride(0),
        inner=inner,
        ACTIVATION=activation,
        BLOCK=block,
    )
    return out


def _launch_fp8(
    gate_up: torch.Tensor, scale: torch.Tensor | None, activation: _Activation
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, inner = gate_up.shape[0], _inner(gate_up, activation)
    out = torch.empty((rows, inner), dtype=torch.float8_e4m3fn, device=gate_up.device)
    row_scales = torch.empty((rows, 1), dtype=torch.float32, device=gate_up.device)
    if scale is not None:
        return _launch(gate_up, out, activation, scale, row_scales), row_scales
    fits = inner <= ROW_BLOCK
    block = next_power_of_2(inner) if fits else PART_BLOCK
    launch(
        _activation_and_mul_fp8,
        (rows,),
        num_warps=min(max(block // 256, 1), 16),
        num_stages=1,
        gate_up_ptr=gate_up,
        out_ptr=out,
        row_scales_ptr=row_scales,
        gate_up_stride=gate_up.stride(0),
        inner=inner,
        ACTIVATION=activation,
        BLOCK=block,
        FITS=fits,
    )
    return out, row_scales


_QUANTIZE_BLOCK = 4096
"""Elements of a row that a program holds at a time: 16 per thread. The second pass over a longer row reads from L2."""


@triton.jit
def _quantize_fp8(
    x_ptr,
    scale_ptr,
    out_ptr,
    row_scales_ptr,
    x_stride,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    if scale_ptr is None:
        largest = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, width, BLOCK):
            mask = start + columns < width
            x = tl.load(x_ptr + row * x_stride + start + columns, mask=mask, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(x))
        scale = row_scale(tl.max(largest, axis=0))
    else:
        scale = tl.load(scale_ptr)
    tl.store(row_scales_ptr + row, scale)
    for start in range(0, width, BLOCK):
        mask = start + columns < width
        x = tl.load(x_ptr + row * x_stride + start + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * width + start + columns, to_fp8(x, scale), mask=mask)


def quantize_fp8(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x / scale in float8_e4m3fn, [T, width], and the scale of each row, float32 [T, 1].

    Args:
        x: [T, width], float32, bfloat16 or float16; rows may be strided.
        scale: float32 [1], of all rows; None: each row's largest magnitude becomes 448, the largest FP8 number.
    """
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    row_scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = min(next_power_of_2(width), _QUANTIZE_BLOCK)
    launch(
        _quantize_fp8,
        (rows,),
        num_warps=max(block // 512, 1),
        num_stages=1,
        x_ptr=x,
        scale_ptr=scale,
        out_ptr=out,
        row_scales_ptr=row_scales,
        x_stride=x.stride(0),
        width=width,
        BLOCK=block,
    )
    return out, row_scales
