"""LFM2's short convolution between its projections, over states in blocks: one launch, and one more where there are
prompts (`keep_inputs`). Besides, what kernels of all layers with states have in common: where the states of a step's
requests are, and the last inputs of their convolutions.

Kernels find a request's tokens and blocks by themselves in the step's lengths and block table. A request without tokens
is padding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from argosy_engine.triton_kernels.launch import cdiv, launch, next_power_of_2

_KEPT_BLOCK = 512
"""Channels per program of `keep_inputs`."""


@triton.jit
def tokens_of(starts_ptr, lens_ptr, request):
    """Return a request's first token, the index after its last, and how many tokens were computed before."""
    start, end = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
    return start, end, tl.load(lens_ptr + request) - (end - start)


@triton.jit
def block_after(table_ptr, table_stride, request, num_tokens, BLOCK_SIZE: tl.constexpr):
    """Return the block of a request's state after so many tokens, at least one."""
    entry = (num_tokens - 1) // BLOCK_SIZE
    return tl.load(table_ptr + request * table_stride + entry).to(tl.int64)


@triton.jit
def _keep_inputs(
    inputs_ptr,
    gates_ptr,
    starts_ptr,
    lens_ptr,
    table_ptr,
    conv_states_ptr,
    inputs_stride,
    table_stride,
    channels,
    KERNEL_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some channels of one request per program."""
    request = tl.program_id(0)
    start, end, computed = tokens_of(starts_ptr, lens_ptr, request)
    if start == end:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channels_before = tl.where(computed > 0, channels, 0)
    source = block_after(table_ptr, table_stride, request, tl.maximum(computed, 1), BLOCK_SIZE)
    target = block_after(table_ptr, table_stride, request, computed + end - start, BLOCK_SIZE)
    kept_ptr = conv_states_ptr + source * (KERNEL_SIZE - 1) * channels + columns
    target_ptr = conv_states_ptr + target * (KERNEL_SIZE - 1) * channels + columns
    for row in tl.static_range(KERNEL_SIZE - 1):  # in this order, because source and target may be one
        at = end - start + (row + 1 - KERNEL_SIZE)
        new_ptr = inputs_ptr + (start + at).to(tl.int64) * inputs_stride + columns
        new = tl.load(new_ptr, mask=columns < tl.where(at >= 0, channels, 0), other=0.0)
        if gates_ptr is not None:
            gate_ptr = gates_ptr + (start + at).to(tl.int64) * inputs_stride + columns
            gate = tl.load(gate_ptr, mask=columns < tl.where(at >= 0, channels, 0), other=0.0)
            new = (new.to(tl.float32) * gate.to(tl.float32)).to(conv_states_ptr.dtype.element_ty)
        before_ptr = kept_ptr + (KERNEL_SIZE - 1 + at) * channels
        before = tl.load(before_ptr, mask=columns < tl.where(at < 0, channels_before, 0), other=0.0)
        tl.store(target_ptr + row * channels, tl.where(at >= 0, new, before), mask=columns < channels)


def requests_of_tokens(starts: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the index of each token's request, int32 [num_tokens]; of padding, the number of requests.

    Args:
        starts: int32 [R + 1], index of each request's first token, and of the first that is none's.
    """
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=starts.device)
    return torch.searchsorted(starts[1:], tokens, right=True, out_int32=True)


