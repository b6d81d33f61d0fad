"""Split-KV: how many segments a sequence's KV cache is cut into, and how the segments' results are merged.

A decode of few sequences has fewer programs than the device has SMs, and the longest sequence alone decides when it
ends. So each sequence is cut into segments that are attended to by programs of their own, and a second kernel merges
them (Flash-Decoding, https://pytorch.org/blog/flash-decoding).

A segment's result is its normalised output o_s and the base-2 logarithm of its softmax denominator, lse_s. The merged
output is sum(2^lse_s * o_s) / sum(2^lse_s). A segment without a visible key has lse_s = -inf, and its o_s is not read.

The merged output can be written in FP8, as the input of an FP8 product. A scale per token needs a bound on the outputs
of all its heads, which different programs merge. Each finds the same bound by itself, before anything is merged: a
weighted mean of o_s is at most the same mean of the largest magnitudes of o_s. Where that is more than the largest
magnitude itself, it costs range, of which FP8 has plenty, and no precision, which is relative.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.activations import row_scale, to_fp8
from argosy_engine.triton_kernels.launch import DeviceTraits, launch, next_power_of_2

MAX_SEGMENTS = 32
_PROGRAMS_PER_SM = 3
"""Programs that a split decode aims at: two to be resident, and half as many again so that lengths may differ. On an
H200, 4 took 5 to 25 % longer for 8 and 16 requests of one length."""
_MIN_TILES = 2
"""Key tiles of a segment where a sequence is as long as it may become. With fewer, merging costs more than it gains."""


def choose_num_segments(traits: DeviceTraits, num_programs: int, max_tiles: int) -> int:
    """Return the number of segments, a power of two in [1, MAX_SEGMENTS]; 1 means that splitting does not pay.

    It depends on shapes only, so that one number holds for every replay of a captured CUDA graph.

    Args:
        num_programs: programs without splitting.
        max_tiles: key tiles of the longest sequence that the block table can hold.
    """
    wanted = min(_PROGRAMS_PER_SM * traits.num_sms // num_programs, max_tiles // _MIN_TILES, MAX_SEGMENTS)
    return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1


def merge_segments(
    out: torch.Tensor,
    partial_out: torch.Tensor,
    lse: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    row_scales: torch.Tensor | None = None,
    largest: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> None:
    """Merge the segments' results into out; rows of tokens that belong to no request are left as they are.

    Args:
        out: [T, num_heads, head_dim], with contiguous heads.
        partial_out: float32 [T, num_heads, num_segments, head_dim], contiguous.
        lse: float32 [T, num_heads, num_segments], contiguous.
        query_start_loc: int32 [R + 1].
        row_scales: float32 [T, 1], gets each token's scale if out is in FP8. Then one of the following is given.
        largest: largest magnitude of each partial_out, float32 of the shape of lse. A token's scale follows from it.
        out_scale: float32 [1], the scale of all tokens.
    """
    num_tokens, num_heads, num_segments, head_dim = partial_out.shape
    launch(
        _merge_segments_kernel,
        (num_tokens * num_heads,),
        num_warps=4,
        num_stages=1,
        out_ptr=out,
        partial_out_ptr=partial_out,
        lse_ptr=lse,
        largest_ptr=largest,
        out_scale_ptr=out_scale,
        row_scales_ptr=row_scales,
        query_start_loc_ptr=query_start_loc,
        num_requests=query_start_loc.shape[0] - 1,
        num_segments=num_segments,
        out_stride_token=out.stride(0),
        out_stride_head=out.stride(1),
        NUM_HEADS=num_heads,
        NUM_HEADS_PADDED=next_power_of_2(num_heads),
        MAX_SEGMENTS=MAX_SEGMENTS,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=next_power_of_2(head_dim),
    )


@triton.jit(do_not_specialize=["num_requests", "num_segments"])
def _merge_segments_kernel(
    out_ptr,
    partial_out_ptr,
    lse_ptr,
    largest_ptr,
    out_scale_ptr,
    row_scales_ptr,
    query_start_loc_ptr,
    num_requests,
    num_segments,
    out_stride_token,
    out_stride_head,
    NUM_HEADS: tl.constexpr,
    NUM_HEADS_PADDED: tl.constexpr,
    MAX_SEGMENTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
):
    """Merge the segments of one token's head; one program each."""
    row = tl.program_id(0).to(tl.int64)
    token, head = row // NUM_HEADS, row % NUM_HEADS
    first_token = tl.load(query_start_loc_ptr)
    end_token = tl.load(query_start_loc_ptr + num_requests)
    if (token < first_token) | (token >= end_token):
        return
    segment = tl.arange(0, MAX_SEGMENTS)
    dim = tl.arange(0, HEAD_DIM_PADDED)
    lse = tl.load(lse_ptr + row * num_segments + segment, mask=segment < num_segments, other=float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, axis=0))
    partial_out = tl.load(
        partial_out_ptr + (row * num_segments + segment[:, None]) * HEAD_DIM + dim[None, :],
        mask=(lse > float("-inf"))[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    merged = tl.sum(partial_out * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    if row_scales_ptr is None:
        out = merged.to(out_ptr.dtype.element_ty)
    else:
        if largest_ptr is None:
            scale = tl.load(out_scale_ptr)
        else:
            scale = _token_scale(
                lse_ptr, largest_ptr, token, num_segments, NUM_HEADS, NUM_HEADS_PADDED, MAX_SEGMENTS
            )
        if head == 0:
            tl.store(row_scales_ptr + token, scale)
        out = to_fp8(merged, scale)
    tl.store(out_ptr + token * out_stride_token + head * out_stride_head + dim, out, mask=dim < HEAD_DIM)


@triton.jit
def _token_scale(
    lse_ptr,
    largest_ptr,
    token,
    num_segments,
    NUM_HEADS: tl.constexpr,
    NUM_HEADS_PADDED: tl.constexpr,
    MAX_SEGMENTS: tl.constexpr,
):
    """Return the scale of a token's merged outputs, from a bound on those of every head."""
    head = tl.arange(0, NUM_HEADS_PADDED)
    segment = tl.arange(0, MAX_SEGMENTS)
    offsets = (token * NUM_HEADS + head[:, None]) * num_segments + segment[None, :]
    mask = (head < NUM_HEADS)[:, None] & (segment < num_segments)[None, :]
    lse = tl.load(lse_ptr + offsets, mask=mask, other=float("-inf"))
    largest = tl.load(largest_ptr + offsets, mask=lse > float("-inf"), other=0.0)
    reference = tl.where(head < NUM_HEADS, tl.max(lse, axis=1), 0.0)
    weight = tl.exp2(lse - reference[:, None])
    total = tl.where(head < NUM_HEADS, tl.sum(weight, axis=1), 1.0)
    return row_scale(tl.max(tl.sum(largest * weight, axis=1) / total, axis=0))
