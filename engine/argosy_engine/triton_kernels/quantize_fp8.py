"""Quantisation of activations to FP8, row by row, in a launch of its own: for products that get plain tensors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.fp8_rows import row_scale, to_fp8
from argosy_engine.triton_kernels.launch import launch

_BLOCK = 4096
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
    block = min(triton.next_power_of_2(width), _BLOCK)
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
