"""The prefix index against brute force, and its bounds."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from argosy_router.native.substitutes import SCRUB_STEP, ChunkTable
from argosy_router.prefixes import (
    MAX_SPECULATIVE_TTL_S,
    SHARDS,
    SPECULATIVE_TTL_S,
    PrefixIndex,
    ReplicaPrefixes,
)

REPLICAS = 4
CHAINS = [[chain * 1000 + depth for depth in range(1, 8)] for chain in range(3)]
"""Prompts as chains of chunks. The second shares its first three chunks with the first."""
CHAINS[1][:3] = CHAINS[0][:3]
CHUNKS = sorted({chunk for chain in CHAINS for chunk in chain})


def tokens_of(chunk: int) -> int:
    """Prompt tokens up to a chunk: a function of the chunk, as in production."""
    return 16 * (chunk % 1000)


class Index(RuleBasedStateMachine):
    """Random announcements, evictions, inserts, restarts and departures."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.now = 0.0
        self.residencies = [ReplicaPrefixes(self.index) for _ in range(REPLICAS)]
        self.announced: list[set[int]] = [set() for _ in range(REPLICAS)]
        self.speculative: list[dict[int, float]] = [{} for _ in range(REPLICAS)]

    replicas = st.integers(0, REPLICAS - 1)
    some_chunks = st.sets(st.sampled_from(CHUNKS), min_size=1)

    @rule(replica=replicas, chunks=some_chunks)
    def store(self, replica: int, chunks: set[int]) -> None:
        self.residencies[replica].stored(sorted(chunks), [tokens_of(chunk) for chunk in sorted(chunks)])
        self.announced[replica] |= chunks
        for chunk in chunks:
            self.speculative[replica].pop(chunk, None)

    @rule(replica=replicas, chunks=some_chunks)
    def remove(self, replica: int, chunks: set[int]) -> None:
        self.residencies[replica].removed(sorted(chunks))
        self.announced[replica] -= chunks
        for chunk in chunks:
            self.speculative[replica].pop(chunk, None)

    @rule(replica=replicas, chain=st.sampled_from(CHAINS), length=st.integers(1, 7))
    def insert_speculatively(self, replica: int, chain: list[int], length: int) -> None:
        chunks = chain[:length]
        self.residencies[replica].insert_speculatively(
            chunks, lambda: [tokens_of(chunk) for chunk in chunks], self.now
        )
        for chunk in chunks:
            if chunk not in self.announced[replica]:
                self.speculative[replica].setdefault(chunk, self.now + SPECULATIVE_TTL_S)

    @rule(seconds=st.floats(0.0, 2 * SPECULATIVE_TTL_S))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        for replica, residency in enumerate(self.residencies):
            residency.expire(self.now)
            self.speculative[replica] = {
                c: until for c, until in self.speculative[replica].items() if until > self.now
            }

    @rule(replica=replicas)
    def restart(self, replica: int) -> None:
        self.residencies[replica].clear()
        self.announced[replica].clear()
        self.speculative[replica].clear()

    @rule(replica=replicas)
    def replace(self, replica: int) -> None:
        self.residencies[replica].close()
        self.residencies[replica] = ReplicaPrefixes(self.index)
        self.announced[replica].clear()
        self.speculative[replica].clear()

    @rule(steps=st.integers(1, 2 * SHARDS))
    def scrub(self, steps: int) -> None:
        for _ in range(steps):
            if not self.index.scrub():
                break

    @precondition(lambda self: True)
    @rule()
    def scrub_all(self) -> None:
        while self.index.scrub():
            pass
        held = set().union(*self.announced, *self.speculative)
        assert len(self.index) == len(held), "nothing but held chunks stays after scrubbing"

    @invariant()
    def equals_brute_force(self) -> None:
        for chain in CHAINS:
            runs, longest = self.index.match(chain)
            for replica, residency in enumerate(self.residencies):
                held = self.announced[replica] | self.speculative[replica].keys()
                length = next((n for n, chunk in enumerate(chain) if chunk not in held), len(chain))
                expected = tokens_of(chain[length - 1]) if length else None
                assert runs.get(residency.slot) == expected
                assert length <= longest
            assert len(runs) <= REPLICAS

    @invariant()
    def slots_are_distinct(self) -> None:
        assert len({residency.slot for residency in self.residencies}) == REPLICAS


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def test_the_cap_holds_and_the_newest_survive() -> None:
    index = PrefixIndex(capacity=10_000)
    slot = index.acquire_slot()
    for start in range(0, 30_000, 1000):
        index.add(slot, range(start, start + 1000), [1] * 1000)
        assert len(index) <= index.capacity
    assert all(index.match([chunk])[1] for chunk in range(29_000, 30_000))


def test_use_keeps_a_speculative_prefix() -> None:
    index = PrefixIndex(capacity=SHARDS * 4)
    slot = index.acquire_slot()
    hot = [1, 2, 3]
    for chunk in range(1000, 5_000):
        index.insert_speculatively(slot, hot, lambda: [10, 20, 30])
        index.insert_speculatively(slot, [chunk], lambda: [1])
    assert index.match(hot) == ({slot: 30}, 3)


