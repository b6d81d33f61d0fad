"""A Mamba-2 layer (arXiv 2405.21060) between its projections, over states in blocks.

    mamba_inputs    convolution over the tokens before, silu; step size of each head; of decodes the last inputs, too
    keep_inputs     where there are prompts, the last inputs of the convolution (`short_conv`)
    state_update    of decodes the states, and what C reads from them
    chunk_scores    of prompts C times B within each chunk of tokens, which the heads of a group share
    scan_chunks     of prompts the states, chunk by chunk, and what C reads from them
    norm_squares    where ranks share a group, what this one adds to its mean square
    gated_norm      gate by silu(z), and the RMSNorm of each group

So decodes take three launches, or four. Where states are, and whether a request has one, kernels find by themselves in
the step's lengths and block table on the device: steps of a size take the same launches, so CUDA graphs can repeat
them. A request without tokens is padding. States are read and written in place; within a step no block is read that
another request writes.

A program keeps a few columns of a head's state in registers, for columns do not depend on each other. Products are in
float32, by three of tensor cores each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.activations import silu
from argosy_engine.triton_kernels.launch import cdiv, launch, next_power_of_2
from argosy_engine.triton_kernels.short_conv import block_after, keep_inputs, tokens_of

_CHANNELS = 512
"""Channels per program of `mamba_inputs`."""
_UPDATE_ELEMENTS = 1024
"""Elements of a state per program of `state_update`, which has one warp."""
CHUNK_SIZE = 16
"""Tokens of a chunk. Twice as many take more registers than there are."""
_PART = 32
"""Rows of a state per part of a product, which `scan_chunks` has in one warp."""
_SCAN_COLUMNS = 32
"""Columns of a state per program of `scan_chunks`."""
_MIN_DOT = 16
"""Least size of a product's dimensions."""


class MambaShape(NamedTuple):
    """Sizes of a layer; see `attention.params.MambaParams`."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel_size: int
    norm: str | None
    group_ranks: int = 1

    @property
    def num_values(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        return self.num_values + 2 * self.num_groups * self.state_size

    @property
    def num_inputs(self) -> int:
        return self.num_values + self.num_channels + self.num_heads


@triton.jit(do_not_specialize=["num_requests"])
def _mamba_inputs(
    zxbcdt_ptr,
    requests_ptr,
    starts_ptr,
    lens_ptr,
    table_ptr,
    conv_states_ptr,
    conv_ptr,
    conv_bias_ptr,
    dt_bias_ptr,
    xbc_ptr,
    size_ptr,
    num_requests,
    stride,
    table_stride,
    channels,
    num_values,
    HEADS: tl.constexpr,
    KERNEL_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    """Some channels of one token per program; the first has the token's step sizes as well."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if requests_ptr is None:
        request = token
    else:
        request = tl.minimum(tl.load(requests_ptr + token), num_requests - 1).to(tl.int64)
    start, end, computed = tokens_of(starts_ptr, lens_ptr, request)
    if token >= end:
        return
    index = token - start
    columns = part * BLOCK + tl.arange(0, BLOCK)
    channels_before = tl.where(computed > 0, channels, 0)
    block = block_after(table_ptr, table_stride, request, tl.maximum(computed, 1), BLOCK_SIZE)
    kept_ptr = conv_states_ptr + block * (KERNEL_SIZE - 1) * channels + columns
    inputs_ptr = zxbcdt_ptr + start.to(tl.int64) * stride + num_values + columns
    total = tl.load(conv_bias_ptr + columns, mask=columns < channels, other=0.0)
    for tap in tl.static_range(KERNEL_SIZE):
        at = index + (tap + 1 - KERNEL_SIZE)
        factors = tl.load(conv_ptr + tap * channels + columns, mask=columns < channels, other=0.0)
        new = tl.load(inputs_ptr + at * stride, mask=columns < tl.where(at >= 0, channels, 0), other=0.0)
        before_ptr = kept_ptr + (KERNEL_SIZE - 1 + at) * channels
        before = tl.load(before_ptr, mask=columns < tl.where(at < 0, channels_before, 0), other=0.0)
        total += (new.to(tl.float32) + before.to(tl.float32)) * factors
    tl.store(xbc_ptr + token * channels + columns, silu(total), mask=columns < channels)
    if requests_ptr is None:  # no other program reads what this one keeps
        tl.debug_barrier()
        target = block_after(table_ptr, table_stride, request, computed + 1, BLOCK_SIZE)
        target_ptr = conv_states_ptr + target * (KERNEL_SIZE - 1) * channels + columns
        for row in tl.static_range(KERNEL_SIZE - 2):
            before = tl.load(kept_ptr + (row + 1) * channels, mask=columns < channels_before, other=0.0)
            tl.debug_barrier()
            tl.store(target_ptr + row * channels, before, mask=columns < channels)
        new = tl.load(inputs_ptr, mask=columns < channels, other=0.0)
        tl.store(target_ptr + (KERNEL_SIZE - 2) * channels, new, mask=columns < channels)
    if part == 0:
        heads = tl.arange(0, HEAD_BLOCK)
        mask = heads < HEADS
        dt = tl.load(zxbcdt_ptr + token * stride + num_values + channels + heads, mask=mask, other=0.0)
        step = dt.to(tl.float32) + tl.load(dt_bias_ptr + heads, mask=mask, other=0.0)
        # log(1 + y) of a small y, which 1 + y would lose.
        y = tl.exp(-tl.abs(step))
        lost = (1.0 + y) - 1.0
        logarithm = tl.where(lost == 0.0, y, tl.log(1.0 + y) * (y / tl.where(lost == 0.0, 1.0, lost)))
        tl.store(size_ptr + token * HEADS + heads, tl.maximum(step, 0.0) + logarithm, mask=mask)


