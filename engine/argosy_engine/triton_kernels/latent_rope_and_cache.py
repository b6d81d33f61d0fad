"""latent_rope_and_cache: what comes before attention over latents, in one launch.

The norm of a token's latent, the rotary embedding (arXiv 2104.09864) of its key and of the queries' rotated parts, and
the write of latent and key to their slot of the paged cache. Arithmetic is in float32 and results are rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.device_traits import device_traits
from argosy_engine.triton_kernels.launch import launch

_FEW_ELEMENTS, _MANY_ELEMENTS = 1024, 4096
"""Elements of queries that a program rotates, in small batches and in those that fill the device anyway."""


@triton.jit
def _latent_rope_and_cache(
    q_ptr,
    compressed_ptr,
    positions_ptr,
    cosines_ptr,
    sines_ptr,
    slots_ptr,
    cache_ptr,
    norm_ptr,
    eps,
    q_stride,
    compressed_stride,
    table_stride,
    cache_block_stride,
    cache_slot_stride,
    num_heads,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    HALF: tl.constexpr = ROPE // 2
    half = tl.arange(0, HALF_BLOCK)[None, :]
    table = tl.load(positions_ptr + token).to(tl.int64) * table_stride + half
    cosine = tl.load(cosines_ptr + table, mask=half < HALF, other=0.0)
    sine = tl.load(sines_ptr + table, mask=half < HALF, other=0.0)
    if program == 0:
        compressed = compressed_ptr + token * compressed_stride
        cached = cache_ptr + slot // BLOCK_SIZE * cache_block_stride + slot % BLOCK_SIZE * cache_slot_stride
        column = tl.arange(0, RANK_BLOCK)
        mask = column < RANK
        latent = tl.load(compressed + column, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(norm_ptr + column, mask=mask, other=0.0).to(tl.float32)
        latent *= tl.rsqrt(tl.sum(latent * latent, axis=0) / RANK + eps) * weight
        tl.store(cached + column, latent.to(cache_ptr.dtype.element_ty), mask=mask)
        _rotate(
            compressed + RANK, cached + RANK, tl.full([1, 1], 0, tl.int32), 0, half < HALF, half, cosine, sine,
            HALF,
        )  # fmt: skip
    else:
        head = ((program - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        q = q_ptr + token * q_stride + NOPE
        is_rotated = (head < num_heads) & (half < HALF)
        _rotate(q, q, head, NOPE + ROPE, is_rotated, half, cosine, sine, HALF)


@triton.jit
def _rotate(
    x,
    out,
    head,
    head_stride,
    mask,
    half,
    cosine,
    sine,
    HALF: tl.constexpr,
):
    """Rotate halves of parts of heads from x and write them to out; head is [heads, 1]."""
    first_at = head * head_stride + half
    second_at = first_at + HALF
    first = tl.load(x + first_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + second_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + first_at, (first * cosine - second * sine).to(out.dtype.element_ty), mask=mask)
    tl.store(out + second_at, (second * cosine + first * sine).to(out.dtype.element_ty), mask=mask)


def latent_rope_and_cache(
    q: torch.Tensor,
    compressed: torch.Tensor,
    positions: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    norm: torch.Tensor,
    eps: float,
) -> None:
    """Rotate the queries in place; norm the latents, rotate the keys, and write both to the cache.

    Args:
        q: [T, num_heads, qk_nope_head_dim + qk_rope_head_dim], of which the end is rotated; float32, bfloat16 or
            float16; heads contiguous.
        compressed: [T, kv_lora_rank + qk_rope_head_dim], of q's dtype; rows may be strided. It is left as it is.
        positions: int32 or int64 [T], below the length of the tables.
        cosines: float32 [positions, qk_rope_head_dim / 2].
        sines: the same.
        slot_mapping: int64 [T], block * block_size + offset. Rows with -1 are padding and left alone.
        kv_cache: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], of q's dtype.
        norm: weight [kv_lora_rank] of the RMSNorm of latents.
        eps: of this norm.
    """
    num_heads, head_dim = q.shape[1:]
    rope = 2 * cosines.shape[1]
    rank = kv_cache.shape[2] - rope
    tokens, traits = len(slot_mapping), device_traits(q.device)
    for elements in (_MANY_ELEMENTS, _FEW_ELEMENTS):
        heads = min(triton.next_power_of_2(num_heads), max(elements // triton.next_power_of_2(rope), 1))
        programs = triton.cdiv(num_heads, heads)
        if tokens * (programs + 1) >= 4 * traits.num_sms:
            break
    launch(
        _latent_rope_and_cache,
        (tokens, programs + 1),
        num_warps=4,
        num_stages=1,
        q_ptr=q,
        compressed_ptr=compressed,
        positions_ptr=positions,
        cosines_ptr=cosines,
        sines_ptr=sines,
        slots_ptr=slot_mapping,
        cache_ptr=kv_cache,
        norm_ptr=norm,
        eps=eps,
        q_stride=q.stride(0),
        compressed_stride=compressed.stride(0),
        table_stride=cosines.stride(0),
        cache_block_stride=kv_cache.stride(0),
        cache_slot_stride=kv_cache.stride(1),
        num_heads=num_heads,
        BLOCK_SIZE=kv_cache.shape[1],
        RANK=rank,
        RANK_BLOCK=triton.next_power_of_2(rank),
        NOPE=head_dim - rope,
        ROPE=rope,
        HALF_BLOCK=triton.next_power_of_2(max(rope // 2, 1)),
        HEADS=heads,
    )
