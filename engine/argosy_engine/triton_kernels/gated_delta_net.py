"""A Gated DeltaNet (arXiv 2412.06464) between its projections, over states in blocks.

    delta_inputs    convolution over the tokens before, silu, q and k of length 1; decay and rate of each head
    keep_inputs     the last inputs of the convolution, for the next step
    delta_rule      of decodes the states, and what queries read from them
    chunk_systems   of prompts what does not depend on states, for each chunk of tokens by itself
    scan_chunks     of prompts the states, chunk by chunk, and what queries read from them
    gated_norm      RMSNorm of each head, multiplied by silu(z)

Where states are, and whether a request has one, kernels find by themselves in the step's lengths and block table on the
device: steps of a size take the same launches, so CUDA graphs can repeat them. A request without tokens is padding.
States are read and written in place; within a step no block is read that another request writes.

A program keeps a few columns of a head's state in registers, for columns do not depend on each other. What a token of a
chunk changes in a state depends on what those before it have changed: a triangular system of the chunk's keys (the WY
representation, arXiv 2406.06484, with decays as in 2412.06464). Products are in float32, by three of tensor cores each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.activations import silu
from argosy_engine.triton_kernels.launch import cdiv, launch, next_power_of_2
from argosy_engine.triton_kernels.short_conv import block_after, keep_inputs, tokens_of

_COLUMNS = 8
"""Columns of a state per program of `delta_rule`: with 128 rows 32 elements per thread of one warp."""
CHUNK_SIZE = 16
"""Tokens of a chunk. Twice as many take more registers than there are."""
MAX_CHUNK_KEYS = 128
"""Keys of a larger size are computed token by token in prompts, too: their chunks take more registers than there
are."""
_PART = 32
"""Keys per part of a product that `scan_chunks` has in one warp."""
_SCAN_COLUMNS = 32
"""Columns of a state per program of `scan_chunks`."""
_MIN_DOT = 16
"""Least size of a product's dimensions."""


class DeltaNetShape(NamedTuple):
    """Sizes of a layer; see `attention.params.DeltaNetParams`."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int

    @property
    def num_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_values

    @property
    def num_values(self) -> int:
        return self.num_value_heads * self.value_dim


@triton.jit(do_not_specialize=["num_requests"])
def _delta_inputs(
    qkvz_ptr,
    ba_ptr,
    requests_ptr,
    starts_ptr,
    lens_ptr,
    table_ptr,
    conv_states_ptr,
    conv_ptr,
    rates_ptr,
    dt_bias_ptr,
    qkv_ptr,
    decay_ptr,
    rate_ptr,
    num_requests,
    qkvz_stride,
    ba_stride,
    table_stride,
    channels,
    q_scale,
    norm_eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KERNEL_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    """One head of q, k or v of one token per program."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if requests_ptr is None:
        request = token
    else:
        request = tl.minimum(tl.load(requests_ptr + token), num_requests - 1).to(tl.int64)
    start, end, computed = tokens_of(starts_ptr, lens_ptr, request)
    if token >= end:
        return
    index = token - start
    is_value = head >= 2 * KEY_HEADS
    value_head = head - 2 * KEY_HEADS
    first = tl.where(is_value, 2 * KEY_HEADS * KEY_DIM + value_head * VALUE_DIM, head * KEY_DIM)
    size = tl.where(is_value, VALUE_DIM, KEY_DIM)
    size_before = tl.where(computed > 0, size, 0)
    offsets = tl.arange(0, HEAD_BLOCK)
    mask, columns = offsets < size, first + offsets
    block = block_after(table_ptr, table_stride, request, tl.maximum(computed, 1), BLOCK_SIZE)
    kept_ptr = conv_states_ptr + block * (KERNEL_SIZE - 1) * channels
    total = tl.zeros([HEAD_BLOCK], dtype=tl.float32)
    for tap in tl.static_range(KERNEL_SIZE):
        at = index + (tap + 1 - KERNEL_SIZE)
        factors = tl.load(conv_ptr + tap * channels + columns, mask=mask, other=0.0)
        new_ptr = qkvz_ptr + (start + at) * qkvz_stride + columns
        new = tl.load(new_ptr, mask=offsets < tl.where(at >= 0, size, 0), other=0.0)
        before_ptr = kept_ptr + (KERNEL_SIZE - 1 + at) * channels + columns
        before = tl.load(before_ptr, mask=offsets < tl.where(at < 0, size_before, 0), other=0.0)
        total += (new.to(tl.float32) + before.to(tl.float32)) * factors
    mixed = silu(total)
    if not is_value:
        mixed *= tl.rsqrt(tl.sum(mixed * mixed, axis=0) + norm_eps) * tl.where(head < KEY_HEADS, q_scale, 1.0)
    else:
        gates = ba_ptr + token * ba_stride + value_head
        b, a = tl.load(gates).to(tl.float32), tl.load(gates + VALUE_HEADS).to(tl.float32)
        step = a + tl.load(dt_bias_ptr + value_head)
        softplus = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
        place = token * VALUE_HEADS + value_head
        tl.store(decay_ptr + place, -tl.load(rates_ptr + value_head) * softplus)
        tl.store(rate_ptr + place, tl.sigmoid(b))
    tl.store(qkv_ptr + token * channels + columns, mixed, mask=mask)


