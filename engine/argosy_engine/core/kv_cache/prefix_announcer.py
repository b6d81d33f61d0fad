"""PrefixAnnouncer: tells routers which chunk hashes the prefix cache holds (vLLM: KV events).

A chunk belongs to the last block that its tokens fill, or to the first block if it ends within that; several blocks may
hold it. A block may need others, without which no hit ends there: those of a sliding window before its end. A chunk is
announced as stored with the first block that holds it, and as removed when the last of them, or one that this needs, is
evicted. The announcer has only dictionaries keyed by block and hash: a step costs O(changes), and nothing here can make
a request fail.

Invariant: a router that applies every delta in the order of its fields has exactly the chunks that a block holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from argosy_engine.messages.core_messages import ChunkEnd, ResidencyDelta

MAX_CHUNKS_PER_BLOCK = 32
"""A block of 16 tokens holds the ends of a few chunks for each distinct way to split the same text; the cap bounds the
memory that a client can take with many ways."""


class _Holder:
    """The chunks that a block holds while all that it needs is cached."""

    __slots__ = ("block_id", "hashes", "is_alive")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.hashes: list[int] = []
        self.is_alive = True


class PrefixAnnouncer:
    """Changes of the prefix cache since the last announcement, by chunk hash."""

    def __init__(self) -> None:
        self._by_block: dict[int, _Holder] = {}
        self._needed: dict[int, list[_Holder]] = {}
        """Holders that need a block besides their own. Some may be dead."""
        self._num_alive: dict[int, int] = {}
        """How many of these were alive when the dead were last taken out, by block; missing: none."""
        self._num_blocks: dict[int, int] = {}
        self._stored: dict[int, int] = {}
        """Chunks that the next delta announces as stored -> prompt tokens that a hit saves."""
        self._removed: dict[int, None] = {}
        """Announced chunks that were evicted since, used as an ordered set. A chunk that was stored again is in both,
        because a delta removes before it stores."""
        self._cleared = False

    def add(self, chunk_hash: int, num_tokens: int, block_id: int, needed: Sequence[int] = ()) -> None:
        """Note that a block holds a chunk, and announce the chunk unless another block holds it already.

        Args:
            num_tokens: prompt tokens that a hit on this chunk saves, the last of them in `block_id`; zero for a chunk
                that ends before the first block is full.
            needed: other blocks without which no hit ends at this block; the same for all chunks of a block.
        """
        holder = self._by_block.get(block_id)
        if holder is None:
            holder = self._by_block[block_id] = _Holder(block_id)
            for each in needed:
                self._need(each, holder)
        if chunk_hash in holder.hashes or len(holder.hashes) >= MAX_CHUNKS_PER_BLOCK:
            return
        holder.hashes.append(chunk_hash)
        count = self._num_blocks.get(chunk_hash, 0)
        self._num_blocks[chunk_hash] = count + 1
        if count == 0:
            self._stored[chunk_hash] = num_tokens

    def _need(self, block_id: int, holder: _Holder) -> None:
        holders = self._needed.get(block_id)
        if holders is None:
            self._needed[block_id] = [holder]
            return
        holders.append(holder)
        if len(holders) > 2 * self._num_alive.get(block_id, 0) + MAX_CHUNKS_PER_BLOCK:
            holders[:] = [each for each in holders if each.is_alive]
            self._num_alive[block_id] = len(holders)

    def evict(self, block_id: int) -> None:
        """Drop all chunks of a block whose content is evicted, and of the blocks that need it."""
        if (holder := self._by_block.get(block_id)) is not None:
            self._drop(holder)
        self._num_alive.pop(block_id, None)
        for holder in self._needed.pop(block_id, ()):
            if holder.is_alive:
                self._drop(holder)

    def _drop(self, holder: _Holder) -> None:
        holder.is_alive = False
        del self._by_block[holder.block_id]
        for chunk_hash in holder.hashes:
            count = self._num_blocks[chunk_hash] - 1
            if count:
                self._num_blocks[chunk_hash] = count
                continue
            del self._num_blocks[chunk_hash]
            # A chunk in `_stored` was not announced yet, or is in `_removed` already.
            if self._stored.pop(chunk_hash, None) is None:
                self._removed[chunk_hash] = None

    def clear(self) -> None:
        self._by_block.clear()
        self._needed.clear()
        self._num_alive.clear()
        self._num_blocks.clear()
        self._stored.clear()
        self._removed.clear()
        self._cleared = True

    @property
    def num_chunks(self) -> int:
        return len(self._num_blocks)

    def take_delta(self) -> ResidencyDelta | None:
        """Return the changes since the last call, or None if there are none."""
        if not (self._stored or self._removed or self._cleared):
            return None
        delta = ResidencyDelta(
            cleared=self._cleared,
            removed=list(self._removed),
            stored=[ChunkEnd(chunk_hash, tokens) for chunk_hash, tokens in self._stored.items()],
        )
        self._stored, self._removed, self._cleared = {}, {}, False
        return delta
