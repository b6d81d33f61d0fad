"""KV cache groups: how many blocks each kind of layer needs, which it no longer reads, and what its prefix hits are.

A request has one list of block ids per group. Entry i of an attention group's list is the block of tokens
[i * block_size, (i + 1) * block_size), or the null block (0) where the block is no longer needed.
Design: vLLM, `v1/core/single_type_kv_cache_manager.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from argosy_engine.attention.kv_cache_spec import KVCacheSpec, RecurrentStateSpec, SlidingWindowSpec
from argosy_engine.core.kv_cache.block_pool import BlockPool
from argosy_engine.messages.kv_cache_interface import peak_blocks

NULL_BLOCK = 0


class FullAttentionGroup:
    """Group of full attention layers: every block is kept until the request ends.

    Args:
        spec: geometry of the group's layers.
        key_suffix: appended to block hashes, so that the groups' blocks are distinct in the shared prefix cache; empty
            for the first group.
        block_size: tokens per block.
        max_num_batched_tokens: token budget of a step.
    """

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
        """Return the length of a request's block list, given its number of computed and scheduled tokens."""
        return -(-num_tokens // self.block_size)

    def peak_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a request holds at once while it computes `num_tokens`."""
        return peak_blocks(self.spec, num_tokens, self.block_size, self.max_num_batched_tokens)

    def num_skipped(self, num_computed_tokens: int) -> int:
        """Return how many leading blocks no token from position `num_computed_tokens` on reads."""
        return 0

    def find_hit(self, pool: BlockPool, block_hashes: Sequence[bytes]) -> list[int]:
        """Return the block ids of the longest cached prefix of the hashes from which a request can continue."""
        if self.key_suffix:
            block_hashes = [self.key(block_hash) for block_hash in block_hashes]
        return pool.lookup(block_hashes)

    def needed_for_hit(self, num_blocks: int) -> range:
        """Return the indices of the blocks without which no hit has `num_blocks` blocks.

        Every block before the last one is left out: it is evicted after it (`BlockPool.free`).
        """
        return range(num_blocks - 1, num_blocks)


class SlidingWindowGroup(FullAttentionGroup):
    """Group of sliding window layers: blocks wholly behind the window are freed, and a hit does not need them."""

    spec: SlidingWindowSpec

    def num_skipped(self, num_computed_tokens: int) -> int:
        return max(num_computed_tokens - self.spec.window + 1, 0) // self.block_size

    def find_hit(self, pool: BlockPool, block_hashes: Sequence[bytes]) -> list[int]:
        """Search from the end for a run of cached blocks that fills the window or begins at the first token."""
        end = len(block_hashes)
        block_ids = [NULL_BLOCK] * end
        first = self.num_skipped(end * self.block_size)
        for index in range(end - 1, -1, -1):
            if index < first:
                break
            found = pool.find(self.key(block_hashes[index]))
            if found is None:
                end = index
                first = self.num_skipped(end * self.block_size)
            else:
                block_ids[index] = found
        return [NULL_BLOCK] * first + block_ids[first:end]

    def needed_for_hit(self, num_blocks: int) -> range:
        return range(self.num_skipped(num_blocks * self.block_size), num_blocks)


def make_groups(
    specs: Sequence[KVCacheSpec], block_size: int, max_num_batched_tokens: int
) -> list[FullAttentionGroup]:
    """Make the groups of layers that keep keys and values."""
    groups = []
    for index, spec in enumerate(specs):
        if isinstance(spec, RecurrentStateSpec):
            continue
        kind = SlidingWindowGroup if isinstance(spec, SlidingWindowSpec) else FullAttentionGroup
        groups.append(kind(spec, group_suffix(index), block_size, max_num_batched_tokens))
    return groups


def group_suffix(index: int) -> bytes:
    """Return what distinguishes the blocks of a group in the prefix cache."""
    return index.to_bytes(2, "big") if index else b""