@triton.jit
def _state_update(
    xbc_ptr,
    size_ptr,
    rates_ptr,
    skip_ptr,
    starts_ptr,
    lens_ptr,
    table_ptr,
    states_ptr,
    read_ptr,
    table_stride,
    channels,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some columns of one head's state of one request, which has one token, per program."""
    request = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    start, end, computed = tokens_of(starts_ptr, lens_ptr, request)
    if start == end:
        return
    rows = tl.arange(0, STATE_BLOCK)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_mask, column_mask = rows < STATE_SIZE, columns < HEAD_DIM
    mask_before = (rows < tl.where(computed > 0, STATE_SIZE, 0))[:, None] & column_mask[None, :]
    places = head * (STATE_SIZE * HEAD_DIM) + rows[:, None] * HEAD_DIM + columns[None, :]
    source = block_after(table_ptr, table_stride, request, tl.maximum(computed, 1), BLOCK_SIZE)
    target = block_after(table_ptr, table_stride, request, computed + 1, BLOCK_SIZE)
    size = HEADS * STATE_SIZE * HEAD_DIM
    state = tl.load(states_ptr + source * size + places, mask=mask_before, other=0.0)
    token = start.to(tl.int64)
    row = xbc_ptr + token * channels
    b_at = HEADS * HEAD_DIM + head // (HEADS // GROUPS) * STATE_SIZE + rows
    x = tl.load(row + head * HEAD_DIM + columns, mask=column_mask, other=0.0)
    b = tl.load(row + b_at, mask=row_mask, other=0.0)
    c = tl.load(row + GROUPS * STATE_SIZE + b_at, mask=row_mask, other=0.0)
    step = tl.load(size_ptr + token * HEADS + head)
    state = state * tl.exp(-tl.load(rates_ptr + head) * step) + b[:, None] * (x * step)[None, :]
    read = tl.sum(state * c[:, None], axis=0) + x * tl.load(skip_ptr + head)
    tl.store(read_ptr + (token * HEADS + head) * HEAD_DIM + columns, read, mask=column_mask)
    tl.store(states_ptr + target * size + places, state, mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def _chunk_scores(
    xbc_ptr,
    chunks_ptr,
    scores_ptr,
    channels,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
):
    """C_i times B_j of all tokens i and j of one chunk, for one group, per program."""
    chunk, group = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(chunks_ptr + 2 * chunk), tl.load(chunks_ptr + 2 * chunk + 1)
    rows, states = tl.arange(0, CHUNK), tl.arange(0, PART)
    row_mask = rows < end - start
    tokens = start.to(tl.int64) + rows
    row = xbc_ptr + tokens * channels + HEADS * HEAD_DIM + group * STATE_SIZE
    scores = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for first in range(0, STATE_SIZE, PART):
        at = row[:, None] + (first + states)[None, :]
        mask = row_mask[:, None] & (first + states < STATE_SIZE)[None, :]
        b = tl.load(at, mask=mask, other=0.0)
        c = tl.load(at + GROUPS * STATE_SIZE, mask=mask, other=0.0)
        scores += tl.dot(c, tl.trans(b), input_precision="tf32x3")
    places = (tokens * GROUPS + group)[:, None] * CHUNK + rows[None, :]
    tl.store(scores_ptr + places, scores, mask=row_mask[:, None])


@triton.jit(do_not_specialize=["first_request"])
def _scan_chunks(
    xbc_ptr,
    size_ptr,
    rates_ptr,
    skip_ptr,
    starts_ptr,
    lens_ptr,
    table_ptr,
    scores_ptr,
    states_ptr,
    read_ptr,
    first_request,
    table_stride,
    channels,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some columns of one head's state of one request per program."""
    request = first_request + tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    group = head // (HEADS // GROUPS)
    start, end, computed = tokens_of(starts_ptr, lens_ptr, request)
    rows, others = tl.arange(0, CHUNK), tl.arange(0, CHUNK)
    states = tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    state_mask, column_mask = states < STATE_SIZE, columns < HEAD_DIM
    mask = state_mask[:, :, None] & column_mask[None, None, :]
    mask_before = (states < tl.where(computed > 0, STATE_SIZE, 0))[:, :, None] & column_mask[None, None, :]
    places = head * (STATE_SIZE * HEAD_DIM) + states[:, :, None] * HEAD_DIM + columns[None, None, :]
    source = block_after(table_ptr, table_stride, request, tl.maximum(computed, 1), BLOCK_SIZE)
    target = block_after(table_ptr, table_stride, request, computed + end - start, BLOCK_SIZE)
    size = HEADS * STATE_SIZE * HEAD_DIM
    state = tl.load(states_ptr + source * size + places, mask=mask_before, other=0.0)
    rate, skip = tl.load(rates_ptr + head), tl.load(skip_ptr + head)
    b_at = HEADS * HEAD_DIM + group * STATE_SIZE
    token = start.to(tl.int64) + rows
    left = end - start
    for _ in range(start, end, CHUNK):
        row_mask = rows < left
        state_rows = row_mask[None, :, None] & state_mask[:, None, :]
        value_mask = row_mask[:, None] & column_mask[None, :]
        step = tl.load(size_ptr + token * HEADS + head, mask=row_mask, other=0.0)
        decay = -rate * step
        # Sums of the tokens between two, not differences of sums, which lose digits where decays are large.
        later = tl.where(rows[:, None] > others[None, :], decay[:, None], 0.0)
        between = tl.where(rows[:, None] >= others[None, :], tl.exp(tl.cumsum(later, axis=0)), 0.0)
        seen, total = tl.exp(tl.cumsum(decay, axis=0)), tl.exp(tl.sum(decay, axis=0))
        to_end = tl.exp(tl.sum(tl.where(rows[None, :] > others[:, None], decay[None, :], 0.0), axis=1))
        tokens = xbc_ptr + token * channels
        x = tl.load(tokens[:, None] + head * HEAD_DIM + columns[None, :], mask=value_mask, other=0.0)
        added = x * step[:, None]
        b_ptr = tokens[None, :, None] + b_at + states[:, None, :]
        c = tl.load(b_ptr + GROUPS * STATE_SIZE, mask=state_rows, other=0.0) * seen[None, :, None]
        read = tl.sum(tl.dot(c, state, input_precision="tf32x3"), axis=0)
        scores_at = (token * GROUPS + group)[:, None] * CHUNK + others[None, :]
        scores = tl.load(scores_ptr + scores_at, mask=row_mask[:, None], other=0.0) * between
        read += tl.dot(scores, added, input_precision="tf32x3") + x * skip
        places_out = (token * HEADS + head)[:, None] * HEAD_DIM + columns[None, :]
        tl.store(read_ptr + places_out, read, mask=value_mask)
        b = tl.load(b_ptr, mask=state_rows, other=0.0) * to_end[None, :, None]
        of_parts = tl.broadcast_to(added[None, :, :], (PARTS, CHUNK, COLUMNS))
        change = tl.dot(tl.permute(b, (0, 2, 1)), of_parts, input_precision="tf32x3")
        state = state * total + change
        token += CHUNK
        left -= CHUNK
    tl.store(states_ptr + target * size + places, state, mask=mask)


@triton.jit(do_not_specialize=["num_requests"])
def _norm_squares(
    read_ptr,
    z_ptr,
    starts_ptr,
    squares_ptr,
    num_requests,
    z_stride,
    ELEMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the group's elements on this rank add to its mean square over ELEMENTS, of one token per program. Padding
    becomes 0."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < tl.where(token < tl.load(starts_ptr + num_requests), WIDTH, 0)
    value = tl.load(read_ptr + token * WIDTH + columns, mask=mask, other=0.0)
    if NORM == "after_gate":
        value *= silu(tl.load(z_ptr + token * z_stride + columns, mask=mask, other=0.0).to(tl.float32))
    tl.store(squares_ptr + token, tl.sum(value * value, axis=0) / ELEMENTS)


@triton.jit(do_not_specialize=["num_requests"])
def _gated_norm(
    read_ptr,
    z_ptr,
    norm_ptr,
    means_ptr,
    starts_ptr,
    out_ptr,
    num_requests,
    z_stride,
    eps,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One group of one token per program, whose mean squares are given if there is one group. Padding becomes 0."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    size = tl.where(token < tl.load(starts_ptr + num_requests), WIDTH, 0)
    mask = columns < size
    place = (token * GROUPS + group) * WIDTH + columns
    value = tl.load(read_ptr + place, mask=mask, other=0.0)
    z = tl.load(z_ptr + token * z_stride + group * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    if means_ptr is not None:
        value *= tl.rsqrt(tl.load(means_ptr + token) + eps)
    elif NORM == "before_gate":
        value *= tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    value *= silu(z)
    if means_ptr is None and NORM == "after_gate":
        value *= tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    if NORM is not None:
        value *= tl.load(norm_ptr + group * WIDTH + columns, mask=columns < WIDTH, other=0.0)
    tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=columns < WIDTH)


def mamba(
    shape: MambaShape,
    zxbcdt: torch.Tensor,
    conv: torch.Tensor,
    conv_bias: torch.Tensor,
    rates: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    requests: torch.Tensor | None,
    chunks: torch.Tensor | None,
    starts: torch.Tensor,
    lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    num_decodes: int,
    group_means: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute a layer between its projections, [T, num_values] in zxbcdt's dtype, and the states after the step.

    Args:
        zxbcdt: [T, num_inputs], float32, bfloat16 or float16; rows may be strided.
        conv: float32 [kernel_size, num_channels], the newest token's factors last; conv_bias: float32 [num_channels].
        rates: float32 [num_heads], exp(A_log); of dt_bias and skip (D) the same.
        norm: float32 [num_values]; eps: of this norm.
        conv_states: [num_states, kernel_size - 1, num_channels], in zxbcdt's dtype, contiguous.
        states: float32 [num_states, num_heads, state_size, head_dim], contiguous.
        requests: `short_conv.requests_of_tokens`; None: each request has one token, or is padding behind those that
            have.
        chunks: `short_conv.chunks_of_prompts` of CHUNK_SIZE, on the device; None exactly if `requests` is.
        starts: int32 [R + 1], index of each request's first token.
        lens: int32 [R], each request's number of tokens after the step.
        block_table: int32 [R, max_blocks], blocks of states; rows may be strided.
        block_size: tokens per entry of the block table.
        num_decodes: requests with one token, or none, which come first.
        group_means: `layers.mamba.GroupMeans`, if the layer has a norm of a group that several ranks share.
    """
    num_tokens, channels, num_requests = len(zxbcdt), shape.num_channels, len(lens)

    def empty(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(num_tokens, width, dtype=dtype, device=zxbcdt.device)

    xbc, size, read = empty(channels), empty(shape.num_heads), empty(shape.num_values)
    out = empty(shape.num_values, zxbcdt.dtype)
    step = {
        "starts_ptr": starts,
        "lens_ptr": lens,
        "table_ptr": block_table,
        "table_stride": block_table.stride(0),
        "BLOCK_SIZE": block_size,
    }
    block = min(_CHANNELS, next_power_of_2(channels))
    launch(
        _mamba_inputs,
        (num_tokens, cdiv(channels, block)),
        num_warps=max(block // 256, 1),
        num_stages=1,
        zxbcdt_ptr=zxbcdt,
        requests_ptr=requests,
        conv_states_ptr=conv_states,
        conv_ptr=conv,
        conv_bias_ptr=conv_bias,
        dt_bias_ptr=dt_bias,
        xbc_ptr=xbc,
        size_ptr=size,
        num_requests=num_requests,
        stride=zxbcdt.stride(0),
        channels=channels,
        num_values=shape.num_values,
        HEADS=shape.num_heads,
        KERNEL_SIZE=shape.kernel_size,
        BLOCK=block,
        HEAD_BLOCK=next_power_of_2(shape.num_heads),
        **step,
    )
    if requests is not None:
        keep_inputs(zxbcdt[:, shape.num_values :], conv_states, num_requests, step)
    rule = {
        "xbc_ptr": xbc,
        "size_ptr": size,
        "rates_ptr": rates,
        "skip_ptr": skip,
        "states_ptr": states,
        "read_ptr": read,
        "channels": channels,
        "HEADS": shape.num_heads,
        "GROUPS": shape.num_groups,
        "HEAD_DIM": shape.head_dim,
        "STATE_SIZE": shape.state_size,
        **step,
    }
    state_block = next_power_of_2(shape.state_size)
    columns = min(max(_UPDATE_ELEMENTS // state_block, 1), next_power_of_2(shape.head_dim))
    launch(
        _state_update,
        (
            (num_requests if chunks is None else num_decodes) * shape.num_heads,
            cdiv(shape.head_dim, columns),
        ),
        num_warps=1,
        num_stages=1,
        STATE_BLOCK=state_block,
        COLUMNS=columns,
        **rule,
    )
    if chunks is not None:
        _compute_chunks(shape, rule, chunks, num_decodes, num_requests - num_decodes)
    width = shape.num_values // shape.num_groups
    num_warps = min(max(next_power_of_2(width) // 512, 1), 8)
    of_norm = {
        "read_ptr": read,
        "z_ptr": zxbcdt,
        "starts_ptr": starts,
        "num_requests": num_requests,
        "z_stride": zxbcdt.stride(0),
        "WIDTH": width,
        "NORM": shape.norm,
        "BLOCK": next_power_of_2(width),
    }
    means = None
    if group_means is not None:
        squares = empty(1).view(-1)
        launch(
            _norm_squares,
            (num_tokens,),
            num_warps=num_warps,
            num_stages=1,
            squares_ptr=squares,
            ELEMENTS=width * shape.group_ranks,
            **of_norm,
        )
        means = group_means(squares)
    launch(
        _gated_norm,
        (num_tokens, shape.num_groups),
        num_warps=num_warps,
        num_stages=1,
        norm_ptr=norm,
        means_ptr=means,
        out_ptr=out,
        eps=eps,
        GROUPS=shape.num_groups,
        **of_norm,
    )
    return out


def _compute_chunks(
    shape: MambaShape, rule: dict[str, Any], chunks: torch.Tensor, num_decodes: int, num_prompts: int
) -> None:
    """Launch the kernels of the requests after the decodes.

    Args:
        rule: arguments that kernels of the states have in common.
    """
    xbc, state_block = rule["xbc_ptr"], max(next_power_of_2(shape.state_size), _MIN_DOT)
    scores = torch.empty(len(xbc), shape.num_groups, CHUNK_SIZE, dtype=torch.float32, device=xbc.device)
    parts = {
        "scores_ptr": scores,
        "CHUNK": CHUNK_SIZE,
        "PART": min(state_block, _PART),
    }
    of_scores = ("xbc_ptr", "channels", "HEADS", "GROUPS", "HEAD_DIM", "STATE_SIZE")
    launch(
        _chunk_scores,
        (len(chunks), shape.num_groups),
        num_warps=1,
        num_stages=1,
        chunks_ptr=chunks,
        **parts,
        **{name: rule[name] for name in of_scores},
    )
    columns = min(max(next_power_of_2(shape.head_dim), _MIN_DOT), _SCAN_COLUMNS)
    launch(
        _scan_chunks,
        (num_prompts * shape.num_heads, cdiv(shape.head_dim, columns)),
        num_warps=max(state_block // _PART, 4),
        num_stages=1,
        first_request=num_decodes,
        PARTS=max(state_block // _PART, 1),
        COLUMNS=columns,
        **parts,
        **rule,
    )
