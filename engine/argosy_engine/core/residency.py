"""Which chunk hashes are resident in the prefix cache: the link between routing and KV blocks.

A chunk is tied to the last block of tokens that it fills, or to the first one if it ends within that. It is announced
as stored when its first block ties it and as removed when its last block is evicted. Only dictionaries keyed by block
and hash: the step pays O(changes), and nothing here can make a request fail.

Invariant: who applies every delta in the order of its fields holds exactly the chunks that are tied to some block.
"""

from __future__ import annotations

from argosy_engine.core.messages import ChunkEnd, ResidencyDelta

MAX_CHUNKS_PER_BLOCK = 32
"""A block of 16 tokens ends a handful of chunks per distinct way to cut the same text; more is someone's game."""


class ResidencyTracker:
    def __init__(self) -> None:
        self._by_block: dict[int, list[int]] = {}
        self._num_blocks: dict[int, int] = {}
        self._stored: dict[int, int] = {}
        """Chunks resident now that the next delta announces -> their tokens."""
        self._removed: dict[int, None] = {}
        """Announced chunks that were evicted since. One that has come back is in both: a delta removes, then stores."""
        self._cleared = False

    def tie(self, chunk_hash: int, num_tokens: int, block_id: int) -> None:
        """`num_tokens` prompt tokens, the last of them in `block_id`, are what a hit on this chunk is worth; zero for
        the beginning of a chain that fills no block."""
        hashes = self._by_block.setdefault(block_id, [])
        if chunk_hash in hashes or len(hashes) >= MAX_CHUNKS_PER_BLOCK:
            return
        hashes.append(chunk_hash)
        count = self._num_blocks.get(chunk_hash, 0)
        self._num_blocks[chunk_hash] = count + 1
        if count == 0:
            self._stored[chunk_hash] = num_tokens

    def evict(self, block_id: int) -> None:
        """The block's content is lost."""
        for chunk_hash in self._by_block.pop(block_id, ()):
            count = self._num_blocks[chunk_hash] - 1
            if count:
                self._num_blocks[chunk_hash] = count
                continue
            del self._num_blocks[chunk_hash]
            if (
                self._stored.pop(chunk_hash, None) is None
            ):  # else it was never announced, or is in `_removed` already
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
        """Changes since the last call, or None."""
        if not (self._stored or self._removed or self._cleared):
            return None
        delta = ResidencyDelta(
            cleared=self._cleared,
            removed=list(self._removed),
            stored=[ChunkEnd(chunk_hash, tokens) for chunk_hash, tokens in self._stored.items()],
        )
        self._stored, self._removed, self._cleared = {}, {}, False
        return delta