@triton.jit
def _delta_rule(
    qkv_ptr,
    decay_ptr,
    rate_ptr,
    starts_ptr,
    lens_ptr,
    table_ptr,
    states_ptr,
    read_ptr,
    table_stride,
    channels,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some columns of one head's state of one request per program."""
    request = tl.program_id(0) // VALUE_HEADS
    head = tl.program_id(0) % VALUE_HEADS
    start, end, computed = tokens_of(starts_ptr, lens_ptr, request)
    if start == end:
        return
    rows = tl.arange(0, KEY_BLOCK)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_mask, column_mask = rows < KEY_DIM, columns < VALUE_DIM
    mask = row_mask[:, None] & column_mask[None, :]
    mask_before = (rows < tl.where(computed > 0, KEY_DIM, 0))[:, None] & column_mask[None, :]
    places = head * (KEY_DIM * VALUE_DIM) + rows[:, None] * VALUE_DIM + columns[None, :]
    source = block_after(table_ptr, table_stride, request, tl.maximum(computed, 1), BLOCK_SIZE)
    target = block_after(table_ptr, table_stride, request, computed + end - start, BLOCK_SIZE)
    size = VALUE_HEADS * KEY_DIM * VALUE_DIM
    state = tl.load(states_ptr + source * size + places, mask=mask_before, other=0.0)
    q_at = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + rows
    k_at = KEY_HEADS * KEY_DIM + q_at
    v_at = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + columns
    first = start.to(tl.int64)
    row, out = qkv_ptr + first * channels, read_ptr + (first * VALUE_HEADS + head) * VALUE_DIM
    gates_at = first * VALUE_HEADS + head
    for _ in range(start, end):
        q = tl.load(row + q_at, mask=row_mask, other=0.0)
        k = tl.load(row + k_at, mask=row_mask, other=0.0)
        v = tl.load(row + v_at, mask=column_mask, other=0.0)
        state *= tl.exp(tl.load(decay_ptr + gates_at))
        change = (v - tl.sum(state * k[:, None], axis=0)) * tl.load(rate_ptr + gates_at)
        state += k[:, None] * change[None, :]
        tl.store(out + columns, tl.sum(state * q[:, None], axis=0), mask=column_mask)
        row += channels
        out += VALUE_HEADS * VALUE_DIM
        gates_at += VALUE_HEADS
    tl.store(states_ptr + target * size + places, state, mask=mask)


@triton.jit
def _chunk_systems(
    qkv_ptr,
    decay_ptr,
    rate_ptr,
    chunks_ptr,
    keys_ptr,
    values_ptr,
    scores_ptr,
    totals_ptr,
    channels,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """One head of one chunk per program.

    With k, v, the rates b, the decays d since the chunk's begin, and T the inverse of the unit lower triangular matrix
    with b_i d_i / d_j k_i k_j: writes T (b d k) to `keys`, T (b v) to `values`, d_i / d_j q_i k_j for tokens j up to i
    to `scores`, and to `totals` the logarithms of d and of the decays from each token to the chunk's end.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(chunks_ptr + 2 * chunk), tl.load(chunks_ptr + 2 * chunk + 1)
    rows, others = tl.arange(0, CHUNK), tl.arange(0, CHUNK)
    row_mask = rows < end - start
    first = start.to(tl.int64)
    tokens = qkv_ptr + (first + rows) * channels
    gates = (first + rows) * VALUE_HEADS + head
    key_columns, value_columns = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    key_mask = row_mask[:, None] & (key_columns < KEY_DIM)[None, :]
    value_mask = row_mask[:, None] & (value_columns < VALUE_DIM)[None, :]
    q_at = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    k = tl.load(
        tokens[:, None] + (KEY_HEADS * KEY_DIM + q_at + key_columns)[None, :], mask=key_mask, other=0.0
    )
    rate = tl.load(rate_ptr + gates, mask=row_mask, other=0.0)
    decay = tl.load(decay_ptr + gates, mask=row_mask, other=0.0)
    total = tl.cumsum(decay, axis=0)
    tl.store(totals_ptr + 2 * gates, total, mask=row_mask)
    # Sums of the tokens between two, not differences of sums, which lose digits where decays are large.
    later = tl.where(rows[:, None] > others[None, :], decay[:, None], 0.0)
    tl.store(totals_ptr + 2 * gates + 1, tl.sum(later, axis=0), mask=row_mask)
    between = tl.exp(tl.cumsum(later, axis=0))
    products = tl.dot(k, tl.trans(k), input_precision="tf32x3")
    system = tl.where(rows[:, None] > others[None, :], products * between * rate[:, None], 0.0)
    inverse = tl.where(rows[:, None] == others[None, :], 1.0, 0.0)
    for row in range(1, CHUNK):
        factors = tl.sum(tl.where(rows[:, None] == row, system, 0.0), axis=0)
        change = tl.sum(factors[:, None] * inverse, axis=0)
        inverse -= tl.where(rows[:, None] == row, change[None, :], 0.0)
    changed = tl.dot(inverse, k * (rate * tl.exp(total))[:, None], input_precision="tf32x3")
    tl.store(keys_ptr + gates[:, None] * KEY_DIM + key_columns[None, :], changed, mask=key_mask)
    q = tl.load(tokens[:, None] + (q_at + key_columns)[None, :], mask=key_mask, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * between
    scores = tl.where(rows[:, None] >= others[None, :], scores, 0.0)
    tl.store(scores_ptr + gates[:, None] * CHUNK + others[None, :], scores, mask=row_mask[:, None])
    v_at = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    v = tl.load(tokens[:, None] + (v_at + value_columns)[None, :], mask=value_mask, other=0.0)
    values = tl.dot(inverse, v * rate[:, None], input_precision="tf32x3")
    tl.store(values_ptr + gates[:, None] * VALUE_DIM + value_columns[None, :], values, mask=value_mask)


@triton.jit(do_not_specialize=["first_request"])
def _scan_chunks(
    qkv_ptr,
    starts_ptr,
    lens_ptr,
    table_ptr,
    keys_ptr,
    values_ptr,
    scores_ptr,
    totals_ptr,
    states_ptr,
    read_ptr,
    first_request,
    table_stride,
    channels,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some columns of one head's state of one request per program."""
    request = first_request + tl.program_id(0) // VALUE_HEADS
    head = tl.program_id(0) % VALUE_HEADS
    start, end, computed = tokens_of(starts_ptr, lens_ptr, request)
    rows = tl.arange(0, CHUNK)
    keys = tl.arange(0, PARTS)[:, None] * (KEY_BLOCK // PARTS) + tl.arange(0, KEY_BLOCK // PARTS)[None, :]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    key_dim_before = tl.where(computed > 0, KEY_DIM, 0)
    column_mask = columns < VALUE_DIM
    mask = (keys < KEY_DIM)[:, :, None] & column_mask[None, None, :]
    mask_before = (keys < key_dim_before)[:, :, None] & column_mask[None, None, :]
    places = head * (KEY_DIM * VALUE_DIM) + keys[:, :, None] * VALUE_DIM + columns[None, None, :]
    source = block_after(table_ptr, table_stride, request, tl.maximum(computed, 1), BLOCK_SIZE)
    target = block_after(table_ptr, table_stride, request, computed + end - start, BLOCK_SIZE)
    size = VALUE_HEADS * KEY_DIM * VALUE_DIM
    state = tl.load(states_ptr + source * size + places, mask=mask_before, other=0.0)
    q_at = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    token = start.to(tl.int64) + rows
    left = end - start
    for _ in range(start, end, CHUNK):
        row_mask = rows < left
        key_mask = row_mask[None, :, None] & (keys < KEY_DIM)[:, None, :]
        value_mask = row_mask[:, None] & column_mask[None, :]
        gates = token * VALUE_HEADS + head
        total = tl.load(totals_ptr + 2 * gates, mask=row_mask, other=0.0)
        end_total = tl.sum(tl.where(rows == tl.minimum(left, CHUNK) - 1, total, 0.0), axis=0)
        changed_keys = tl.load(
            keys_ptr + gates[None, :, None] * KEY_DIM + keys[:, None, :], mask=key_mask, other=0.0
        )
        known = tl.sum(tl.dot(changed_keys, state, input_precision="tf32x3"), axis=0)
        values = tl.load(
            values_ptr + gates[:, None] * VALUE_DIM + columns[None, :], mask=value_mask, other=0.0
        )
        change = values - known
        tokens = qkv_ptr + token * channels
        q_ptr = tokens[None, :, None] + q_at + keys[:, None, :]
        q = tl.load(q_ptr, mask=key_mask, other=0.0) * tl.exp(total)[None, :, None]
        read = tl.sum(tl.dot(q, state, input_precision="tf32x3"), axis=0)
        scores = tl.load(
            scores_ptr + gates[:, None] * CHUNK + rows[None, :], mask=row_mask[:, None], other=0.0
        )
        read += tl.dot(scores, change, input_precision="tf32x3")
        tl.store(read_ptr + gates[:, None] * VALUE_DIM + columns[None, :], read, mask=value_mask)
        k = tl.load(q_ptr + KEY_HEADS * KEY_DIM, mask=key_mask, other=0.0)
        k *= tl.exp(tl.load(totals_ptr + 2 * gates + 1, mask=row_mask, other=0.0))[None, :, None]
        changes = tl.broadcast_to(change[None, :, :], (PARTS, CHUNK, COLUMNS))
        added = tl.dot(tl.permute(k, (0, 2, 1)), changes, input_precision="tf32x3")
        state = state * tl.exp(end_total) + added
        token += CHUNK
        left -= CHUNK
    tl.store(states_ptr + target * size + places, state, mask=mask)


@triton.jit(do_not_specialize=["num_requests"])
def _gated_norm(
    read_ptr,
    z_ptr,
    norm_ptr,
    starts_ptr,
    out_ptr,
    num_requests,
    z_stride,
    eps,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    """One head of one token per program. Padding becomes 0."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, HEAD_BLOCK)
    size = tl.where(token < tl.load(starts_ptr + num_requests), VALUE_DIM, 0)
    mask = columns < size
    place = (token * VALUE_HEADS + head) * VALUE_DIM + columns
    read = tl.load(read_ptr + place, mask=mask, other=0.0)
    z = tl.load(z_ptr + token * z_stride + head * VALUE_DIM + columns, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + columns, mask=mask, other=0.0)
    normed = read * tl.rsqrt(tl.sum(read * read, axis=0) / VALUE_DIM + eps) * weight
    tl.store(out_ptr + place, (normed * silu(z)).to(out_ptr.dtype.element_ty), mask=columns < VALUE_DIM)


def gated_delta_net(
    shape: DeltaNetShape,
    qkvz: torch.Tensor,
    ba: torch.Tensor,
    conv: torch.Tensor,
    rates: torch.Tensor,
    dt_bias: torch.Tensor,
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
    *,
    norm_eps: float = 1e-6,
) -> torch.Tensor:
    """Compute a layer between its projections, [T, num_values] in qkvz's dtype, and the states after the step.

    Args:
        qkvz: [T, num_channels + num_values], float32, bfloat16 or float16; rows may be strided.
        ba: [T, 2 * num_value_heads]; rows may be strided.
        conv: float32 [kernel_size, num_channels], the newest token's factors last.
        rates: float32 [num_value_heads], exp(A_log); of dt_bias the same.
        norm: float32 [value_dim]; eps: of this norm.
        conv_states: [num_states, kernel_size - 1, num_channels], in qkvz's dtype, contiguous.
        states: float32 [num_states, num_value_heads, key_dim, value_dim], contiguous.
        requests: `short_conv.requests_of_tokens`; None: each request has one token, or is padding behind those that
            have.
        chunks: `short_conv.chunks_of_prompts` of CHUNK_SIZE, on the device; None: there are no prompts, or all
            tokens are computed one by one.
        starts: int32 [R + 1], index of each request's first token.
        lens: int32 [R], each request's number of tokens after the step.
        block_table: int32 [R, max_blocks], blocks of states; rows may be strided.
        block_size: tokens per entry of the block table.
        num_decodes: requests with one token, or none, which come first.
        norm_eps: added to the squared length of queries and keys.
    """
    num_tokens, channels = len(qkvz), shape.num_channels
    qkv = torch.empty(num_tokens, channels, dtype=torch.float32, device=qkvz.device)
    decay, rate = (
        torch.empty(num_tokens, shape.num_value_heads, dtype=torch.float32, device=qkvz.device)
        for _ in range(2)
    )
    read = torch.empty(num_tokens, shape.num_values, dtype=torch.float32, device=qkvz.device)
    out = torch.empty(num_tokens, shape.num_values, dtype=qkvz.dtype, device=qkvz.device)
    num_requests = len(lens)
    sizes = {
        "KEY_HEADS": shape.num_key_heads,
        "VALUE_HEADS": shape.num_value_heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
    }
    step = {
        "starts_ptr": starts,
        "lens_ptr": lens,
        "table_ptr": block_table,
        "table_stride": block_table.stride(0),
        "BLOCK_SIZE": block_size,
    }
    launch(
        _delta_inputs,
        (num_tokens, 2 * shape.num_key_heads + shape.num_value_heads),
        num_warps=1,
        num_stages=1,
        qkvz_ptr=qkvz,
        ba_ptr=ba,
        requests_ptr=requests,
        conv_states_ptr=conv_states,
        conv_ptr=conv,
        rates_ptr=rates,
        dt_bias_ptr=dt_bias,
        qkv_ptr=qkv,
        decay_ptr=decay,
        rate_ptr=rate,
        num_requests=num_requests,
        qkvz_stride=qkvz.stride(0),
        ba_stride=ba.stride(0),
        channels=channels,
        q_scale=shape.key_dim**-0.5,
        norm_eps=norm_eps,
        KERNEL_SIZE=shape.kernel_size,
        HEAD_BLOCK=next_power_of_2(max(shape.key_dim, shape.value_dim)),
        **sizes,
        **step,
    )
    keep_inputs(qkvz, conv_states, num_requests, step)
    rule = {"qkv_ptr": qkv, "states_ptr": states, "read_ptr": read, "channels": channels, **sizes, **step}
    columns = min(_COLUMNS, next_power_of_2(shape.value_dim))
    launch(
        _delta_rule,
        (
            (num_requests if chunks is None else num_decodes) * shape.num_value_heads,
            cdiv(shape.value_dim, columns),
        ),
        num_warps=1,
        num_stages=1,
        decay_ptr=decay,
        rate_ptr=rate,
        KEY_BLOCK=next_power_of_2(shape.key_dim),
        COLUMNS=columns,
        **rule,
    )
    if chunks is not None:
        _compute_chunks(shape, rule, decay, rate, chunks, num_decodes, num_requests - num_decodes)
    z = qkvz[:, channels:]
    launch(
        _gated_norm,
        (num_tokens, shape.num_value_heads),
        num_warps=1,
        num_stages=1,
        read_ptr=read,
        z_ptr=z,
        norm_ptr=norm,
        starts_ptr=starts,
        out_ptr=out,
        num_requests=num_requests,
        z_stride=z.stride(0),
        eps=eps,
        VALUE_HEADS=shape.num_value_heads,
        VALUE_DIM=shape.value_dim,
        HEAD_BLOCK=next_power_of_2(shape.value_dim),
    )
    return out


def _compute_chunks(
    shape: DeltaNetShape,
    rule: dict[str, Any],
    decay: torch.Tensor,
    rate: torch.Tensor,
    chunks: torch.Tensor,
    num_decodes: int,
    num_prompts: int,
) -> None:
    """Launch the rule for the requests after the decodes.

    Args:
        rule: arguments that kernels of the rule have in common.
    """
    num_tokens, heads = decay.shape

    def empty(width: int) -> torch.Tensor:
        return torch.empty(num_tokens, heads, width, dtype=torch.float32, device=decay.device)

    parts = {
        "keys_ptr": empty(shape.key_dim),
        "values_ptr": empty(shape.value_dim),
        "scores_ptr": empty(CHUNK_SIZE),
        "totals_ptr": empty(2),
        "CHUNK": CHUNK_SIZE,
        "KEY_BLOCK": max(next_power_of_2(shape.key_dim), _MIN_DOT),
    }
    only_scan = (
        "states_ptr",
        "read_ptr",
        "starts_ptr",
        "lens_ptr",
        "table_ptr",
        "table_stride",
        "BLOCK_SIZE",
    )
    launch(
        _chunk_systems,
        (len(chunks), heads),
        num_warps=8,
        num_stages=1,
        decay_ptr=decay,
        rate_ptr=rate,
        chunks_ptr=chunks,
        VALUE_BLOCK=max(next_power_of_2(shape.value_dim), _MIN_DOT),
        **parts,
        **{name: value for name, value in rule.items() if name not in only_scan},
    )
    columns = min(max(next_power_of_2(shape.value_dim), _MIN_DOT), _SCAN_COLUMNS)
    launch(
        _scan_chunks,
        (num_prompts * heads, cdiv(shape.value_dim, columns)),
        num_warps=4,
        num_stages=1,
        first_request=num_decodes,
        PARTS=max(next_power_of_2(shape.key_dim) // _PART, 1),
        COLUMNS=columns,
        **parts,
        **rule,
    )
