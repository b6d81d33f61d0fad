"""What follows the prefix cache: what routers are told of it, and what waiting requests need not compute.

Both count by what the block pools tell (`PoolListener`), so that a step costs O(changes), and nothing here can make a
request fail. `PrefixAnnouncer` counts by blocks, `WaitingTokens` by block hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from argosy_engine.core.block_pool import BlockLives, PoolListener
from argosy_engine.messages import ChunkEnd, ResidencyDelta

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
    """Changes of the prefix cache since the last announcement to the routers, by chunk hash (vLLM: KV events).

    A chunk belongs to the last block that its tokens fill, or to the first block if it ends within that; several blocks
    may hold it. A block may need others, without which no hit ends there: those of a sliding window before its end. A
    chunk is announced as stored with the first block that holds it, and as removed when the last of them, or one that
    this needs, is evicted.

    Invariant: a router that applies every delta in the order of its fields has exactly the chunks that a block holds.
    """

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


class WaitingTokens:
    """Count of the uncached tokens of all waiting requests.

    A block of a waiting prompt counts while the prefix cache does not hold it, and only once however many prompts begin
    with it, because the first of them to be admitted computes it for all. It is an estimate: a hit needs an unbroken
    run of blocks, and cached blocks may be evicted before admission.

    Args:
        block_size: tokens per block.
        is_cached: tells whether the prefix cache holds a block with this hash.

    Attributes:
        num_tokens: tokens that all waiting requests have to compute.

    Invariant: `num_tokens` is the sum of all tokens outside of shareable blocks, plus `block_size` for every distinct
    shareable block that is not cached.
    """

    def __init__(self, block_size: int, is_cached: Callable[[bytes], bool]) -> None:
        self.num_tokens = 0
        self._block_size = block_size
        self._is_cached = is_cached
        self._num_requests: dict[bytes, int] = {}
        """Hash of a shareable block -> number of waiting requests that begin with it."""
        self._prompts: dict[str, tuple[int, Sequence[bytes]]] = {}
        """Request id -> tokens that it computes in any case, and the hashes of its shareable blocks."""

    def add(self, request_id: str, num_tokens: int, block_hashes: Sequence[bytes]) -> None:
        """Count a request that starts to wait.

        Args:
            num_tokens: all its known tokens.
            block_hashes: hashes of the leading blocks that it could take from the prefix cache.
        """
        num_alone = num_tokens - len(block_hashes) * self._block_size
        self._prompts[request_id] = num_alone, block_hashes
        self.num_tokens += num_alone
        counts = self._num_requests
        for block_hash in block_hashes:
            count = counts.get(block_hash, 0)
            counts[block_hash] = count + 1
            if count == 0 and not self._is_cached(block_hash):
                self.num_tokens += self._block_size

    def remove(self, request_id: str) -> None:
        """Stop counting a request that is admitted or has ended. Raises KeyError if it does not wait."""
        num_alone, block_hashes = self._prompts.pop(request_id)
        self.num_tokens -= num_alone
        counts = self._num_requests
        for block_hash in block_hashes:
            count = counts[block_hash] - 1
            if count:
                counts[block_hash] = count
                continue
            del counts[block_hash]
            if not self._is_cached(block_hash):
                self.num_tokens -= self._block_size

    def cached(self, block_hash: bytes) -> None:
        """Note that the prefix cache now holds this block."""
        if block_hash in self._num_requests:
            self.num_tokens -= self._block_size

    def evicted(self, block_hash: bytes) -> None:
        """Note that the prefix cache no longer holds this block."""
        if block_hash in self._num_requests:
            self.num_tokens += self._block_size

    def check(self, request_ids: Iterable[str]) -> None:
        """Assert the invariant and that exactly these requests wait. O(tokens); for tests and the idle engine."""
        assert set(self._prompts) == set(request_ids)
        shareable = {block_hash for _, block_hashes in self._prompts.values() for block_hash in block_hashes}
        assert set(self._num_requests) == shareable
        uncached = sum(not self._is_cached(block_hash) for block_hash in shareable)
        alone = sum(num_alone for num_alone, _ in self._prompts.values())
        assert self.num_tokens == alone + uncached * self._block_size


class PrefixResidency(PoolListener):
    """Passes on what the pool of keys and values tells."""

    def __init__(self, announcer: PrefixAnnouncer, waiting: WaitingTokens, lives: BlockLives | None) -> None:
        self._announcer = announcer
        self._waiting = waiting
        self._lives = lives

    def allocated(self, block_ids: Sequence[int]) -> None:
        if self._lives is not None:
            for block_id in block_ids:
                self._lives.allocated(block_id)

    def shared(self, block_ids: Sequence[int]) -> None:
        if self._lives is not None:
            for block_id in block_ids:
                self._lives.used(block_id)

    def cached(self, block_hash: bytes) -> None:
        self._waiting.cached(block_hash)

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        self._announcer.evict(block_id)
        if self._lives is not None:
            self._lives.evicted(block_id)
        self._waiting.evicted(block_hash)


class StateResidency(PoolListener):
    """Tells the announcer of evicted states.

    Args:
        first_id: the announcer's number of the pool's first block; those of keys and values come before it.
    """

    def __init__(self, announcer: PrefixAnnouncer, first_id: int) -> None:
        self._announcer = announcer
        self._first_id = first_id

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        self._announcer.evict(self._first_id + block_id)
