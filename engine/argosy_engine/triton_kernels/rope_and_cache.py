"""rope_and_cache: everything between the qkv projection and attention, in one launch.

Per head: RMSNorm of q and k (optional), rotary embedding that rotates halves (arXiv 2104.09864), and the write of keys
and values to their slots of the paged cache. Arithmetic is in float32 and results are rounded once.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.launch import DeviceTraits, cdiv, device_traits, launch, next_power_of_2

_FEW_ELEMENTS = 1024
"""Elements per program of a small batch: 8 per thread of 4 warps, one 16-byte load in a 16-bit dtype."""
_MANY_ELEMENTS = 4096
"""Elements per program of a batch that fills the device anyway: fewer programs, each with loads in flight."""


@triton.jit
def _rope_and_cache(
    qkv_ptr,
    positions_ptr,
    cosines_ptr,
    sines_ptr,
    slots_ptr,
    cache_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_scale_ptr,
    v_scale_ptr,
    eps,
    qkv_stride,
    table_stride,
    cache_kv_stride,
    cache_block_stride,
    cache_token_stride,
    cache_head_stride,
    num_heads,
    num_kv_heads,
    q_programs,
    kv_programs,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    cached = cache_ptr + slot // BLOCK_SIZE * cache_block_stride + slot % BLOCK_SIZE * cache_token_stride
    # Names of different shapes differ between the branches: Triton would merge them otherwise.
    if program < q_programs:
        q_head = program * Q_HEADS + tl.arange(0, Q_HEADS)
        q = qkv_ptr + token * qkv_stride + q_head[:, None] * HEAD_DIM
        _norm_and_rotate(
            q, q, q_head < num_heads, q_norm_ptr, None, eps, positions_ptr + token, cosines_ptr, sines_ptr,
            table_stride, HEAD_DIM, ROTARY_DIM, ADDS_ONE, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip
    elif program < q_programs + kv_programs:
        k_head = (program - q_programs) * KV_HEADS + tl.arange(0, KV_HEADS)
        k = qkv_ptr + token * qkv_stride + (num_heads + k_head[:, None]) * HEAD_DIM
        cached_k = cached + k_head[:, None] * cache_head_stride
        _norm_and_rotate(
            k, cached_k, k_head < num_kv_heads, k_norm_ptr, k_scale_ptr, eps, positions_ptr + token,
            cosines_ptr, sines_ptr, table_stride, HEAD_DIM, ROTARY_DIM, ADDS_ONE, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip
    else:
        v_head = (program - q_programs - kv_programs) * KV_HEADS + tl.arange(0, KV_HEADS)
        columns = tl.arange(0, HEAD_BLOCK)[None, :]
        mask = (v_head < num_kv_heads)[:, None] & (columns < HEAD_DIM)
        v = qkv_ptr + token * qkv_stride + (num_heads + num_kv_heads + v_head[:, None]) * HEAD_DIM
        cached_v = cached + cache_kv_stride + v_head[:, None] * cache_head_stride
        _store(
            cached_v + columns, tl.load(v + columns, mask=mask, other=0.0).to(tl.float32), v_scale_ptr, mask
        )


@triton.jit
def _norm_and_rotate(
    x,
    out,
    is_head,
    norm_ptr,
    scale_ptr,
    eps,
    position_ptr,
    cosines_ptr,
    sines_ptr,
    table_stride,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Read heads from x, write them to out; both are pointers [heads, 1]."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    half = tl.arange(0, HALF_BLOCK)[None, :]
    rest = ROTARY_DIM + tl.arange(0, REST_BLOCK)[None, :]
    half_mask = is_head[:, None] & (half < HALF)
    rest_mask = is_head[:, None] & (rest < HEAD_DIM)
    if ROTARY_DIM > 0:
        first = tl.load(x + half, mask=half_mask, other=0.0).to(tl.float32)
        second = tl.load(x + HALF + half, mask=half_mask, other=0.0).to(tl.float32)
    if ROTARY_DIM < HEAD_DIM:
        passed = tl.load(x + rest, mask=rest_mask, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        if ROTARY_DIM == 0:
            squares = tl.sum(passed * passed, axis=1)
        else:
            squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
            if ROTARY_DIM < HEAD_DIM:
                squares += tl.sum(passed * passed, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        if ROTARY_DIM > 0:
            first *= scale * _weight(norm_ptr + half, half < HALF, ADDS_ONE)
            second *= scale * _weight(norm_ptr + HALF + half, half < HALF, ADDS_ONE)
        if ROTARY_DIM < HEAD_DIM:
            passed *= scale * _weight(norm_ptr + rest, rest < HEAD_DIM, ADDS_ONE)
    if ROTARY_DIM > 0:
        table = tl.load(position_ptr).to(tl.int64) * table_stride + half
        cosine = tl.load(cosines_ptr + table, mask=half < HALF, other=0.0)
        sine = tl.load(sines_ptr + table, mask=half < HALF, other=0.0)
        _store(out + half, first * cosine - second * sine, scale_ptr, half_mask)
        _store(out + HALF + half, second * cosine + first * sine, scale_ptr, half_mask)
    if ROTARY_DIM < HEAD_DIM:
        _store(out + rest, passed, scale_ptr, rest_mask)


@triton.jit
def _weight(pointers, mask, ADDS_ONE: tl.constexpr):
    weight = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return weight + 1.0 if ADDS_ONE else weight


@triton.jit
def _store(pointers, value, scale_ptr, mask):
    if scale_ptr is not None:
        # 448 is the largest e4m3 number; without the clamp a larger one might become NaN.
        value = tl.clamp(value / tl.load(scale_ptr), -448.0, 448.0)
    tl.store(pointers, value.to(pointers.dtype.element_ty), mask=mask)


def rope_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cosines: torch.Tensor | None,
    sines: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    num_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    adds_one: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Norm and rotate the queries in place; norm and rotate the keys, and write keys and values to the cache.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys, values; float32, bfloat16 or float16; rows
            may be strided. Keys and values are left as they are.
        positions: int32 or int64 [T], below the length of the tables.
        cosines: float32 [positions, rotary_dim / 2]; the rest of a head's dimensions is not rotated. None: nothing is.
        sines: the same shape as cosines.
        slot_mapping: int64 [T], block * block_size + offset. Rows with -1 are padding and left alone.
        kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], qkv's dtype or float8_e4m3fn.
        q_norm: weights of the queries' RMSNorm, [head_dim]; None: no norm.
        k_norm: the same for the keys.
        adds_one: multiply by 1 + weight, for Gemma's weights as its checkpoints store them.
        k_scale: float32 [1]; an FP8 cache stores key / k_scale, saturating at 448.
        v_scale: the same for the values.

    Raises:
        ValueError: the device has no FP8 for an FP8 cache, or such a cache has no scales, or another cache has them.
    """
    _, _, block_size, num_kv_heads, head_dim = kv_cache.shape
    traits = device_traits(qkv.device)
    is_fp8 = kv_cache.dtype is torch.float8_e4m3fn
    if is_fp8 and not traits.has_fp8:
        raise ValueError("FP8 KV cache on a device without FP8: choose the model's dtype for the cache")
    if is_fp8 != (k_scale is not None) or is_fp8 != (v_scale is not None):
        raise ValueError("k_scale and v_scale belong to an FP8 KV cache, which needs both")
    rotary_dim = 0 if cosines is None else 2 * cosines.shape[1]
    tokens = slot_mapping.shape[0]
    q_heads, kv_heads, q_programs, kv_programs = _programs(
        traits, tokens, num_heads, num_kv_heads, head_dim, rotary_dim
    )
    kv_stride, block_stride, token_stride, head_stride, _ = kv_cache.stride()
    launch(
        _rope_and_cache,
        (tokens, q_programs + 2 * kv_programs),
        num_warps=4,
        num_stages=1,
        qkv_ptr=qkv,
        positions_ptr=positions,
        cosines_ptr=cosines,
        sines_ptr=sines,
        slots_ptr=slot_mapping,
        cache_ptr=kv_cache,
        q_norm_ptr=q_norm,
        k_norm_ptr=k_norm,
        k_scale_ptr=k_scale,
        v_scale_ptr=v_scale,
        eps=eps,
        qkv_stride=qkv.stride(0),
        table_stride=0 if cosines is None else cosines.stride(0),
        cache_kv_stride=kv_stride,
        cache_block_stride=block_stride,
        cache_token_stride=token_stride,
        cache_head_stride=head_stride,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        q_programs=q_programs,
        kv_programs=kv_programs,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        ADDS_ONE=adds_one,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HALF_BLOCK=next_power_of_2(max(rotary_dim // 2, 1)),
        REST_BLOCK=next_power_of_2(max(head_dim - rotary_dim, 1)),
        HEAD_BLOCK=next_power_of_2(head_dim),
    )


@lru_cache(maxsize=4096)
def _programs(
    traits: DeviceTraits, tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int
) -> tuple[int, int, int, int]:
    """Return how many heads of queries, and of keys, a program has, and how many programs of each a token has."""
    head_block = next_power_of_2(head_dim)
    if rotary_dim < head_dim:
        head_block *= 2  # the part that is not rotated has registers of its own
    for elements in (_MANY_ELEMENTS, _FEW_ELEMENTS):
        q_heads, kv_heads = (
            min(next_power_of_2(heads), max(elements // head_block, 1)) for heads in (num_heads, num_kv_heads)
        )
        q_programs, kv_programs = cdiv(num_heads, q_heads), cdiv(num_kv_heads, kv_heads)
        if tokens * (q_programs + 2 * kv_programs) >= 4 * traits.num_sms:
            break
    return q_heads, kv_heads, q_programs, kv_programs
