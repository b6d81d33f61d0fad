"""The block pool against a naive model, by random operations."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from argosy_engine.core.block_pool import BlockPool, PoolListener

NUM_BLOCKS = 9


class Evictions(PoolListener):
    """Forgets in a dictionary what the pool no longer caches."""

    def __init__(self, cached: dict[bytes, int]) -> None:
        self._cached = cached

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        assert self._cached.pop(block_hash) == block_id


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, register and free chains; a dictionary says what should be cached."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: dict[bytes, int] = {}
        self.pool = BlockPool(NUM_BLOCKS, Evictions(self.cached))
        self.held: list[list[int]] = []
        self.counter = 0

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free_blocks:
            self.held.append(self.pool.allocate(count))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.held[data.draw(st.integers(0, len(self.held) - 1))]))
        if block_id not in self.cached.values():
            self.counter += 1
            block_hash = self.counter.to_bytes(4, "big")
            assert self.pool.register(block_id, block_hash)
            self.cached[block_hash] = block_id

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_hash = data.draw(st.sampled_from(sorted(self.cached)))
        found = self.pool.lookup([block_hash])
        self.pool.share(found)
        self.held.append(found)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache() == (not self.held)

    @invariant()
    def agrees_with_the_naive_model(self) -> None:
        self.pool.check()
        in_use = {block_id for chain in self.held for block_id in chain}
        assert 0 not in in_use
        assert self.pool.num_free_blocks == NUM_BLOCKS - 1 - len(in_use)
        for block_hash, block_id in self.cached.items():
            assert self.pool.lookup([block_hash]) == [block_id]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(4)
    chain = pool.allocate(3)
    for index, block_id in enumerate(chain):
        pool.register(block_id, bytes([index]))
    pool.free(chain)
    pool.allocate(1)
    assert pool.lookup([b"\0", b"\1", b"\2"]) == chain[:2]


def test_uncached_blocks_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached, scratch = pool.allocate(1), pool.allocate(1)
    pool.register(cached[0], b"keep")
    pool.free(cached)
    pool.free(scratch)
    assert pool.allocate(1) == scratch
    assert pool.lookup([b"keep"]) == cached
