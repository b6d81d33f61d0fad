"""The activation of gated MLPs: silu(gate) * up, or Gemma's gelu(gate) * up (arXiv 2002.05202)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.activations import gelu_tanh, silu
from argosy_engine.triton_kernels.launch import launch

_BLOCK = 1024
"""Columns per program: 8 per thread, one 16-byte load each of gate and up in a 16-bit dtype."""


@triton.jit
def _activation_and_mul(
    gate_up_ptr,
    out_ptr,
    gate_up_stride,
    out_stride,
    inner,
    IS_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < inner
    gate = tl.load(gate_up_ptr + row * gate_up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * gate_up_stride + inner + columns, mask=mask, other=0.0).to(tl.float32)
    if IS_GELU:
        product = gelu_tanh(gate) * up
    else:
        product = silu(gate) * up
    tl.store(out_ptr + row * out_stride + columns, product.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return silu(gate) * up, [T, inner], computed in float32.

    Args:
        gate_up: [T, 2 * inner], gate before up, float32, bfloat16 or float16; rows may be strided.
        out: [T, inner]; default: allocated with the dtype of gate_up.
    """
    return _launch(gate_up, out, is_gelu=False)


def gelu_tanh_and_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return gelu(gate) * up with gelu's tanh approximation; see `silu_and_mul`."""
    return _launch(gate_up, out, is_gelu=True)


def _launch(gate_up: torch.Tensor, out: torch.Tensor | None, *, is_gelu: bool) -> torch.Tensor:
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    block = min(_BLOCK, triton.next_power_of_2(inner))
    launch(
        _activation_and_mul,
        (rows, triton.cdiv(inner, block)),
        num_warps=max(block // 256, 1),
        num_stages=1,
        gate_up_ptr=gate_up,
        out_ptr=out,
        gate_up_stride=gate_up.stride(0),
        out_stride=out.stride(0),
        inner=inner,
        IS_GELU=is_gelu,
        BLOCK=block,
    )
    return out
