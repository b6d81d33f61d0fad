"""AttentionTiles: the tile sizes, warps and pipeline stages of the paged attention kernel on a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
import triton

from argosy_engine.triton_kernels.device_traits import DeviceTraits

MAX_GROUP_SIZE = 64
"""Query heads that may share one KV head: they are rows of one tile."""
_MIN_ROWS = 16
"""Rows of the smallest matrix product on tensor cores."""
WIDE_HEAD_DIM = 256
"""Larger heads leave registers for the smallest tile only."""
MAX_WIDE_GROUP_SIZE = _MIN_ROWS
"""Query heads that may share one of these."""
_MAX_FEW_ROWS = 32
_AMPLE_SHARED_MEMORY = 160 << 10
"""Of data-centre GPUs (A100, H100, B200); the others have 99 KiB."""
_OPERANDS_IN_SHARED_MEMORY = (9, 10)
"""Major capabilities whose matrix products read shared memory (`wgmma`, `tcgen05`). The products of the others
(`mma.sync`) take keys and values from registers."""


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """One configuration of the paged attention kernel."""

    block_m: int
    """Rows of a query tile: queries times the query heads of one KV head."""
    tile: int
    """Keys visited at a time."""
    num_warps: int
    num_stages: int


@cache
def with_two_stages(tiles: AttentionTiles) -> AttentionTiles:
    """Return the configuration with at most one tile of keys in flight beside the one that is computed."""
    return replace(tiles, num_stages=min(tiles.num_stages, 2))


@lru_cache(maxsize=1024)
def choose_tiles(
    traits: DeviceTraits,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    group_size: int,
    max_query_len: int,
) -> AttentionTiles:
    """Choose the configuration for requests of up to `max_query_len` queries.

    Few rows (decode) wait for memory: the tile is as small as tensor cores allow, so that several programs fit an SM,
    and the next tile's keys are in flight while one is computed, two tiles ahead where shared memory is ample. Many
    rows (prefill) wait for tensor cores: 128 rows are two warp groups of an H100 and use each key that was read 128
    times. Registers limit both, as the accumulator is [block_m, head_dim] in float32, and keys in FP8 are widened in
    registers: no configuration may spill.

    Float32 is for comparisons: it is multiplied without tensor cores, in the smallest tiles.

    Args:
        dtype: of the queries.
        kv_dtype: of the KV cache.
        group_size: query heads per KV head, up to MAX_GROUP_SIZE.
    """
    if dtype is torch.float32:
        return AttentionTiles(max(_MIN_ROWS, triton.next_power_of_2(group_size)), 16, 8, 2)
    if head_dim > WIDE_HEAD_DIM:
        return AttentionTiles(_MIN_ROWS, 16, 8 if kv_dtype is dtype else 4, 2)
    num_stages = 3 if traits.shared_memory >= _AMPLE_SHARED_MEMORY else 2
    rows = triton.next_power_of_2(max_query_len * group_size)
    if rows <= _MAX_FEW_ROWS:
        tile = 64 if head_dim <= 128 else 32
        if kv_dtype is not dtype and num_stages == 2:
            tile //= 2
        return AttentionTiles(max(_MIN_ROWS, rows), tile, 4, num_stages)
    if head_dim > 128:
        return AttentionTiles(64, 32, 8, 2)
    reads_shared_memory = traits.capability // 10 in _OPERANDS_IN_SHARED_MEMORY
    return AttentionTiles(128, 64 if reads_shared_memory or head_dim <= 64 else 32, 8, num_stages)
