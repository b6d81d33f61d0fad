"""KVCacheManager: allocates KV blocks to requests and finds cached prefixes.

It owns the block pool, the KV cache groups that allocate from it, and the announcer of cached prefixes. It knows
requests and blocks, not steps or budgets. Invariant: a running request holds, per group, exactly the blocks that its
computed and scheduled tokens fill and its next tokens read. Blocks that its known tokens will still need are reserved
for it: they are free, but no other request is admitted to them.

A block of keys and values is registered in the prefix cache as soon as the step that fills it is scheduled. Steps run
in order, and within a step a layer writes all keys and values before it reads any, so even a request admitted to the
same step may share it. States are registered one step later (`StateBlocks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from argosy_engine.attention.kv_cache_spec import FullAttentionSpec, KVCacheSpec, RecurrentStateSpec
from argosy_engine.core.kv_cache.block_lives import BlockLives
from argosy_engine.core.kv_cache.block_pool import BlockPool
from argosy_engine.core.kv_cache.kv_cache_groups import (
    NULL_BLOCK,
    FullAttentionGroup,
    group_suffix,
    make_groups,
)
from argosy_engine.core.kv_cache.prefix_announcer import PrefixAnnouncer
from argosy_engine.core.kv_cache.state_blocks import StateBlocks
from argosy_engine.core.kv_cache.waiting_tokens import WaitingTokens
from argosy_engine.core.request import Request
from argosy_engine.messages.scheduler_output import BlockIds


class KVCacheManager:
    """Block tables of all requests, over one block pool.

    Args:
        num_blocks: blocks of the pool, including the null block.
        block_size: tokens per block.
        watermark: share of the pool (0..1) that admission leaves free while other requests run, so that a nearly full
            cache does not admit requests that would be preempted a few steps later.
        specs: one per KV cache group (`messages.kv_cache_interface`); empty if the model keeps nothing of a request.
        max_num_batched_tokens: token budget of a step; bounds the blocks that a sliding window holds during a prefill.
        lives_sample: share of the blocks whose times in the cache are recorded, 0..1.
        num_states: blocks of the pool of states, including its null block; read if a group keeps states.
        state_interval: tokens between checkpoints of states, rounded up to blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        watermark: float = 0.0,
        specs: Sequence[KVCacheSpec] = (FullAttentionSpec(0),),
        max_num_batched_tokens: int = 1 << 20,
        lives_sample: float = 0.0,
        num_states: int = 0,
        state_interval: int = 1024,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.groups = make_groups(specs, block_size, max_num_batched_tokens)
        """Those of keys and values; of a request's block lists, that of the states follows theirs."""
        self._state_suffix = None
        if specs and isinstance(specs[-1], RecurrentStateSpec):
            self._state_suffix = group_suffix(len(specs) - 1)
        self._state_interval = -(-state_interval // block_size) * block_size
        self._counted_group = _counted_group(self.groups)
        self.announcer = PrefixAnnouncer()
        self.lives = BlockLives(lives_sample) if lives_sample else None
        self._new_pools(num_blocks, num_states)
        self.num_watermark_blocks = int(watermark * num_blocks)
        self.num_reserved_blocks = 0
        """Reserved blocks: the sum of `num_reserved_blocks` over all requests."""
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def _new_pools(self, num_blocks: int, num_states: int) -> None:
        self.waiting = waiting = WaitingTokens(self.block_size, lambda key: self.pool.is_cached(key))
        self.pool = BlockPool(num_blocks, self.announcer.evict, waiting.cached, waiting.evicted, self.lives)
        self.states: StateBlocks | None = None
        if self._state_suffix is not None:
            self.states = StateBlocks(
                num_states,
                self.block_size,
                self._state_interval,
                key_suffix=self._state_suffix,
                enable_prefix_caching=self.enable_prefix_caching,
                on_evict=lambda block_id: self.announcer.evict(num_blocks + block_id),
            )

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0..1, of keys and values or of states, whichever is greater."""
        return self.pool.usage if self.states is None else max(self.pool.usage, self.states.pool.usage)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that requests can hold: all but the null block."""
        return len(self.pool.blocks) - 1

    def find_cached_prefix(self, request: Request) -> BlockIds:
        """Return, per group, the block ids of the longest prefix that all groups have cached; lists of equal length.

        The hit covers at most `num_tokens - 1` tokens, because the last token must be computed to give logits. It is
        empty for a request that needs every token of its prompt (log probabilities, or a mean over the prompt).
        """
        hashes = self._shareable(request)
        if not hashes:
            return [[] for _ in range(max(len(self.groups) + (self.states is not None), 1))]
        request.num_branch_tokens = 0
        while True:
            # A group may shorten the hit of earlier groups; the hits agree once a round shortens nothing.
            longest, hits = len(hashes), []
            for group in self.groups:
                hit = group.find_hit(self.pool, hashes)
                hits.append(hit)
                hashes = hashes[: len(hit)]
            if self.states is not None:
                if self.groups:
                    known = len(hashes) * self.block_size
                    request.num_branch_tokens = max(request.num_branch_tokens, known)
                hit = self.states.find_hit(hashes)
                hits.append(hit)
                hashes = hashes[: len(hit)]
            if len(hashes) == longest or len(hits) == 1:
                return hits

    def chunk_end(self, request: Request, start: int, end: int) -> int:
        """Return where a step should end that may compute a request's tokens from `start` to `end`."""
        return end if self.states is None else self.states.chunk_end(request, start, end)

    def _shareable(self, request: Request) -> list[bytes]:
        """Return the hashes of the leading blocks that the request could take from the prefix cache."""
        wants_prompt = request.sampling_params.prompt_logprobs is not None and not request.num_output_tokens
        if request.pooling_params is not None:
            wants_prompt = request.pooling_params.needs_every_token
        if not self.enable_prefix_caching or wants_prompt:
            return []
        request.hash_full_blocks()
        return request.block_hashes[: (request.num_tokens - 1) // self.block_size]

    def enqueue(self, request: Request) -> None:
        """Count the uncached tokens of a request that starts to wait for admission."""
        hashes = self._shareable(request) if self._counted_group is not None else []
        if self._counted_group is not None and self._counted_group.key_suffix:
            hashes = [self._counted_group.key(block_hash) for block_hash in hashes]
        self.waiting.add(request.request_id, request.num_tokens, hashes)

    def dequeue(self, request: Request) -> None:
        """Stop counting the tokens of a request that no longer waits. Raises KeyError if it did not wait."""
        self.waiting.remove(request.request_id)

    def admit(
        self, request: Request, cached_block_ids: BlockIds, num_new_tokens: int, *, apply_watermark: bool
    ) -> bool:
        """Share a waiting request's cached blocks and allocate blocks for `num_new_tokens` more tokens.

        The request is admitted only if all its known tokens fit now, beside the blocks reserved for running requests:
        otherwise a prompt that is computed in chunks might run out of blocks half-way and be preempted. Returns False,
        and changes nothing, if there are too few free blocks.

        Args:
            cached_block_ids: result of `find_cached_prefix`.
            apply_watermark: whether to leave the watermark's blocks free.
        """
        num_available = self.pool.num_free_blocks - self.num_reserved_blocks
        if apply_watermark:
            num_available -= self.num_watermark_blocks
        num_wanted = 0
        if self.states is not None and not self.states.can_admit(cached_block_ids[-1]):
            return False
        for group, cached in zip(self.groups, cached_block_ids, strict=False):
            held = [block_id for block_id in cached if block_id != NULL_BLOCK]
            num_available -= self.pool.num_free_among(held)
            num_wanted += max(group.peak_blocks(request.num_tokens) - len(held), 0)
        if num_wanted > num_available:
            return False
        num_cached = len(cached_block_ids[0])
        num_tokens = num_cached * self.block_size + num_new_tokens
        # All of them first: `allocate` could evict a block that is not shared yet.
        for cached in cached_block_ids[: len(self.groups)]:
            self.pool.share([block_id for block_id in cached if block_id != NULL_BLOCK])
        request.block_ids = [
            cached + self.pool.allocate(group.num_blocks(num_tokens) - len(cached))
            for group, cached in zip(self.groups, cached_block_ids, strict=False)
        ]
        if self.states is not None:
            self.states.share(cached_block_ids[-1])
            request.block_ids.append(self.states.admit(request, cached_block_ids[-1], num_tokens))
        request.num_allocated_tokens = self._round_up(num_tokens)
        request.num_cached_blocks = num_cached
        self._reserve(request)
        if self.enable_prefix_caching:
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += num_cached * self.block_size
            self._announce_chunks(request)
            self._register(request, num_tokens)
        return True

    def grow(self, request: Request, num_new_tokens: int) -> BlockIds | None:
        """Allocate blocks for `num_new_tokens` beyond the computed ones.

        Returns the new block ids per group, an empty list if the blocks held suffice, or None if there are too few free
        blocks.
        """
        num_tokens = request.num_computed_tokens + num_new_tokens
        if num_tokens <= request.num_allocated_tokens:
            self._register(request, num_tokens)
            return []
        num_needed = []
        for index, group in enumerate(self.groups):
            num_skipped = group.num_skipped(request.num_computed_tokens)
            if num_skipped:
                self._skip(request, index, num_skipped)
            num_needed.append(group.num_blocks(num_tokens) - len(request.block_ids[index]))
        if sum(num_needed) > self.pool.num_free_blocks:
            return None
        new_ids = [self.pool.allocate(count) for count in num_needed]
        for block_ids, added in zip(request.block_ids, new_ids, strict=False):
            block_ids += added
        if self.states is not None:
            new_ids.append(self.states.grow(request, request.block_ids[-1], num_tokens))
            self._announce_chunks(request)
        request.num_allocated_tokens = self._round_up(num_tokens)
        if request.num_reserved_blocks:
            self._reserve(request)
        self._register(request, num_tokens)
        return new_ids

    def free(self, request: Request, num_computed_tokens: int) -> None:
        """Free the request's blocks; their cached content can be found until it is evicted.

        Args:
            num_computed_tokens: tokens that are or will be in the cache. Fewer than were registered if the request is
                removed from a step that is being planned: the blocks beyond them are unregistered.
        """
        self._register(request, num_computed_tokens)
        num_valid = num_computed_tokens // self.block_size
        for block_ids in request.block_ids[: len(self.groups)]:
            if num_valid < request.num_cached_blocks:
                self.pool.unregister(block_ids[num_valid : request.num_cached_blocks])
            self.pool.free([block_id for block_id in block_ids if block_id != NULL_BLOCK])
        if request.has_twin_blocks:
            self._touch_chain(request)
        if self.states is not None and request.block_ids:
            self.states.register(request, request.block_ids[-1], num_computed_tokens)
            if self.states.has_lost_checkpoint(request):
                request.num_announced_chunks = 0  # the chunks before it may need a later one
            self._announce_chunks(request)
            self.states.free(request, request.block_ids[-1])
        self.num_reserved_blocks -= request.num_reserved_blocks
        self.forget(request)

    def _touch_chain(self, request: Request) -> None:
        """Let the end of a request's prefix be evicted before its beginning, though blocks of another request, which
        were freed earlier, hold a part of it."""
        for group in self.groups:
            for block_hash in reversed(request.block_hashes[: request.num_cached_blocks]):
                key = group.key(block_hash)
                if (block_id := self.pool.find(key)) is not None:
                    self.pool.touch(block_id, key)

    def forget(self, request: Request) -> None:
        """Reset the request's block fields, without freeing anything."""
        request.block_ids = []
        request.num_allocated_tokens = 0
        request.num_reserved_blocks = 0
        request.num_cached_blocks = 0
        request.num_announced_chunks = 0
        request.has_twin_blocks = False
        if self.states is not None:
            self.states.forget(request)

    def rebuild(self) -> None:
        """Replace the pools by empty ones. The caller must `forget` the blocks of every request."""
        self._new_pools(len(self.pool.blocks), 0 if self.states is None else len(self.states.pool.blocks))
        self.num_reserved_blocks = 0
        self.announcer.clear()

    def reset_prefix_cache(self) -> bool:
        # A request that holds blocks of keys and values holds a state.
        if self.states is not None and not self.states.pool.reset_prefix_cache():
            return False
        if not self.pool.reset_prefix_cache():
            return False
        self.announcer.clear()
        return True

    def check(self, requests: Iterable[Request]) -> None:
        """Assert the pool's invariants, and that the given requests hold all of its used and reserved blocks."""
        self.pool.check()
        requests = list(requests)
        assert self.num_reserved_blocks == sum(request.num_reserved_blocks for request in requests)
        tables = [request.block_ids for request in requests if request.block_ids]
        pools = [(self.pool, [each for lists in tables for each in lists[: len(self.groups)]])]
        if self.states is not None:
            self.states.check([request.request_id for request in requests if request.block_ids])
            pools.append((self.states.pool, [lists[-1] for lists in tables]))
        for pool, lists in pools:
            held = sum(block_id != NULL_BLOCK for block_ids in lists for block_id in block_ids)
            referenced = sum(block.ref_count for block in pool.blocks[1:])
            assert held == referenced, f"requests hold {held} blocks, the pool counts {referenced}"

    def _reserve(self, request: Request) -> None:
        """Update the number of blocks reserved for the request's known tokens."""
        num_reserved = 0
        if request.num_allocated_tokens < request.num_tokens:
            for group, block_ids in zip(self.groups, request.block_ids, strict=False):
                num_held = len(block_ids) - block_ids.count(NULL_BLOCK)
                num_reserved += max(
                    min(
                        group.num_blocks(request.num_tokens) - len(block_ids),
                        group.peak_blocks(request.num_tokens) - num_held,
                    ),
                    0,
                )
        self.num_reserved_blocks += num_reserved - request.num_reserved_blocks
        request.num_reserved_blocks = num_reserved

    def _round_up(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) * self.block_size

    def _skip(self, request: Request, index: int, num_skipped: int) -> None:
        """Free the leading blocks of a group that no later token reads, and put the null block in their place."""
        self._register(request, request.num_computed_tokens)
        block_ids = request.block_ids[index]
        position = num_skipped - 1
        while position >= 0 and block_ids[position] != NULL_BLOCK:
            self.pool.free([block_ids[position]])
            block_ids[position] = NULL_BLOCK
            position -= 1

    def _register(self, request: Request, num_tokens: int) -> None:
        """Register the full blocks of the first `num_tokens` tokens, so that later requests can share them.

        Where one group's hit was shortened by another's, the request has computed again what is cached. Its blocks take
        the place of those, or the beginning of a prefix could be evicted before its end.
        """
        if not self.enable_prefix_caching or num_tokens // self.block_size <= request.num_cached_blocks:
            return
        request.hash_full_blocks()
        num_full = min(num_tokens // self.block_size, len(request.block_hashes))
        first = request.num_cached_blocks
        if num_full <= first:
            return
        may_be_cached = len(self.groups) > 1 or self.states is not None
        for group, block_ids in zip(self.groups, request.block_ids, strict=False):
            for index in range(first, num_full):
                if block_ids[index] != NULL_BLOCK:
                    key = group.key(request.block_hashes[index])
                    if not self.pool.register(block_ids[index], key, replaces_free=may_be_cached):
                        request.has_twin_blocks = True
        request.num_cached_blocks = num_full
        self._announce_chunks(request)

    def _announce_chunks(self, request: Request) -> None:
        """Announce the request's chunks whose last block is registered and to which a hit of every group can extend.
        Each belongs to the block of the first group, and needs the other groups' blocks. With states a hit can extend
        to a checkpoint, at the chunk's end or later, and the chunk needs what a hit there needs.

        If an equal block of another request is the registered one, the chunk belongs to that block, because a later hit
        would find it. A hit on a chunk that ends within the first block saves no tokens, but the chunk is announced all
        the same, because routers follow the chain of chunks from its beginning.
        """
        ends = request.chunk_ends
        index = request.num_announced_chunks
        cached: list[dict[int, int | None]] = [{} for _ in self.groups]
        while index < len(ends):
            num_blocks = ends[index].token_end // self.block_size
            last = max(0, num_blocks - 1)
            if last >= request.num_cached_blocks:
                break
            needed = self._needed_for_hit(request, last + 1, cached)
            if self.states is not None and (needed or not self.groups):
                checkpoint = self.states.checkpoint_after(request, last + 1)
                if checkpoint is None:
                    break  # until there is one
                at, state = checkpoint
                if at > last + 1 and self.groups:
                    later = self._needed_for_hit(request, at, cached)
                    needed = [needed[0], *later] if later else []
                if needed or not self.groups:
                    needed.append(len(self.pool.blocks) + state)
            if needed:
                self.announcer.add(ends[index].hash, num_blocks * self.block_size, needed[0], needed[1:])
            index += 1
        request.num_announced_chunks = index

    def _needed_for_hit(
        self, request: Request, num_blocks: int, cached: Sequence[dict[int, int | None]]
    ) -> list[int]:
        """Return the ids of the blocks without which a hit on the request's tokens has fewer blocks, the last one of
        the first group first; empty if there is no such hit.

        Args:
            cached: per group, what was found before, by index.
        """
        needed = []
        for group, known in zip(self.groups, cached, strict=True):
            for index in reversed(group.needed_for_hit(num_blocks)):
                if index not in known:
                    known[index] = self.pool.find(group.key(request.block_hashes[index]))
                if (block_id := known[index]) is None:
                    return []
                needed.append(block_id)
        return needed


def _counted_group(groups: Sequence[FullAttentionGroup]) -> FullAttentionGroup | None:
    """Return the group whose cached blocks determine what waiting requests need not compute; None if there is none.

    A group that keeps every block is preferred: blocks behind a sliding window may be evicted without spoiling a hit.
    """
    full = (group for group in groups if type(group) is FullAttentionGroup)
    return next(full, groups[0] if groups else None)
