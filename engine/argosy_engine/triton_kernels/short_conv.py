"""LFM2's short convolution between its projections, over states in blocks: one launch, and one more where there are
prompts (`state_steps.keep_inputs`). For where states are, see `mamba`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.launch import launch
from argosy_engine.triton_kernels.state_steps import block_after, keep_inputs, tokens_of

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
        requests: `state_steps.requests_of_tokens`; None: each request has one token, or is padding behind those that
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
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    launch(
        _short_conv,
        (len(bcx), triton.cdiv(channels, block)),
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
