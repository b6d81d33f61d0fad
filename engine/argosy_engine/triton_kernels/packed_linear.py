"""Products by weights of 4 and 8 bit integers that stay packed (W4A16, W8A16), for activations in bfloat16 and float16.

A weight [out, in] is stored as words of 32 bits, row after row. Sixteen words are a block: the numbers of 128
consecutive inputs in 4 bits, of 64 in 8 bits. A block has parts of 32 inputs, which are multiplied together, and every
word has two numbers of each part, 16 bits apart. So one shift and one mask take both out of a word, and a constant in
the bits above makes floating point numbers of them: in bfloat16 the bits 0x4300 with a number of 4 bits below are 128 +
number. The zero point is subtracted there, which is exact, because the difference has at most 8 bits and a sign. Of 8
bits bfloat16 cannot hold as much, so that they go by way of float32. Scales multiply the sums of a group in float32, as
on CPUs. The layout was chosen to move no number between threads: at their memory bandwidth A100 and H200 read 26 and 43
numbers of 4 bits per clock and multiprocessor, which have 64 integer operations for them.

Weights are the left operand of the product, so that they come from registers, where they are widened (on Hopper the
right one comes from shared memory), and few tokens fill an instruction of 8 columns.

Two kernels. Few tokens are bound by reading weights: a program has few rows of the weight, so that 4096 rows are enough
programs for 132 multiprocessors, and each of its warps multiplies other inputs; the warps' sums are added at the end,
in a fixed order, and nothing is exchanged between programs. With more tokens or rows the warps of a program share its
rows. Which of them serves depends on the number of tokens, so that a token's result may be rounded otherwise in another
batch, as with cuBLAS; in the same batch it is the same. Time on a device was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.launch import DeviceTraits, device_traits, launch

WORDS = 16
"""Words of a block."""
PART = 32
"""Inputs of a part; groups are multiples of it."""
_ROWS_AT_ONCE = 1024
"""Rows that are packed at a time, to limit peak memory."""


def block_inputs(bits: int) -> int:
    """Return the inputs of a block."""
    return WORDS * 32 // bits


class PackedIntegers(NamedTuple):
    """A weight [out, in] whose numbers are (integer - zero) * scale."""

    words: torch.Tensor
    """int32 [out, blocks * 16]; the last block is filled up with zeros."""
    scales: torch.Tensor
    """[groups, out], float32, float16 or bfloat16."""
    zeros: torch.Tensor | None
    """int8 [groups, out]; None: all are 0."""
    bits: int
    """4: integers from -8 to 7; 8: from -128 to 127."""
    inputs: int

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.inputs // len(self.scales)


def pack(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the words of integers, int32 [out, blocks * 16].

    Args:
        integers: int8 [out, in], from -8 to 7 if bits are 4.
    """
    out, inputs = integers.shape
    size = block_inputs(bits)
    blocks = -(-inputs // size)
    words = torch.empty(out, blocks * WORDS, dtype=torch.int32, device=integers.device)
    parts = size // PART
    for start in range(0, out, _ROWS_AT_ONCE):
        rows = integers[start : start + _ROWS_AT_ONCE]
        if blocks * size > inputs:
            rows = torch.nn.functional.pad(rows, (0, blocks * size - inputs))
        # Input part * 32 + word * 2 + half of a block is at bit part * bits + half * 16 of the word.
        numbers = (rows.to(torch.int32) + (1 << bits - 1)).view(len(rows), blocks, parts, WORDS, 2)
        packed = torch.zeros(len(rows), blocks, WORDS, dtype=torch.int32, device=integers.device)
        for part in range(parts):
            for half in range(2):
                packed |= numbers[:, :, part, :, half] << (part * bits + half * 16)
        words[start : start + len(rows)] = packed.view(len(rows), -1)
    return words


@triton.jit
def _numbers(words, zero, PART_OF_BLOCK: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Return the two numbers of a part that each word has, less `zero`, [*words, 2].

    Args:
        zero: of the stored numbers, which begin at 0, and of what the constant adds, in DTYPE or float32.
    """
    if BITS == 4:
        both = (words >> (4 * PART_OF_BLOCK)) & 0x000F000F
    else:
        both = (words >> (8 * PART_OF_BLOCK)) & 0x00FF00FF
    if BITS == 8 and DTYPE is tl.bfloat16:
        low = ((both & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True) - zero
        high = ((both >> 16) | 0x4B000000).to(tl.float32, bitcast=True) - zero
    else:
        if DTYPE is tl.bfloat16:
            both = both | 0x43004300
        else:
            both = both | 0x64006400
        low = (both & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True) - zero
        high = (both >> 16).to(tl.int16).to(DTYPE, bitcast=True) - zero
    return tl.join(low.to(DTYPE), high.to(DTYPE))


@triton.jit
def _zero(zeros, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Return what `_numbers` subtracts, given zero points as they are stored, or 0."""
    if BITS == 8 and DTYPE is tl.bfloat16:
        zero = 8388608.0 + 128.0 + zeros
    elif DTYPE is tl.bfloat16:
        zero = (128.0 + 8.0 + zeros).to(DTYPE)
    elif BITS == 4:
        zero = (1024.0 + 8.0 + zeros).to(DTYPE)
    else:
        zero = (1024.0 + 128.0 + zeros).to(DTYPE)
    return zero


@triton.jit(do_not_specialize=["num_tokens"])
def _packed_linear_few(
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    num_tokens,
    inputs,
    outputs,
    blocks,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED_PARTS: tl.constexpr,
    MASK: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """BLOCK_N outputs of all tokens per program; each slice of it multiplies every SLICES-th block of inputs.

    GROUP: inputs of a group, 0 if all are one. SCALED_PARTS: parts of a block whose sums one scale multiplies. MASK:
    whether the inputs end within a block, behind whole parts or not.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    BLOCK_K: tl.constexpr = 512 // BITS
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, outputs - 1)  # rows past the end are not stored
    token = tl.arange(0, BLOCK_T)
    is_token = (token < num_tokens)[None, None, :]
    slice_of = tl.arange(0, SLICES)
    word = tl.arange(0, 16)[None, None, :]
    k = tl.arange(0, 32)
    words_row = words_ptr + row.to(tl.int64)[None, :, None] * (blocks * 16) + word
    x_token = x_ptr + token.to(tl.int64)[None, None, :] * x_stride
    total = tl.zeros([SLICES, BLOCK_N, BLOCK_T], dtype=tl.float32)
    zero = tl.full([SLICES, BLOCK_N, 1], 0.0, dtype=tl.float32)
    if GROUP == 0 and zeros_ptr is not None:
        zero += tl.load(zeros_ptr + row).to(tl.float32)[None, :, None]
    zero = _zero(zero, BITS, DTYPE)
    for first in range(0, blocks, SLICES):
        block = first + slice_of
        is_block = block < blocks
        words = tl.load(words_row + block[:, None, None] * 16, mask=is_block[:, None, None], other=0)
        for part in tl.static_range(BLOCK_K // 32):
            start = block * BLOCK_K + part * 32
            if MASK == "inputs":
                is_input = (start[:, None] + k[None, :] < inputs)[:, :, None] & is_token
            else:  # blocks past the end are, too
                is_input = (start < inputs)[:, None, None] & is_token
            x = tl.load(x_token + (start[:, None] + k[None, :])[:, :, None], mask=is_input, other=0.0)
            if GROUP > 0 and part % SCALED_PARTS == 0:
                place = (start // GROUP)[:, None] * outputs + row[None, :]
                is_group = (start < inputs)[:, None]
                scale = tl.load(scales_ptr + place, mask=is_group, other=0.0).to(tl.float32)[:, :, None]
                if zeros_ptr is not None:
                    stored = tl.load(zeros_ptr + place, mask=is_group, other=0).to(tl.float32)
                    zero = _zero(stored[:, :, None], BITS, DTYPE)
            numbers = _numbers(words, zero, part, BITS, DTYPE)
            numbers = tl.reshape(numbers, [SLICES, BLOCK_N, 32])
            if GROUP == 0:
                total = tl.dot(numbers, x, total)
            else:
                if part % SCALED_PARTS == 0:
                    sums = tl.dot(numbers, x)
                else:
                    sums = tl.dot(numbers, x, sums)
                if part % SCALED_PARTS == SCALED_PARTS - 1:
                    total += sums * scale
    out = tl.sum(total, axis=0)
    if GROUP == 0:
        out *= tl.load(scales_ptr + row).to(tl.float32)[:, None]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    place = out_ptr + token.to(tl.int64)[None, :] * outputs + n[:, None]
    mask = (token < num_tokens)[None, :] & (n < outputs)[:, None]
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _packed_linear_many(
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    num_tokens,
    inputs,
    outputs,
    blocks,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED_PARTS: tl.constexpr,
    MASK: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_T tokens per program. TILES tiles of tokens take turns at the same outputs, so that they
    find the weights in the L2 cache. Other constants: `_packed_linear_few`."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    BLOCK_K: tl.constexpr = 512 // BITS
    columns = tl.cdiv(outputs, BLOCK_N)
    tiles = tl.cdiv(num_tokens, BLOCK_T)
    program = tl.program_id(0)
    first_tile = program // (TILES * columns) * TILES
    in_group = tl.minimum(tiles - first_tile, TILES)
    within = program % (TILES * columns)
    n = within // in_group * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (first_tile + within % in_group) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = tl.minimum(n, outputs - 1)  # rows past the end are not stored
    is_token = (token < num_tokens)[None, :]
    k = tl.arange(0, 32)
    words_row = words_ptr + row.to(tl.int64)[:, None] * (blocks * 16) + tl.arange(0, 16)[None, :]
    x_token = x_ptr + token.to(tl.int64)[None, :] * x_stride + k[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    zero = tl.full([BLOCK_N, 1], 0.0, dtype=tl.float32)
    if GROUP == 0 and zeros_ptr is not None:
        zero += tl.load(zeros_ptr + row).to(tl.float32)[:, None]
    zero = _zero(zero, BITS, DTYPE)
    for block in range(blocks):
        words = tl.load(words_row + block * 16)
        for part in tl.static_range(BLOCK_K // 32):
            start = block * BLOCK_K + part * 32
            is_input = is_token
            if MASK == "inputs":
                is_input = is_input & (start + k < inputs)[:, None]
            elif MASK == "parts":
                is_input = (token < tl.where(start < inputs, num_tokens, 0))[None, :]
            x = tl.load(x_token + start, mask=is_input, other=0.0)
            if GROUP > 0 and part % SCALED_PARTS == 0:
                # Past the last input there is no group, and x is 0.
                place = tl.minimum(start, inputs - 1) // GROUP * outputs + row
                scale = tl.load(scales_ptr + place).to(tl.float32)[:, None]
                if zeros_ptr is not None:
                    zero = _zero(tl.load(zeros_ptr + place).to(tl.float32)[:, None], BITS, DTYPE)
            numbers = tl.reshape(_numbers(words, zero, part, BITS, DTYPE), [BLOCK_N, 32])
            if GROUP == 0:
                total = tl.dot(numbers, x, total)
            else:
                if part % SCALED_PARTS == 0:
                    sums = tl.dot(numbers, x)
                else:
                    sums = tl.dot(numbers, x, sums)
                if part % SCALED_PARTS == SCALED_PARTS - 1:
                    total += sums * scale
    if GROUP == 0:
        total *= tl.load(scales_ptr + row).to(tl.float32)[:, None]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    place = out_ptr + token.to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=is_token & (n < outputs)[:, None])


def packed_linear(x: torch.Tensor, weight: PackedIntegers, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T + b, [T, out] in x's dtype, with sums in float32.

    Args:
        x: [T, in], bfloat16 or float16; rows may be strided.
        weight: its groups are of multiples of 32 inputs, or one.
        bias: [out].
    """
    tokens, inputs = x.shape
    outputs, bits = len(weight.words), weight.bits
    out = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    size, group = block_inputs(bits), 0 if len(weight.scales) == 1 else weight.group
    arguments = {
        "x_ptr": x,
        "words_ptr": weight.words,
        "scales_ptr": weight.scales,
        "zeros_ptr": weight.zeros,
        "bias_ptr": bias,
        "out_ptr": out,
        "x_stride": x.stride(0),
        "num_tokens": tokens,
        "inputs": inputs,
        "outputs": outputs,
        "blocks": weight.words.shape[1] // WORDS,
        "BITS": bits,
        "GROUP": group,
        "SCALED_PARTS": _scaled_parts(group, size),
        "MASK": "" if inputs % size == 0 else "parts" if inputs % PART == 0 else "inputs",
    }
    tiling = _Tiling.choose(device_traits(x.device), tokens, outputs, bits, group)
    columns = triton.cdiv(outputs, tiling.block_n)
    if tiling.slices > 1:
        kernel, programs, own = _packed_linear_few, columns, {"SLICES": tiling.slices}
    else:
        kernel, programs = _packed_linear_many, columns * triton.cdiv(tokens, tiling.block_t)
        own = {"TILES": _TILES}
    launch(
        kernel,
        (programs,),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **arguments,
        **own,
        BLOCK_N=tiling.block_n,
        BLOCK_T=tiling.block_t,
    )
    return out


_TILES = 8
"""Tiles of tokens that take turns at the same outputs."""


def _scaled_parts(group: int, size: int) -> int:
    """Return the parts of a block of `size` inputs whose sums one scale multiplies, as many as no group divides."""
    parts = size // PART
    if group % size == 0:  # or one group of all
        return parts
    return group // PART if size % group == 0 else 1


@dataclass(frozen=True, slots=True)
class _Tiling:
    block_n: int
    block_t: int
    slices: int
    """More than 1: the kernel for few tokens, with as many warps."""
    num_warps: int
    num_stages: int

    @classmethod
    def choose(cls, traits: DeviceTraits, tokens: int, outputs: int, bits: int, group: int) -> _Tiling:
        """Choose the shape of a program's results.

        A program reads the inputs of its tokens from the L2 cache, which delivers little more than the memory: for each
        byte of weights in 4 bits, 4 * tokens / block_n bytes. So it has the most rows with which there are programs for
        all multiprocessors; with 16 rows 4096 outputs are 256 programs, each with 12 KiB of weights under way, where an
        H200 needs 25 KiB per multiprocessor to hide its latency. Four slices, because one warp alone issues too few
        instructions to widen what the memory delivers. From 65 tokens on 128 x 128 results, of which eight warps hold
        64 sums a thread beside those of a group, or 64 x 64, more programs; of fewer tokens if groups are small, where
        the sums of several groups are under way and registers (`mma.sync`) or tensor memory hold no more.
        """

        def fills(block_n: int, block_t: int = 64) -> bool:
            return bool(triton.cdiv(outputs, block_n) * triton.cdiv(tokens, block_t) >= traits.num_sms)

        slices = 1
        if tokens > 64:
            block_n = block_t = 128 if fills(128, 128) else 64
            if traits.capability != 90 and group % block_inputs(bits):
                block_t = 64 if traits.capability == 100 else 32
        else:
            block_t = max(triton.next_power_of_2(tokens), 8)
            if tokens > 4 and fills(128):
                block_n = 128
            elif tokens > 16:
                block_n = 64
            else:
                slices = 4
                block_n = 64 if fills(64) else 32 if tokens > 4 or fills(32) else 16
        stage = slices * (block_n * WORDS * 4 + block_t * block_inputs(bits) * 2)
        # At most half the shared memory, for two programs on a multiprocessor.
        num_stages = min(max((traits.shared_memory // 2 - 2048) // stage, 2), 4)
        num_warps = slices if slices > 1 else 8 if block_n == 128 else 4
        return cls(block_n, block_t, slices, num_warps, num_stages)