def test_use_keeps_an_announced_prefix_alive() -> None:
    index = PrefixIndex(capacity=SHARDS * 4)
    holder, busy = ReplicaPrefixes(index), ReplicaPrefixes(index)
    hot = [1, 2, 3]
    holder.stored(hot, [10, 20, 30])
    for chunk in range(1000, 5_000):
        holder.insert_speculatively(hot, lambda: [10, 20, 30], 0.0)
        busy.stored([chunk], [1])
    assert index.match(hot) == ({holder.slot: 30}, 3)
    assert not holder.has_unconfirmed, "what is announced is confirmed"


def test_use_in_another_slot_keeps_it_alive_too() -> None:
    index = PrefixIndex(capacity=SHARDS * 4)
    first, second = index.acquire_slot(), index.acquire_slot()
    for chunk in range(0, 3 * SHARDS, SHARDS):
        index.insert_speculatively(first, [chunk], lambda: [1])
    index.insert_speculatively(second, [0], lambda: [1])
    for chunk in range(3 * SHARDS, 6 * SHARDS, SHARDS):
        index.insert_speculatively(first, [chunk], lambda: [1])
    assert index.match([0]) == ({first: 1, second: 1}, 1)


def test_a_departed_replica_is_invisible_at_once_and_its_slot_rests() -> None:
    index = PrefixIndex()
    gone, stays = index.acquire_slot(), index.acquire_slot()
    for slot in (gone, stays):
        index.add(slot, range(5000), [7] * 5000)
    index.retire_slot(gone)
    assert index.match([0, 1]) == ({stays: 7}, 2)
    assert index.acquire_slot() not in (gone, stays)
    steps = 1
    while index.scrub():
        steps += 1
    assert steps == SHARDS
    assert len(index) == 5000
    assert index.acquire_slot() == gone
    assert index.match([0]) == ({stays: 7}, 1)


def test_large_shards_are_scrubbed_in_steps() -> None:
    dicts = ChunkTable(SHARDS)
    dicts.resize(2 * SCRUB_STEP)
    dicts.set_live(0, True)
    one_shard = range(0, 2 * SCRUB_STEP * SHARDS, SHARDS)
    dicts.add(0, one_shard, [1] * len(one_shard))
    assert not dicts.scrub(0, [0])
    assert len(dicts) == SCRUB_STEP
    assert dicts.scrub(0, [0])
    assert len(dicts) == 0


def test_a_replica_removed_during_a_scrub_is_scrubbed_too() -> None:
    index = PrefixIndex()
    gone, late = index.acquire_slot(), index.acquire_slot()
    index.add(gone, range(3 * SCRUB_STEP * SHARDS // 2), [1] * (3 * SCRUB_STEP * SHARDS // 2))
    index.retire_slot(gone)
    before = len(index)
    while len(index) == before:
        index.scrub()
    assert len(index) > 0
    index.add(late, [0, 1, SHARDS - 1], [1, 1, 1])
    index.retire_slot(late)
    while index.scrub():
        pass
    assert len(index) == 0
    assert {index.acquire_slot(), index.acquire_slot()} == {gone, late}


def test_many_holders_are_found_as_few_are() -> None:
    index = PrefixIndex()
    slots = [index.acquire_slot() for _ in range(200)]
    for slot in slots:
        index.add(slot, [1, 2, 3][: 1 + slot % 3], [10, 20, 30][: 1 + slot % 3])
    runs, length = index.match([1, 2, 3, 4])
    assert length == 3
    assert runs == {slot: 10 * (1 + slot % 3) for slot in slots}


def test_a_speculative_insert_outlives_the_expected_wait() -> None:
    index = PrefixIndex()
    residency = ReplicaPrefixes(index)
    residency.insert_speculatively([1], lambda: [10], 0.0, expected_s=60.0)
    residency.insert_speculatively([2], lambda: [10], 0.0)
    residency.expire(SPECULATIVE_TTL_S)
    assert index.match([2])[1] == 0
    assert index.match([1])[1] == 1
    residency.expire(120.0)
    assert index.match([1])[1] == 0


def test_the_lifetime_of_a_speculative_insert_is_bounded() -> None:
    index = PrefixIndex()
    residency = ReplicaPrefixes(index)
    residency.insert_speculatively([1], lambda: [10], 0.0, expected_s=1e9)
    residency.expire(MAX_SPECULATIVE_TTL_S)
    assert index.match([1])[1] == 0
    assert not residency.has_unconfirmed


def test_speculative_inserts_are_bounded_and_the_oldest_are_erased_first() -> None:
    index = PrefixIndex(capacity=SHARDS * 16)
    busy, idle = ReplicaPrefixes(index), ReplicaPrefixes(index)
    idle.insert_speculatively([1, 2, 3], lambda: [1, 2, 3], 0.0)
    for start in range(SHARDS, 40 * SHARDS, 8):
        prompt = range(start, start + 8)
        busy.insert_speculatively(prompt, lambda: range(8), float(start))
        assert index.num_speculative == idle.num_unconfirmed + busy.num_unconfirmed <= index.max_speculative
        assert all(busy.is_unconfirmed(chunk) for chunk in prompt), "the newest is kept"
    assert index.match([1, 2, 3]) == ({idle.slot: 3}, 3)
    busy.insert_speculatively(range(10**6, 10**6 + index.capacity), lambda: range(index.capacity), 1e6)
    assert not busy.has_unconfirmed, "one that is too long by itself is not believed at all"
    idle.close()
    assert index.num_speculative == 0
