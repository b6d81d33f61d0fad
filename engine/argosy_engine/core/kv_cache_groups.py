"""What each kind of layer asks of the block pool: how many blocks, which of them no longer, and what a prefix hit is.

A request has one list of block ids per group. Position i of an attention group's list is the block of tokens
[i * block_size, (i + 1) * block_size); the null block (0) stands where a block is no longer needed.
(vLLM, `v1/core/single_type_kv_cache_manager.py`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from argosy_engine.core.block_pool import BlockPool
from argosy_engine.worker.kv_cache_interface import (
    KVCacheSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
    peak_blocks,
)

NULL_BLOCK = 0


class FullAttentionGroup:
    """
    Every block, kept until the request ends.

    Args:
        key_suffix: told apart by it, the groups' blocks share the pool's prefix cache; empty for the first group.
    """

    is_shareable: ClassVar[bool] = True
    """Whether full blocks may serve other requests."""

    def __init__(
        self, spec: KVCacheSpec, key_suffix: bytes, block_size: int, max_num_batched_tokens: int
    ) -> None:
        self.spec = spec
        self.key_suffix = key_suffix
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens

    def key(self, block_hash: bytes) -> bytes:
        return block_hash + self.key_suffix if self.key_suffix else block_hash

    def num_blocks(self, num_tokens: int) -> int:
        """Length of the block list of a request with that many computed and scheduled tokens."""
        return -(-num_tokens // self.block_size)

    def peak_blocks(self, num_tokens: int) -> int:
        """Most blocks that a request holds at once on its way to `num_tokens`."""
        return peak_blocks(self.spec, num_tokens, self.block_size, self.max_num_batched_tokens)

    def num_skipped(self, num_computed_tokens: int) -> int:
        """Leading blocks that no token from `num_computed_tokens` on reads."""
        return 0

    def find_hit(self, pool: BlockPool, block_hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix of the hashes from which a request can go on."""
        if self.key_suffix:
            block_hashes = [self.key(block_hash) for block_hash in block_hashes]
        return pool.lookup(block_hashes)


class SlidingWindowGroup(FullAttentionGroup):
    """Blocks wholly behind the window are given back, and a hit does not need them."""

    spec: SlidingWindowSpec

    def num_skipped(self, num_computed_tokens: int) -> int:
        return max(num_computed_tokens - self.spec.window + 1, 0) // self.block_size

    def find_hit(self, pool: BlockPool, block_hashes: Sequence[bytes]) -> list[int]:
        """Looks from the end for a run of blocks that fills the window, or that begins at the first token."""
        end = len(block_hashes)
        block_ids = [NULL_BLOCK] * end
        first = self.num_skipped(end * self.block_size)
        for index in range(end - 1, -1, -1):
            if index < first:
                break
            found = pool.lookup([self.key(block_hashes[index])])
            if found:
                block_ids[index] = found[0]
            else:
                end = index
                first = self.num_skipped(end * self.block_size)
        return [NULL_BLOCK] * first + block_ids[first:end]


class RecurrentStateGroup(FullAttentionGroup):
    """One slot per request. A state belongs to all tokens before it, so there is nothing to share."""

    is_shareable = False

    def num_blocks(self, num_tokens: int) -> int:
        return 1

    def find_hit(self, pool: BlockPool, block_hashes: Sequence[bytes]) -> list[int]:
        return []


def make_groups(
    specs: Sequence[KVCacheSpec], block_size: int, max_num_batched_tokens: int
) -> list[FullAttentionGroup]:
    groups = []
    for index, spec in enumerate(specs):
        if isinstance(spec, SlidingWindowSpec):
            kind: type[FullAttentionGroup] = SlidingWindowGroup
        elif isinstance(spec, RecurrentStateSpec):
            kind = RecurrentStateGroup
        else:
            kind = FullAttentionGroup
        suffix = index.to_bytes(2, "big") if index else b""
        groups.append(kind(spec, suffix, block_size, max_num_batched_tokens))
    return groups
