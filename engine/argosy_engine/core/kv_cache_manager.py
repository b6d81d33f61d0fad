"""KVCacheManager: allocates KV blocks to requests and finds cached prefixes.

It owns the block pools, the KV cache groups that allocate from them (`AttentionBlocks`, `StateBlocks`), and the
announcer of cached prefixes. It knows requests and blocks, not steps or budgets. A request has one list of block ids
per group. Invariant: a running request holds, per group, exactly the blocks that its computed and scheduled tokens fill
and its next tokens read. Blocks that its known tokens will still need are reserved for it: they are free, but no other
request is admitted to them.

A block of keys and values is registered in the prefix cache as soon as the step that fills it is scheduled. Steps run
in order, and within a step a layer writes all keys and values before it reads any, so even a request admitted to the
same step may share it. States are registered one step later (`StateBlocks`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import islice
from operator import itemgetter

from argosy_engine.attention.kv_cache_spec import FullAttentionSpec, KVCacheSpec
from argosy_engine.core.block_pool import NULL_BLOCK, BlockLives, BlockPool, PoolListener
from argosy_engine.core.prefix_residency import (
    PrefixAnnouncer,
    PrefixResidency,
    StateResidency,
    WaitingTokens,
)
from argosy_engine.core.request import Request
from argosy_engine.messages import BlockIds

MIN_CHECKPOINT_TOKENS = 128
"""A checkpoint that saves fewer tokens than this, after the one before it, is not worth a step that ends there."""


class _Held:
    """What a request with a state knows of its checkpoints."""

    __slots__ = ("checkpoints", "ends", "left")

    def __init__(self, ends: tuple[int, ...]) -> None:
        self.ends = ends
        """Tokens at which its prompt has checkpoints, besides the multiples of the interval."""
        self.left: int | None = None
        """Entry with a checkpoint that the last step has read and nothing reads any more."""
        self.checkpoints: list[tuple[int, int, bytes]] = []
        """(blocks, block id, key) of those that are registered, of this request and before it, in their order."""


class StateBlocks:
    """Blocks with states, of a pool of their own.

    A state stands for all tokens before it and is overwritten by every step, so what a prefix can be continued from are
    copies made on the way: checkpoints. The list of a request's blocks reads like that of attention: entry i is the
    state after the last computed token of [i * block_size, (i + 1) * block_size), or the null block. A step reads the
    entry of the token before its first and writes that of its last. The two are one block, which moves along the list,
    unless the step begins at a checkpoint: then it writes to a block of its own and leaves the checkpoint behind. So
    nothing is ever copied by itself, and a checkpoint is made by where a step ends.

    Steps end at checkpoints (`chunk_end`) where the attention layers know more of a prompt than states do, because
    prompts part there; at the last full block of a prompt; and at every so many tokens.

    A checkpoint is registered when the step after it is planned: its tokens are known by then, and within one step a
    request could read it before another has written it. Blocks for checkpoints are taken while there are any: without
    one the state moves on, and nothing is kept. Design: vLLM's `mamba_cache_mode=align`; branching points: Marconi,
    arXiv 2411.19379.

    Args:
        num_blocks: blocks of the pool, including the null block.
        interval: tokens between checkpoints, a multiple of `block_size`.
        key_suffix: appended to block hashes.
        listener: is told when a checkpoint is dropped.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        interval: int,
        *,
        key_suffix: bytes,
        enable_prefix_caching: bool,
        listener: PoolListener,
    ) -> None:
        self.pool = BlockPool(num_blocks, listener)
        self.block_size = block_size
        self.interval = interval
        self.enable_prefix_caching = enable_prefix_caching
        self._suffix = key_suffix
        self._held: dict[str, _Held] = {}

    def find_hit(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Return the list of a request that continues from the last checkpoint within the hashes; empty if none is."""
        for index in range(len(block_hashes) - 1, -1, -1):
            if (found := self.pool.find(block_hashes[index] + self._suffix)) is not None:
                return [NULL_BLOCK] * index + [found]
        return []

    def chunk_end(self, request: Request, start: int, end: int) -> int:
        """Return where a step should end that may compute a request's tokens from `start` to `end`."""
        if not self.enable_prefix_caching or end - start <= 1:
            return end
        held = self._held.get(request.request_id)
        ends = held.ends if held is not None else self._ends(request, start)
        for checkpoint in ends:
            if start < checkpoint < end:
                return checkpoint
        if end < request.num_tokens:
            at_interval = end // self.interval * self.interval
            if at_interval > start:
                return at_interval
        return end

    def can_admit(self, cached: Sequence[int]) -> bool:
        """Return whether there is a block for a request's state."""
        return self.pool.can_allocate(1, cached[-1:])

    def share(self, cached: Sequence[int]) -> None:
        self.pool.share(cached[-1:])

    def admit(self, request: Request, cached: list[int], num_tokens: int) -> list[int]:
        """Return the list of a request whose first step ends after `num_tokens`; `can_admit` has allowed it, and its
        cached checkpoint is shared."""
        hit = len(cached) * self.block_size
        held = self._held[request.request_id] = _Held(self._ends(request, hit))
        if cached:
            held.left = len(cached) - 1
            key = request.block_hashes[len(cached) - 1] + self._suffix
            held.checkpoints.append((len(cached), cached[-1], key))
        last = (num_tokens - 1) // self.block_size
        return cached + [NULL_BLOCK] * (last - len(cached)) + self.pool.allocate(1)

    def grow(self, request: Request, block_ids: list[int], num_tokens: int) -> list[int]:
        """Let a request's next step end after `num_tokens`, in another entry than it begins; return what is added to
        its list.

        Args:
            block_ids: its list, which is changed.
        """
        held = self._held[request.request_id]
        if held.left is not None:
            self.pool.free([block_ids[held.left]])
            block_ids[held.left] = NULL_BLOCK
            held.left = None
        current = len(block_ids) - 1
        last = (num_tokens - 1) // self.block_size
        if self.pool.num_free_blocks and self.register(request, block_ids, request.num_computed_tokens):
            held.left = current
            (block_id,) = self.pool.allocate(1)
        else:
            block_id, block_ids[current] = block_ids[current], NULL_BLOCK
        added = [NULL_BLOCK] * (last - current - 1) + [block_id]
        block_ids += added
        return added

    def free(self, request: Request, block_ids: list[int]) -> None:
        """Free a request's blocks. The later a checkpoint, the sooner it is evicted, as with attention."""
        held = self._held.pop(request.request_id)
        self.pool.free([block_id for block_id in block_ids[-1:] if block_id != NULL_BLOCK])
        if held.left is not None:
            self.pool.free([block_ids[held.left]])
        for _, block_id, key in reversed(held.checkpoints):
            self.pool.touch(block_id, key)

    def forget(self, request: Request) -> None:
        self._held.pop(request.request_id, None)

    def checkpoint_after(self, request: Request, num_blocks: int) -> tuple[int, int] | None:
        """Return the first checkpoint of a request's tokens after `num_blocks` blocks or more: after how many, and the
        block with the state."""
        held = self._held.get(request.request_id)
        if held is None:
            return None
        first = bisect_left(held.checkpoints, num_blocks, key=itemgetter(0))
        for blocks, block_id, key in islice(held.checkpoints, first, None):
            if self.pool.find(key) == block_id:
                return blocks, block_id
        return None

    def check(self, request_ids: Iterable[str]) -> None:
        """Assert the pool's invariants, and that exactly these requests hold states."""
        self.pool.check()
        assert self._held.keys() == set(request_ids)

    def has_lost_checkpoint(self, request: Request) -> bool:
        """Return whether a checkpoint of a request's tokens was evicted since it was registered."""
        checkpoints = self._held[request.request_id].checkpoints
        return any(self.pool.find(key) != block_id for _, block_id, key in checkpoints)

    def register(self, request: Request, block_ids: list[int], num_tokens: int) -> bool:
        """Register a request's state after `num_tokens`, if it is to be a checkpoint and its tokens are known."""
        held = self._held[request.request_id]
        if not self.enable_prefix_caching or num_tokens % self.block_size or not num_tokens:
            return False
        if num_tokens % self.interval and num_tokens not in held.ends:
            return False
        request.hash_full_blocks()
        index = num_tokens // self.block_size - 1
        if index >= len(request.block_hashes) or block_ids[index] == NULL_BLOCK:
            return False
        if self.pool.blocks[block_ids[index]].block_hash is not None:
            return False  # the step that continued it was given up
        key = request.block_hashes[index] + self._suffix
        if not self.pool.register(block_ids[index], key):
            return False
        held.checkpoints.append((index + 1, block_ids[index], key))
        return True

    def _ends(self, request: Request, hit: int) -> tuple[int, ...]:
        """Return where a request's prompt has checkpoints, in order, after a hit of so many tokens."""
        last = (request.num_tokens - 1) // self.block_size * self.block_size
        ends: list[int] = []
        for end in sorted({request.num_branch_tokens, last}):
            if end - (ends[-1] if ends else hit) >= MIN_CHECKPOINT_TOKENS:
                ends.append(end)
        return tuple(ends)


class AttentionBlocks:
    """Blocks with keys and values of one KV cache group.

    Entry i of a request's list is the block of tokens [i * block_size, (i + 1) * block_size), or the null block where
    no later token reads it. Design: vLLM, `v1/core/single_type_kv_cache_manager.py`.

    Args:
        spec: of the group's layers.
        key_suffix: appended to block hashes, so that the groups' blocks are distinct in the shared prefix cache; empty
            for the first group.
        block_size: tokens per block.
        max_num_batched_tokens: token budget of a step.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        pool: BlockPool,
        key_suffix: bytes,
        block_size: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.spec = spec
        self.pool = pool
        self.key_suffix = key_suffix
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.keeps_all = spec.reach is None
        """Whether every block is kept until the request ends."""

    def key(self, block_hash: bytes) -> bytes:
        return block_hash + self.key_suffix if self.key_suffix else block_hash

    def peak_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a request holds at once while it computes `num_tokens`."""
        return self.spec.peak_blocks(num_tokens, self.block_size, self.max_num_batched_tokens)

    def needed_for_hit(self, num_blocks: int) -> range:
        """Return the indices of the blocks without which no hit has `num_blocks` blocks.

        The last one is among them even where no later token reads it, so that all that a hit saves has been computed.
        Where all are kept, every block before it is left out: it is evicted after it (`BlockPool.free`).
        """
        first = last = max(num_blocks - 1, 0)
        if not self.keeps_all:
            first = min(self.spec.num_skipped(num_blocks * self.block_size, self.block_size), last)
        return range(first, num_blocks)

    def find_hit(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Return the block ids of the longest cached prefix of the hashes from which a request can continue."""
        if self.keeps_all:
            return self.pool.lookup(
                [self.key(each) for each in block_hashes] if self.key_suffix else block_hashes
            )
        # From the end, look for a run of cached blocks that has all that the tokens after it read.
        end = len(block_hashes)
        block_ids = [NULL_BLOCK] * end
        first = self.needed_for_hit(end).start
        for index in range(end - 1, -1, -1):
            if index < first:
                break
            found = self.pool.find(self.key(block_hashes[index]))
            if found is None:
                end = index
                first = self.needed_for_hit(end).start
            else:
                block_ids[index] = found
        return [NULL_BLOCK] * first + block_ids[first:end]


class KVCacheManager:
    """Block tables of all requests. Blocks with keys and values have one size and one pool, states another.

    Args:
        num_blocks: blocks of the pool, including the null block.
        block_size: tokens per block.
        watermark: share of the pool (0..1) that admission leaves free while other requests run, so that a nearly full
            cache does not admit requests that would be preempted a few steps later.
        specs: one per KV cache group (`group_layers`); empty if the model keeps nothing of a request.
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
        self._specs = specs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._state_interval = -(-state_interval // block_size) * block_size
        self.announcer = PrefixAnnouncer()
        self.lives = BlockLives(lives_sample) if lives_sample else None
        self._new_pools(num_blocks, num_states)
        self.num_watermark_blocks = int(watermark * num_blocks)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def _new_pools(self, num_blocks: int, num_states: int) -> None:
        self.waiting = WaitingTokens(self.block_size, lambda key: self.pool.is_cached(key))
        self.pool = BlockPool(num_blocks, PrefixResidency(self.announcer, self.waiting, self.lives))
        self.pools = [self.pool]
        self.groups: list[AttentionBlocks] = []
        """Those of keys and values; of a request's block lists, that of the states follows theirs."""
        self.states: StateBlocks | None = None
        for index, spec in enumerate(self._specs):
            suffix = index.to_bytes(2, "big") if index else b""
            if spec.is_state:
                self.states = StateBlocks(
                    num_states,
                    self.block_size,
                    self._state_interval,
                    key_suffix=suffix,
                    enable_prefix_caching=self.enable_prefix_caching,
                    listener=StateResidency(self.announcer, num_blocks),
                )
                self.pools.append(self.states.pool)
            else:
                self.groups.append(
                    AttentionBlocks(spec, self.pool, suffix, self.block_size, self._max_num_batched_tokens)
                )
        self._all_groups: list[AttentionBlocks | StateBlocks] = list(self.groups)
        if self.states is not None:
            self._all_groups.append(self.states)
        self._counted_group = min(self.groups, key=lambda group: not group.keeps_all, default=None)
        """Its cached blocks determine what waiting requests need not compute. One that keeps every block is preferred:
        blocks that no token reads any more may be evicted without spoiling a hit."""

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0..1, of keys and values or of states, whichever is greater."""
        return max(pool.usage for pool in self.pools)

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
            return [[] for _ in range(max(len(self._all_groups), 1))]
        request.num_branch_tokens = 0
        while True:
            # A group may shorten the hit of earlier groups; the hits agree once a round shortens nothing.
            longest, hits = len(hashes), []
            for group in self._all_groups:
                if group is self.states and self.groups:
                    known = len(hashes) * self.block_size
                    request.num_branch_tokens = max(request.num_branch_tokens, known)
                hits.append(group.find_hit(hashes))
                hashes = hashes[: len(hits[-1])]
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
        if self.states is not None and not self.states.can_admit(cached_block_ids[-1]):
            return False
        shared = [
            [block_id for block_id in cached if block_id != NULL_BLOCK]
            for cached in cached_block_ids[: len(self.groups)]
        ]
        num_wanted = self.num_watermark_blocks if apply_watermark else 0
        for group, held in zip(self.groups, shared, strict=True):
            num_wanted += max(group.peak_blocks(request.num_tokens) - len(held), 0)
        if not self.pool.can_allocate(num_wanted, *shared):
            return False
        num_cached = len(cached_block_ids[0])
        num_tokens = num_cached * self.block_size + num_new_tokens
        # All of them first: `allocate` could evict a block that is not shared yet.
        for held in shared:
            self.pool.share(held)
        num_new = -(-num_tokens // self.block_size) - num_cached
        request.block_ids = [
            cached + self.pool.allocate(num_new) for cached in cached_block_ids[: len(self.groups)]
        ]
        if self.states is not None:
            self.states.share(cached_block_ids[-1])
            request.block_ids.append(self.states.admit(request, cached_block_ids[-1], num_tokens))
        request.num_allocated_tokens = (num_cached + num_new) * self.block_size
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
        num_blocks = -(-num_tokens // self.block_size)
        num_needed = []
        for index, group in enumerate(self.groups):
            block_ids = request.block_ids[index]
            if not group.keeps_all:
                self._skip(request, group, block_ids)
            num_needed.append(num_blocks - len(block_ids))
        if sum(num_needed) > self.pool.num_free_blocks:
            return None
        new_ids = [self.pool.allocate(count) for count in num_needed]
        for block_ids, added in zip(request.block_ids, new_ids, strict=False):
            block_ids += added
        if self.states is not None:
            new_ids.append(self.states.grow(request, request.block_ids[-1], num_tokens))
            self._announce_chunks(request)
        request.num_allocated_tokens = num_blocks * self.block_size
        if request.num_reserved_blocks or num_tokens < request.num_tokens:
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
        self.pool.num_reserved_blocks -= request.num_reserved_blocks
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
        self.announcer.clear()

    def reset_prefix_cache(self) -> bool:
        # A request that holds blocks of keys and values holds a state.
        if not all(pool.reset_prefix_cache() for pool in reversed(self.pools)):
            return False
        self.announcer.clear()
        return True

    def check(self, requests: Iterable[Request]) -> None:
        """Assert the pool's invariants, and that the given requests hold all of its used and reserved blocks."""
        requests = list(requests)
        assert self.pool.num_reserved_blocks == sum(request.num_reserved_blocks for request in requests)
        tables = [request.block_ids for request in requests if request.block_ids]
        if self.states is not None:
            self.states.check([request.request_id for request in requests if request.block_ids])
        for pool in self.pools:
            pool.check()
            held = sum(
                len(block_ids) - block_ids.count(NULL_BLOCK)
                for table in tables
                for group, block_ids in zip(self._all_groups, table, strict=True)
                if group.pool is pool
            )
            referenced = sum(block.ref_count for block in pool.blocks[1:])
            assert held == referenced, f"requests hold {held} blocks, the pool counts {referenced}"

    def _reserve(self, request: Request) -> None:
        """Update the number of blocks reserved for the request's known tokens."""
        num_reserved = 0
        if request.num_allocated_tokens < request.num_tokens:
            num_blocks = -(-request.num_tokens // self.block_size)
            for group, block_ids in zip(self.groups, request.block_ids, strict=False):
                num_held = len(block_ids) - block_ids.count(NULL_BLOCK)
                to_peak = group.peak_blocks(request.num_tokens) - num_held
                num_reserved += max(min(num_blocks - len(block_ids), to_peak), 0)
        self.pool.num_reserved_blocks += num_reserved - request.num_reserved_blocks
        request.num_reserved_blocks = num_reserved

    def _skip(self, request: Request, group: AttentionBlocks, block_ids: list[int]) -> None:
        """Free a group's leading blocks that no later token reads, and put the null block in their place."""
        position = group.spec.num_skipped(request.num_computed_tokens, self.block_size) - 1
        if position < 0 or block_ids[position] == NULL_BLOCK:
            return
        self._register(request, request.num_computed_tokens)
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
