"""BlockPool: allocates KV blocks, counts their references, and evicts cached prefixes in LRU order.

A block is either used by one or more requests (`ref_count > 0`) or in the free queue. A free block may still hold a
cached prefix, which is evicted only when the block is allocated again. Block 0 is the null block: it is never allocated
and serves as the target of padding writes. `BlockLives` follows a sample of the blocks for the metrics.

Invariants (`check`): every block but the null block is free xor referenced; the free queue links each free block
exactly once; a hash maps only to a block that carries it.
Design: vLLM `v1/core/block_pool.py` (intrusive doubly linked free queue, O(1) removal from the middle).
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from argosy_engine.messages import BlockLife

MAX_USES: Final = 4
"""Uses of a block that are remembered, the last ones: up to three gaps a life."""
MAX_RECORDS: Final = 1024
"""Lives kept until the next report; further ones are dropped. Bounds what one report carries."""


class BlockLives:
    """Times of sampled blocks.

    Args:
        sample: share of the allocations that are followed, above 0 and up to 1.
        clock: seconds, monotonic.
        draw: a number of [0, 1) per allocation.
    """

    def __init__(
        self,
        sample: float,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._sample = sample
        self._clock = clock
        self._draw = draw
        self._births: dict[int, float] = {}
        self._uses: dict[int, deque[float]] = {}
        self._ended: list[BlockLife] = []

    def allocated(self, block_id: int) -> None:
        """Follow the block from now on, if it is drawn."""
        self._uses.pop(block_id, None)
        if self._draw() < self._sample:
            self._births[block_id] = self._clock()
        else:
            self._births.pop(block_id, None)

    def used(self, block_id: int) -> None:
        """Note that a request shares the block."""
        if block_id in self._births:
            self._uses.setdefault(block_id, deque(maxlen=MAX_USES)).append(self._clock())

    def evicted(self, block_id: int) -> None:
        """End the block's life."""
        born = self._births.pop(block_id, None)
        uses = self._uses.pop(block_id, ())
        if born is None or len(self._ended) >= MAX_RECORDS:
            return
        now, times = self._clock(), list(uses)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        self._ended.append(BlockLife(now - born, now - (times[-1] if times else born), gaps))

    def take(self) -> list[BlockLife]:
        """Return the lives that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended


NULL_BLOCK = 0


class Block:
    """One block of the pool: its references, the prefix that it caches, and its place in the free queue."""

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, cached={self.block_hash is not None})"


class FreeQueue:
    """Intrusive doubly linked list of free blocks, allocated and evicted from the front."""

    def __init__(self) -> None:
        self._head = Block(-1)
        self._tail = Block(-2)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self.num_blocks = 0

    def popleft(self) -> Block:
        block = self._head.next_free
        assert block is not None
        assert block is not self._tail, "free queue is empty"
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        before, after = block.prev_free, block.next_free
        assert before is not None
        assert after is not None
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self.num_blocks -= 1

    def append(self, block: Block) -> None:
        assert self._tail.prev_free is not None
        self._insert(self._tail.prev_free, block, self._tail)

    def prepend(self, block: Block) -> None:
        assert self._head.next_free is not None
        self._insert(self._head, block, self._head.next_free)

    def _insert(self, before: Block, block: Block, after: Block) -> None:
        assert block.prev_free is None, f"{block} is already free"
        before.next_free = after.prev_free = block
        block.prev_free, block.next_free = before, after
        self.num_blocks += 1

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next_free
        while block is not self._tail:
            assert block is not None
            yield block
            block = block.next_free


class PoolListener:
    """What a pool tells of its blocks. This one ignores it."""

    def allocated(self, block_ids: Sequence[int]) -> None:
        pass

    def shared(self, block_ids: Sequence[int]) -> None:
        """Requests have taken references on cached blocks."""

    def cached(self, block_hash: bytes) -> None:
        """A block has been registered for a hash."""

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        """A block's cached content was dropped; no block is registered for the hash any more."""


