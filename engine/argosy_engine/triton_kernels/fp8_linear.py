"""Products by weights in FP8 (e4m3): of few tokens, and by weights with a scale per block of inputs (DeepSeek-V3, arXiv
2412.19437) of any number.

Few tokens are bound by reading the weights, where `torch._scaled_mm` was no faster than a product in bfloat16; that
serves from 17 tokens on, if weights have one scale per row. The kernel is like that of `packed_linear` for few tokens:
a program has few rows, and each of its warps multiplies other inputs. FP8 becomes float16 on its way to the tensor
cores, one conversion for two numbers. That is exact, as products are, and sums are in float32: the result is that of a
product in FP8.

With a scale per 128 inputs, few tokens are multiplied as they are, in bfloat16, to which weights are widened: to
quantise them would take a launch. More tokens are quantised in a launch of their own, with a scale per token and 128
inputs, and multiplied in FP8. Each 128 inputs are summed by themselves, so that the sums of Hopper's FP8 products, of
about 14 bits, are never long. Scales of blocks are stored per row of the weight, which is 3 % of its bytes, so that any
rows can be fused and divided among ranks. Time on a device was not measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.activations import row_scale, to_fp8
from argosy_engine.triton_kernels.launch import DeviceTraits, device_traits, launch

FEW = 16
"""Tokens up to which the kernel for few tokens serves."""
BLOCK_INPUTS = 128
"""Inputs that share a scale, if not all do."""


@triton.jit(do_not_specialize=["num_tokens"])
def _fp8_linear_few(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    num_tokens,
    inputs,
    outputs,
    HAS_BLOCKS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """BLOCK_N outputs of all tokens per program; each slice of it multiplies every SLICES-th 128 inputs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, outputs - 1)  # rows past the end are not stored
    token = tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    slice_of = tl.arange(0, SLICES)
    k = tl.arange(0, 128)
    weight_row = weight_ptr + row.to(tl.int64)[None, :, None] * inputs + k[None, None, :]
    x_token = x_ptr + token.to(tl.int64)[None, None, :] * x_stride + k[None, :, None]
    total = tl.zeros([SLICES, BLOCK_N, BLOCK_T], dtype=tl.float32)
    for first in range(0, inputs, SLICES * 128):
        start = first + slice_of * 128
        if IS_EVEN:
            is_input = (start < inputs)[:, None, None]
            weight = tl.load(weight_row + start[:, None, None], mask=is_input, other=0.0)
            x = tl.load(x_token + start[:, None, None], mask=is_input & is_token[None, None, :], other=0.0)
        else:
            is_input = start[:, None] + k[None, :] < inputs
            weight = tl.load(weight_row + start[:, None, None], mask=is_input[:, None, :], other=0.0)
            mask = is_input[:, :, None] & is_token[None, None, :]
            x = tl.load(x_token + start[:, None, None], mask=mask, other=0.0)
        if HAS_BLOCKS:
            place = (start // 128)[:, None] * outputs + row[None, :]
            scale = tl.load(scales_ptr + place, mask=(start < inputs)[:, None], other=0.0)
            # By way of float32: converted at once, each number is rounded by an instruction of a quarter of the rate.
            weight = weight.to(tl.float16).to(tl.float32).to(x.dtype)
            total += tl.dot(weight, x) * scale[:, :, None]
        else:
            total = tl.dot(weight.to(tl.float16), x.to(tl.float16), total)
    out = tl.sum(total, axis=0)
    if not HAS_BLOCKS:
        x_scale = tl.load(x_scales_ptr + token, mask=is_token, other=0.0)
        out *= tl.load(scales_ptr + row)[:, None] * x_scale[None, :]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    place = out_ptr + token.to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=is_token[None, :] & (n < outputs)[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _block_fp8_linear_many(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    inputs,
    outputs,
    IS_EVEN: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_T tokens and BLOCK_N outputs per program. TILES tiles of tokens take turns at the same outputs, and find
    their weights in the L2 cache."""
    columns = tl.cdiv(outputs, BLOCK_N)
    tiles = tl.cdiv(num_tokens, BLOCK_T)
    program = tl.program_id(0)
    first_tile = program // (TILES * columns) * TILES
    in_group = tl.minimum(tiles - first_tile, TILES)
    within = program % (TILES * columns)
    n = within // in_group * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (first_tile + within % in_group) * BLOCK_T + tl.arange(0, BLOCK_T)
    # Rows and tokens past the end are read as the last, and not stored.
    row, own = tl.minimum(n, outputs - 1), tl.minimum(token, num_tokens - 1)
    k = tl.arange(0, 128)
    weight_row = weight_ptr + row.to(tl.int64)[None, :] * inputs + k[:, None]
    x_token = x_ptr + own.to(tl.int64)[:, None] * inputs + k[None, :]
    x_scale_row = x_scales_ptr + own.to(tl.int64) * tl.cdiv(inputs, 128)
    total = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
    for start in range(0, inputs, 128):
        if IS_EVEN:
            weight = tl.load(weight_row + start)
            x = tl.load(x_token + start)
        else:
            weight = tl.load(weight_row + start, mask=(start + k < inputs)[:, None], other=0.0)
            x = tl.load(x_token + start, mask=(start + k < inputs)[None, :], other=0.0)
        block = start // 128
        scale = tl.load(x_scale_row + block)[:, None] * tl.load(scales_ptr + block * outputs + row)[None, :]
        total += tl.dot(x, weight) * scale
    if bias_ptr is not None:
        total += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    place = out_ptr + token.to(tl.int64)[:, None] * outputs + n[None, :]
    mask = (token < num_tokens)[:, None] & (n < outputs)[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _quantize_fp8_blocks(x_ptr, out_ptr, scales_ptr, x_stride, width, BLOCKS: tl.constexpr):
    """BLOCKS blocks of a row per program."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    scale = row_scale(tl.max(tl.abs(x), axis=1))
    num_blocks = tl.cdiv(width, 128)
    tl.store(scales_ptr + row * num_blocks + block, scale, mask=block < num_blocks)
    tl.store(out_ptr + row * width + column, to_fp8(x, scale[:, None]), mask=mask)


def quantize_fp8_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x in float8_e4m3fn, [T, width], divided by the scale of each 128 columns, and the scales, float32 [T,
    ceil(width / 128)]: the largest magnitude becomes 448.

    Args:
        x: [T, width], float32, bfloat16 or float16; rows may be strided.
    """
    tokens, width = x.shape
    blocks = triton.cdiv(width, BLOCK_INPUTS)
    out = torch.empty((tokens, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((tokens, blocks), dtype=torch.float32, device=x.device)
    at_once = min(triton.next_power_of_2(blocks), 8)  # 1024 columns: one load of 16 bytes a thread
    launch(
        _quantize_fp8_blocks,
        (tokens, triton.cdiv(blocks, at_once)),
        num_warps=max(at_once // 2, 1),
        num_stages=1,
        x_ptr=x,
        out_ptr=out,
        scales_ptr=scales,
        x_stride=x.stride(0),
        width=width,
        BLOCKS=at_once,
    )
    return out, scales


def fp8_linear_few(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return (x x_scales) (W scales)^T + b, [T, out], of few tokens.

    Args:
        x: float8_e4m3fn [T, in], contiguous.
        x_scales: float32 [T, 1].
        weight: float8_e4m3fn [out, in], contiguous.
        scales: float32 [out].
        bias: [out].
        dtype: of the result.
    """
    out = torch.empty((len(x), len(weight)), dtype=dtype, device=x.device)
    _launch_few(x, x_scales, weight, scales, bias, out)
    return out


def block_fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x (W scales)^T + b, [T, out] in x's dtype. More than 16 tokens are quantised to FP8, with a scale per 128
    inputs.

    Args:
        x: [T, in], bfloat16 or float16; rows may be strided.
        weight: float8_e4m3fn [out, in], contiguous.
        scales: float32 [ceil(in / 128), out].
        bias: [out].
    """
    (tokens, inputs), outputs = x.shape, len(weight)
    out = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    if tokens <= FEW:
        _launch_few(x, None, weight, scales, bias, out)
        return out
    values, x_scales = quantize_fp8_blocks(x)
    block_t, block_n = _tile(device_traits(x.device), tokens, outputs)
    launch(
        _block_fp8_linear_many,
        (triton.cdiv(outputs, block_n) * triton.cdiv(tokens, block_t),),
        num_warps=8 if block_t == 128 else 4,
        num_stages=_num_stages(device_traits(x.device), (block_t + block_n) * BLOCK_INPUTS),
        x_ptr=values,
        x_scales_ptr=x_scales,
        weight_ptr=weight,
        scales_ptr=scales,
        bias_ptr=bias,
        out_ptr=out,
        num_tokens=tokens,
        inputs=inputs,
        outputs=outputs,
        IS_EVEN=inputs % BLOCK_INPUTS == 0,
        TILES=8,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
    )
    return out


def _launch_few(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    (tokens, inputs), outputs = x.shape, len(weight)
    if not tokens:
        return
    traits = device_traits(x.device)
    # As many rows as leave programs for all multiprocessors: each reads all tokens (`packed_linear._Tiling`). For
    # consumer Blackwell the compiler puts sums of 64 rows on the stack.
    most = (32,) if traits.capability == 120 else (64, 32)
    block_n = next((rows for rows in most if triton.cdiv(outputs, rows) >= traits.num_sms), 16)
    block_t, slices = (8 if tokens <= 8 else 16), 4
    stage = slices * BLOCK_INPUTS * (block_n + block_t * x.itemsize)
    launch(
        _fp8_linear_few,
        (triton.cdiv(outputs, block_n),),
        num_warps=slices,
        num_stages=_num_stages(traits, stage),
        x_ptr=x,
        x_scales_ptr=x_scales,
        weight_ptr=weight,
        scales_ptr=scales,
        bias_ptr=bias,
        out_ptr=out,
        x_stride=x.stride(0),
        num_tokens=tokens,
        inputs=inputs,
        outputs=outputs,
        HAS_BLOCKS=x_scales is None,
        IS_EVEN=inputs % BLOCK_INPUTS == 0,
        SLICES=slices,
        BLOCK_N=block_n,
        BLOCK_T=block_t,
    )


def _tile(traits: DeviceTraits, tokens: int, outputs: int) -> tuple[int, int]:
    """Choose the tokens and outputs of a program: 128 x 128 if these are programs for all multiprocessors, 64 sums a
    thread beside those of a block, half as many outputs where both are copied from tensor memory; else 64 x 64."""
    if tokens <= 64 or triton.cdiv(outputs, 128) * triton.cdiv(tokens, 128) < traits.num_sms:
        return 64, 64
    return 128, 64 if traits.capability == 100 else 128


def _num_stages(traits: DeviceTraits, stage: int) -> int:
    """Return how many steps of loads of `stage` bytes a program has under way, at most half the shared memory."""
    return min(max((traits.shared_memory // 2 - 2048) // stage, 2), 4)