def chunks_of_prompts(starts: NDArray[np.int32], num_decodes: int, chunk_size: int) -> NDArray[np.int32]:
    """Return the first token of each chunk of the requests after the decodes, and the index after its last, int32
    [chunks, 2].

    Args:
        starts: int32 [R + 1], index of each request's first token, on the host.
    """
    firsts, ends = starts[num_decodes:-1], starts[num_decodes + 1 :]
    counts = -(-(ends - firsts) // chunk_size)
    before = np.cumsum(counts) - counts
    numbers = np.arange(counts.sum()) - np.repeat(before, counts)
    begins = np.repeat(firsts, counts) + numbers * chunk_size
    return np.stack((begins, np.minimum(begins + chunk_size, np.repeat(ends, counts))), axis=1).astype(
        np.int32
    )


def keep_inputs(
    inputs: torch.Tensor,
    conv_states: torch.Tensor,
    num_requests: int,
    step: dict[str, Any],
    gates: torch.Tensor | None = None,
) -> None:
    """Keep the last inputs of a convolution, for the next step. Runs after what reads those before.

    Args:
        inputs: [T, channels], or more in a row; rows may be strided.
        conv_states: [num_states, kernel_size - 1, channels] in the inputs' dtype, contiguous.
        step: arguments `starts_ptr`, `lens_ptr`, `table_ptr`, `table_stride` and `BLOCK_SIZE`, which kernels share.
        gates: what inputs are multiplied by, rows of the same stride; None: nothing.
    """
    _, earlier, channels = conv_states.shape
    block = min(_KEPT_BLOCK, next_power_of_2(channels))
    launch(
        _keep_inputs,
        (num_requests, cdiv(channels, block)),
        num_warps=max(block // 256, 1),
        num_stages=1,
        inputs_ptr=inputs,
        gates_ptr=gates,
        conv_states_ptr=conv_states,
        inputs_stride=inputs.stride(0),
        channels=channels,
        KERNEL_SIZE=earlier + 1,
        BLOCK=block,
        **step,
    )


_CHANNELS = 512
"""Channels per program."""


@triton.jit(do_not_specialize=["num_requests"])
def _short_conv(
    bcx_ptr,
    requests_ptr,
    starts_ptr,
    lens_ptr,
    table_ptr,
    states_ptr,
    conv_ptr,
    bias_ptr,
    out_ptr,
    num_requests,
    stride,
    table_stride,
    channels,
    KERNEL_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some channels of one token per program, of decodes their last inputs as well. Padding becomes 0."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < channels
    dtype = out_ptr.dtype.element_ty
    if requests_ptr is None:
        request = token
    else:
        request = tl.minimum(tl.load(requests_ptr + token), num_requests - 1).to(tl.int64)
    start, end, computed = tokens_of(starts_ptr, lens_ptr, request)
    if token >= end:
        tl.store(
            out_ptr + token * channels + columns, tl.zeros([BLOCK], dtype=tl.float32).to(dtype), mask=mask
        )
        return
    index = token - start
    channels_before = tl.where(computed > 0, channels, 0)
    block = block_after(table_ptr, table_stride, request, tl.maximum(computed, 1), BLOCK_SIZE)
    kept_ptr = states_ptr + block * (KERNEL_SIZE - 1) * channels + columns
    b_ptr = bcx_ptr + start.to(tl.int64) * stride + columns
    x_ptr = b_ptr + 2 * channels
    total = tl.load(bias_ptr + columns, mask=mask, other=0.0)
    for tap in tl.static_range(KERNEL_SIZE):
        at = index + (tap + 1 - KERNEL_SIZE)
        factors = tl.load(conv_ptr + tap * channels + columns, mask=mask, other=0.0)
        new_mask = columns < tl.where(at >= 0, channels, 0)
        b = tl.load(b_ptr + at * stride, mask=new_mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at * stride, mask=new_mask, other=0.0).to(tl.float32)
        before_ptr = kept_ptr + (KERNEL_SIZE - 1 + at) * channels
        before = tl.load(before_ptr, mask=columns < tl.where(at < 0, channels_before, 0), other=0.0)
        total += ((b * x).to(dtype).to(tl.float32) + before.to(tl.float32)) * factors
    c = tl.load(bcx_ptr + token * stride + channels + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * channels + columns, (total * c).to(dtype), mask=mask)
    if requests_ptr is None:  # no other program reads what this one keeps
        tl.debug_barrier()
        target = block_after(table_ptr, table_stride, request, computed + 1, BLOCK_SIZE)
        target_ptr = states_ptr + target * (KERNEL_SIZE - 1) * channels + columns
        for row in tl.static_range(KERNEL_SIZE - 2):
            before = tl.load(kept_ptr + (row + 1) * channels, mask=columns < channels_before, other=0.0)
            tl.debug_barrier()
            tl.store(target_ptr + row * channels, before, mask=mask)
        b = tl.load(b_ptr, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
        tl.store(target_ptr + (KERNEL_SIZE - 2) * channels, (b * x).to(dtype), mask=mask)


def short_conv(
    bcx: torch.Tensor,
    conv: torch.Tensor,
    bias: torch.Tensor,
    states: torch.Tensor,
    requests: torch.Tensor | None,
    starts: torch.Tensor,
    lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Compute a layer between its projections, [T, channels] in bcx's dtype, and the states after the step.

    Args:
        bcx: [T, 3 * channels], float32, bfloat16 or float16; rows may be strided.
        conv: float32 [kernel_size, channels], the newest token's factors last; bias: float32 [channels].
        states: [num_states, kernel_size - 1, channels] in bcx's dtype, contiguous.
        requests: `requests_of_tokens`; None: each request has one token, or is padding behind those that
            have.
        starts: int32 [R + 1], index of each request's first token.
        lens: int32 [R], each request's number of tokens after the step.
        block_table: int32 [R, max_blocks], blocks of states; rows may be strided.
        block_size: tokens per entry of the block table.
    """
    kernel_size, channels = conv.shape
    out = torch.empty(len(bcx), channels, dtype=bcx.dtype, device=bcx.device)
    step = {
        "starts_ptr": starts,
        "lens_ptr": lens,
        "table_ptr": block_table,
        "table_stride": block_table.stride(0),
        "BLOCK_SIZE": block_size,
    }
    block = min(_CHANNELS, next_power_of_2(channels))
    launch(
        _short_conv,
        (len(bcx), cdiv(channels, block)),
        num_warps=max(block // 128, 1),
        num_stages=1,
        bcx_ptr=bcx,
        requests_ptr=requests,
        states_ptr=states,
        conv_ptr=conv,
        bias_ptr=bias,
        out_ptr=out,
        num_requests=len(lens),
        stride=bcx.stride(0),
        channels=channels,
        KERNEL_SIZE=kernel_size,
        BLOCK=block,
        **step,
    )
    if requests is not None:
        keep_inputs(bcx[:, 2 * channels :], states, len(lens), step, gates=bcx)
    return out