class BlockPool:
    """Pool of KV blocks of one size, with the prefix cache over them.

    Args:
        num_blocks: including the null block.
        listener: is told of allocations, and of all changes of the prefix cache.
    """

    def __init__(self, num_blocks: int, listener: PoolListener | None = None) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self._free = FreeQueue()
        for block in self.blocks[1:]:
            self._free.append(block)
        self.blocks[0].ref_count = 1
        self.num_reserved_blocks = 0
        """How many of the free blocks running requests will still need; no other request is admitted to them."""
        self._by_hash: dict[bytes, Block] = {}
        self._listener = listener or PoolListener()

    @property
    def num_free_blocks(self) -> int:
        return self._free.num_blocks

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold, 0..1."""
        usable = len(self.blocks) - 1
        return 1.0 - self._free.num_blocks / usable if usable else 0.0

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the front of the free queue and evict what they cached.

        The caller must have checked `num_free_blocks`.
        """
        ids = []
        for _ in range(count):
            block = self._free.popleft()
            self._maybe_evict_cached_block(block)
            block.ref_count = 1
            ids.append(block.block_id)
        self._listener.allocated(ids)
        return ids

    def lookup(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Return the ids of the blocks that cache the longest prefix of the hashes. Takes no reference."""
        ids = []
        for block_hash in block_hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            ids.append(block.block_id)
        return ids

    def find(self, block_hash: bytes) -> int | None:
        """Return the id of the block that caches a hash."""
        block = self._by_hash.get(block_hash)
        return None if block is None else block.block_id

    def is_cached(self, block_hash: bytes) -> bool:
        return block_hash in self._by_hash

    def can_allocate(self, count: int, *shared: Sequence[int]) -> bool:
        """Return whether `count` blocks are left beside the reserved ones once these cached blocks are shared, which
        takes those of them that are free off the free queue."""
        num_taken = sum(
            self.blocks[block_id].ref_count == 0 for block_ids in shared for block_id in block_ids
        )
        return count <= self._free.num_blocks - self.num_reserved_blocks - num_taken

    def share(self, block_ids: Sequence[int]) -> None:
        """Take a reference on cached blocks (a prefix hit)."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1
        self._listener.shared(block_ids)

    def register(self, block_id: int, block_hash: bytes, *, replaces_free: bool = False) -> bool:
        """Add a full block to the prefix cache under this hash. Returns False if another block already holds it.

        Args:
            replaces_free: take the place of another block that no request holds.
        """
        block = self.blocks[block_id]
        assert block.ref_count > 0
        assert block.block_hash is None
        if (other := self._by_hash.get(block_hash)) is not None:
            if other.ref_count or not replaces_free:
                return False
            self._maybe_evict_cached_block(other)
            self._free.remove(other)
            self._free.prepend(other)
        block.block_hash = block_hash
        self._by_hash[block_hash] = block
        self._listener.cached(block_hash)
        return True

    def unregister(self, block_ids: Sequence[int]) -> None:
        """Undo `register` for blocks whose content will not be computed after all."""
        for block_id in block_ids:
            self._maybe_evict_cached_block(self.blocks[block_id])

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference on each block.

        Blocks are freed in reverse, so that the end of a chain is evicted before its beginning. Blocks without cached
        content go to the front of the free queue and are allocated first.
        """
        for block_id in reversed(block_ids):
            block = self.blocks[block_id]
            block.ref_count -= 1
            assert block.ref_count >= 0, f"{block} freed twice"
            if block.ref_count == 0:
                if block.block_hash is None:
                    self._free.prepend(block)
                else:
                    self._free.append(block)

    def touch(self, block_id: int, block_hash: bytes) -> None:
        """Make a free block the last to be evicted, if it still caches this."""
        block = self.blocks[block_id]
        if block.ref_count == 0 and block.block_hash == block_hash:
            self._free.remove(block)
            self._free.append(block)

    def reset_prefix_cache(self) -> bool:
        """Evict every cached prefix. Returns False, and changes nothing, while a request holds blocks."""
        if self._free.num_blocks != len(self.blocks) - 1:
            return False
        for block in list(self._by_hash.values()):
            self._maybe_evict_cached_block(block)
        return True

    def _maybe_evict_cached_block(self, block: Block) -> None:
        """Remove a block from the prefix cache; no effect if it caches nothing."""
        block_hash = block.block_hash
        if block_hash is None:
            return
        del self._by_hash[block_hash]
        block.block_hash = None
        self._listener.evicted(block.block_id, block_hash)

    def check(self) -> None:
        """Assert the invariants of the module docstring. O(blocks); for tests and the idle engine."""
        free = [block.block_id for block in self._free]
        assert len(free) == len(set(free)) == self._free.num_blocks
        for block in self.blocks[1:]:
            assert (block.ref_count == 0) == (block.prev_free is not None), block
        for block_hash, block in self._by_hash.items():
            assert block.block_hash == block_hash, block
        assert sum(b.block_hash is not None for b in self.blocks) == len(self._by_hash)
