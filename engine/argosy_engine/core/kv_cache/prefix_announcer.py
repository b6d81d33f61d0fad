"""PrefixAnnouncer: tells routers which chunk hashes the prefix cache holds (vLLM: KV events).

A chunk belongs to the last block that its tokens fill, or to the first block if it ends within that; several blocks may
hold it. It is announced as stored with the first of them, and as removed when the last of them is evicted. The
announcer has only dictionaries keyed by block and hash: a step costs O(changes), and nothing here can make a request
fail.

Invariant: a router that applies every delta in the order of its fields has exactly the chunks that a block holds.
"""

from __future__ import annotations

from argosy_engine.messages.core_messages import ChunkEnd, ResidencyDelta

MAX_CHUNKS_PER_BLOCK = 32
"""A block of 16 tokens holds the ends of a few chunks for each distinct way to split the same text; the cap bounds the
memory that a client can take with many ways."""


class PrefixAnnouncer:
    """Changes of the prefix cache since the last announcement, by chunk hash."""

    def __init__(self) -> None:
        self._by_block: dict[int, list[int]] = {}
        self._num_blocks: dict[int, int] = {}
        self._stored: dict[int, int] = {}
        """Chunks that the next delta announces as stored -> prompt tokens that a hit saves."""
        self._removed: dict[int, None] = {}
        """Announced chunks that were evicted since, used as an ordered set. A chunk that was stored again is in both,
        because a delta removes before it stores."""
        self._cleared = False

    def add(self, chunk_hash: int, num_tokens: int, block_id: int) -> None:
        """Note that a block holds a chunk, and announce the chunk unless another block holds it already.

        Args:
            num_tokens: prompt tokens that a hit on this chunk saves, the last of them in `block_id`; zero for a chunk
                that ends before the first block is full.
        """
        hashes = self._by_block.setdefault(block_id, [])
        if chunk_hash in hashes or len(hashes) >= MAX_CHUNKS_PER_BLOCK:
            return
        hashes.append(chunk_hash)
        count = self._num_blocks.get(chunk_hash, 0)
        self._num_blocks[chunk_hash] = count + 1
        if count == 0:
            self._stored[chunk_hash] = num_tokens

    def evict(self, block_id: int) -> None:
        """Drop all chunks of a block whose content is evicted."""
        for chunk_hash in self._by_block.pop(block_id, ()):
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
