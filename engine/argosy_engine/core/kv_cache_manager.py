"""KVCacheManager: gives requests the blocks their tokens need, and finds prefixes that are already computed.

Owns the block pool and the residency tracker. Knows requests and blocks, not steps or budgets.
Invariant: a running request holds exactly the blocks of its computed and scheduled tokens, prefix first.
"""

from __future__ import annotations

from argosy_engine.core.block_pool import BlockPool
from argosy_engine.core.request import Request
from argosy_engine.core.residency import ResidencyTracker


class KVCacheManager:
    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.residency = ResidencyTracker()
        self.pool = BlockPool(num_blocks, on_evict=self.residency.evict)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def usage(self) -> float:
        return self.pool.usage

    def find_cached_prefix(self, request: Request) -> list[int]:
        """Blocks of the longest cached prefix.

        At most `num_tokens - 1` tokens count as computed, because the last token must run to give logits.
        """
        if not self.enable_prefix_caching:
            return []
        max_blocks = (request.num_tokens - 1) // self.block_size
        return self.pool.lookup(request.block_hashes[:max_blocks])

    def can_ever_fit(self, request: Request) -> bool:
        """Whether the request would fit into an empty cache with the tokens it has now."""
        return self._blocks_for(request.num_tokens) <= len(self.pool.blocks) - 1

    def admit(self, request: Request, cached_block_ids: list[int], num_new_tokens: int) -> list[int] | None:
        """Gives a waiting request its cached blocks and blocks for `num_new_tokens` more tokens.

        Admission also asks that the whole prompt fits now: a prompt admitted a chunk at a time must not starve
        half-way and be preempted. Returns all its block ids, or None when there is no room (nothing changed).
        """
        num_cached = len(cached_block_ids)
        taken_from_free = self.pool.num_free_among(cached_block_ids)
        room = self.pool.num_free_blocks - taken_from_free
        if self._blocks_for(request.num_tokens) - num_cached > room:
            return None
        self.pool.share(cached_block_ids)
        num_needed = self._blocks_for(num_cached * self.block_size + num_new_tokens) - num_cached
        request.block_ids = cached_block_ids + self.pool.allocate(num_needed)
        request.num_cached_blocks = num_cached
        if self.enable_prefix_caching:
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += num_cached * self.block_size
        self._tie_chunks(request)
        return request.block_ids

    def grow(self, request: Request, num_new_tokens: int) -> list[int] | None:
        """Blocks for `num_new_tokens` beyond the computed ones; the new ids, or None when there is no room."""
        num_needed = self._blocks_for(request.num_computed_tokens + num_new_tokens) - len(request.block_ids)
        if num_needed <= 0:
            return []
        if num_needed > self.pool.num_free_blocks:
            return None
        new_ids = self.pool.allocate(num_needed)
        request.block_ids.extend(new_ids)
        return new_ids

    def cache_computed_blocks(self, request: Request) -> None:
        """Registers the full blocks whose tokens are computed, so that later requests can share them."""
        if not self.enable_prefix_caching:
            return
        num_full = min(request.num_computed_tokens // self.block_size, len(request.block_hashes))
        if num_full <= request.num_cached_blocks:
            return
        for index in range(request.num_cached_blocks, num_full):
            self.pool.register(request.block_ids[index], request.block_hashes[index])
        request.num_cached_blocks = num_full
        self._tie_chunks(request)

    def free(self, request: Request) -> None:
        """Takes the request's blocks back; what they cache stays findable until it is evicted."""
        self.pool.free(request.block_ids)
        request.block_ids = []
        request.num_cached_blocks = 0
        request.num_tied_chunks = 0

    def reset_prefix_cache(self) -> bool:
        if not self.pool.reset_prefix_cache():
            return False
        self.residency.clear()
        return True

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _tie_chunks(self, request: Request) -> None:
        """Ties the chunk ends that lie in registered blocks. Where an equal block of another request is the
        registered one, the chunk is tied to that one: it is what a later hit would find."""
        ends = request.chunk_ends
        index = request.num_tied_chunks
        while index < len(ends):
            num_blocks = ends[index].token_end // self.block_size
            if num_blocks > request.num_cached_blocks:
                break
            if num_blocks:
                holder = self.pool.lookup(request.block_hashes[num_blocks - 1 : num_blocks])
                if holder:
                    self.residency.tie(ends[index].hash, num_blocks * self.block_size, holder[0])
            index += 1
        request.num_tied_chunks = index
