"""KVCacheManager: gives requests the blocks their tokens need, and finds prefixes that are already computed.

Owns the block pool and the residency tracker. Knows requests and blocks, not steps or budgets.
Invariant: a running request holds exactly the blocks of its computed and scheduled tokens, prefix first.

A block is registered in the prefix cache as soon as the step that fills it is scheduled: steps run in order, and
within a step a layer writes all keys and values before it reads any, so even a request admitted to the same step may
share it.
"""

from __future__ import annotations

from collections.abc import Iterable

from argosy_engine.core.block_pool import BlockPool
from argosy_engine.core.request import Request
from argosy_engine.core.residency import ResidencyTracker


class KVCacheManager:
    """
    Args:
        num_blocks: of the pool, including the null block.
        watermark: share of the pool that admission leaves free while other requests run, so that a nearly full
            cache does not admit what it would have to preempt a few steps later.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool, watermark: float = 0.0
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.residency = ResidencyTracker()
        self.pool = BlockPool(num_blocks, on_evict=self.residency.evict)
        self.num_watermark_blocks = int(watermark * num_blocks)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def usage(self) -> float:
        return self.pool.usage

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into the cache."""
        return (len(self.pool.blocks) - 1) * self.block_size

    def find_cached_prefix(self, request: Request) -> list[int]:
        """Blocks of the longest cached prefix.

        At most `num_tokens - 1` tokens count as computed, because the last token must run to give logits. A request
        that wants its prompt's log probabilities, or a mean over it, computes all of it.
        """
        wants_prompt = request.sampling_params.prompt_logprobs is not None and not request.num_output_tokens
        if request.pooling_params is not None:
            wants_prompt = request.pooling_params.needs_every_token
        if not self.enable_prefix_caching or wants_prompt:
            return []
        request.hash_full_blocks()
        max_blocks = (request.num_tokens - 1) // self.block_size
        return self.pool.lookup(request.block_hashes[:max_blocks])

    def admit(
        self, request: Request, cached_block_ids: list[int], num_new_tokens: int, *, leave_room: bool
    ) -> bool:
        """Gives a waiting request its cached blocks and blocks for `num_new_tokens` more tokens.

        Admission also asks that the whole prompt fits now: a prompt admitted a chunk at a time must not starve
        half-way and be preempted. False when there is no room (nothing changed).

        Args:
            leave_room: whether the watermark applies.
        """
        num_cached = len(cached_block_ids)
        room = self.pool.num_free_blocks - self.pool.num_free_among(cached_block_ids)
        if leave_room:
            room -= self.num_watermark_blocks
        if self._blocks_for(request.num_tokens) - num_cached > room:
            return False
        self.pool.share(cached_block_ids)
        num_needed = self._blocks_for(num_cached * self.block_size + num_new_tokens) - num_cached
        request.block_ids = cached_block_ids + self.pool.allocate(num_needed)
        request.num_allocated_tokens = len(request.block_ids) * self.block_size
        request.num_cached_blocks = num_cached
        if self.enable_prefix_caching:
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += num_cached * self.block_size
            self._tie_chunks(request)
            self._register(request, num_cached * self.block_size + num_new_tokens)
        return True

    def grow(self, request: Request, num_new_tokens: int) -> list[int] | None:
        """Blocks for `num_new_tokens` beyond the computed ones; the new ids, or None when there is no room."""
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_needed = self._blocks_for(num_tokens) - len(request.block_ids)
        if num_needed > self.pool.num_free_blocks:
            return None
        new_ids = self.pool.allocate(num_needed) if num_needed > 0 else []
        if new_ids:
            request.block_ids.extend(new_ids)
            request.num_allocated_tokens = len(request.block_ids) * self.block_size
        self._register(request, num_tokens)
        return new_ids

    def free(self, request: Request, num_computed_tokens: int) -> None:
        """Takes the request's blocks back; what they cache stays findable until it is evicted.

        Args:
            num_computed_tokens: tokens that are or will be in the cache. Fewer than were registered when the request
                is taken out of a step that is being planned: the blocks beyond lose their registration.
        """
        self._register(request, num_computed_tokens)
        num_valid = num_computed_tokens // self.block_size
        if num_valid < request.num_cached_blocks:
            self.pool.unregister(request.block_ids[num_valid : request.num_cached_blocks])
        self.pool.free(request.block_ids)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """The request holds no blocks any more."""
        request.block_ids = []
        request.num_allocated_tokens = 0
        request.num_cached_blocks = 0
        request.num_tied_chunks = 0

    def rebuild(self) -> None:
        """Starts over with an empty cache. The caller has every request forget its blocks."""
        self.pool = BlockPool(len(self.pool.blocks), on_evict=self.residency.evict)
        self.residency.clear()

    def reset_prefix_cache(self) -> bool:
        if not self.pool.reset_prefix_cache():
            return False
        self.residency.clear()
        return True

    def check(self, requests: Iterable[Request]) -> None:
        """Asserts the pool's invariants and that these are the requests that hold its blocks."""
        self.pool.check()
        held = sum(len(request.block_ids) for request in requests)
        referenced = sum(block.ref_count for block in self.pool.blocks[1:])
        assert held == referenced, f"requests hold {held} blocks, the pool counts {referenced}"

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _register(self, request: Request, num_tokens: int) -> None:
        """Registers the full blocks among the first `num_tokens`, so that later requests can share them."""
        if not self.enable_prefix_caching or num_tokens // self.block_size <= request.num_cached_blocks:
            return
        request.hash_full_blocks()
        num_full = min(num_tokens // self.block_size, len(request.block_hashes))
        for index in range(request.num_cached_blocks, num_full):
            self.pool.register(request.block_ids[index], request.block_hashes[index])
        request.num_cached_blocks = max(num_full, request.num_cached_blocks)
        self._tie_chunks(request)

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
