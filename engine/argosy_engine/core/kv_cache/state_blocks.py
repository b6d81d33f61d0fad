"""StateBlocks: where requests keep the states of recurrent layers, and which of them later requests continue.

A state stands for all tokens before it and is overwritten by every step, so what a prefix can be continued from are
copies made on the way: checkpoints. The list of a request's blocks reads like that of attention: entry i is the state
after the last computed token of [i * block_size, (i + 1) * block_size), or the null block. A step reads the entry of
the token before its first and writes that of its last. The two are one block, which moves along the list, unless the
step begins at a checkpoint: then it writes to a block of its own and leaves the checkpoint behind. So nothing is ever
copied by itself, and a checkpoint is made by where a step ends.

Steps end at checkpoints (`chunk_end`) where the attention layers know more of a prompt than states do, because prompts
part there; at the last full block of a prompt; and at every so many tokens.

A checkpoint is registered when the step after it is planned: its tokens are known by then, and within one step a
request could read it before another has written it. Blocks for checkpoints are taken while there are any: without one
the state moves on, and nothing is kept. Design: vLLM's `mamba_cache_mode=align`; branching points: Marconi,
arXiv 2411.19379.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import itemgetter

from argosy_engine.core.kv_cache.block_pool import NULL_BLOCK, BlockPool
from argosy_engine.core.request import Request

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

    Args:
        num_blocks: blocks of the pool, including the null block.
        interval: tokens between checkpoints, a multiple of `block_size`.
        key_suffix: appended to block hashes.
        on_evict: called with a block id when its checkpoint is dropped.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        interval: int,
        *,
        key_suffix: bytes,
        enable_prefix_caching: bool,
        on_evict: Callable[[int], None],
    ) -> None:
        self.pool = BlockPool(num_blocks, on_evict)
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
