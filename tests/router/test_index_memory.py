"""Memory of the prefix indexes: measured, capped, and shared by use."""

from __future__ import annotations

import random
import tracemalloc
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import given

from argosy_protocol.fleet import FleetDocument
from argosy_router.config import MIN_INDEX_MEMORY
from argosy_router.prefixes import MAX_SPECULATIVE, SHARDS, PrefixIndex, ReplicaPrefixes, shares

from .fake_engine import FakeEngine
from .harness import rig, service


def fill(index: PrefixIndex, residency: ReplicaPrefixes, chunks: int, rng: random.Random) -> None:
    for _ in range(0, chunks, 512):
        residency.stored([rng.getrandbits(64) for _ in range(512)], range(512))


@pytest.mark.parametrize("replicas", [2, 600])
@pytest.mark.parametrize("limit", [MIN_INDEX_MEMORY, 5_000_000])
def test_no_use_takes_more_than_the_cap(limit: int, replicas: int) -> None:
    rng = random.Random(0)
    index = PrefixIndex(0)
    residencies = [ReplicaPrefixes(index) for _ in range(replicas)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index.resize(index.capacity_within(limit))
    for round_number in range(20):
        residency = rng.choice((residencies[0], residencies[-1]))
        fill(index, residency, index.capacity // 5, rng)
        prompt = [rng.getrandbits(64) for _ in range(64)]
        for _ in range(3):
            residency.insert_speculatively(prompt, lambda: range(64), float(round_number))
        assert index.bytes <= limit
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(index) > 0.9 * index.capacity
    assert 0.7 * index.bytes < used < 1.03 * index.bytes, "it counts every entry as the largest"
    assert index.capacity * 300 > limit, "a chunk does not cost more than it must"


@pytest.mark.parametrize("limit", [MIN_INDEX_MEMORY, 5_000_000, 1 << 40])
def test_an_index_fits_as_the_capacity_within_its_memory_says(limit: int) -> None:
    index = PrefixIndex()
    index.acquire_slot()
    capacity = index.capacity_within(limit)
    index.fit(limit)
    assert index.capacity == capacity
    assert 0 < index.max_speculative <= min(capacity // 4, MAX_SPECULATIVE)


def test_chunks_that_all_replicas_hold_keep_to_the_memory() -> None:
    rng, limit = random.Random(0), 4_000_000
    index = PrefixIndex(0)
    residencies = [ReplicaPrefixes(index) for _ in range(200)]
    for _ in range(30):
        index.fit(limit)
        for number in range(SHARDS):
            index.trim(number)
        assert index.bytes <= limit
        shared = [rng.getrandbits(64) for _ in range(100)]
        for residency in residencies:
            residency.stored(shared, range(1, 101))
            residency.stored([rng.getrandbits(64) for _ in range(20)], range(20))
        assert index.bytes <= limit
    runs, _ = index.match(shared[:1])
    assert set(runs) == {residency.slot for residency in residencies}


def test_a_smaller_share_is_kept_after_trimming() -> None:
    index = PrefixIndex()
    residency = ReplicaPrefixes(index)
    index.resize(index.capacity_within(8 << 20))
    fill(index, residency, index.capacity, random.Random(0))
    newest = [1, 2, 3]
    residency.stored(newest, newest)
    index.resize(index.capacity_within(2 << 20))
    assert index.is_overfull
    assert index.bytes > 2 << 20
    for number in range(SHARDS):
        index.trim(number)
    assert not index.is_overfull
    assert index.bytes <= 2 << 20
    assert index.match(newest) == ({residency.slot: 3}, 3)


class Load(NamedTuple):
    """An index for the sharing alone."""

    count: int
    capacity: int
    bytes: int

    def __len__(self) -> int:
        return self.count


IDLE, SOME, FULL = Load(0, 100, 1000), Load(50, 100, 50_000), Load(100, 100, 100_000)


@given(st.lists(st.sampled_from((IDLE, SOME, FULL))), st.integers(0, 10**7))
def test_shares_never_exceed_the_whole_and_nobody_full_gets_less_than_an_even_one(
    indexes: list[Load], total: int
) -> None:
    shared = shares(total, indexes)
    assert sum(shared) <= total
    for index, share in zip(indexes, shared, strict=True):
        if index is FULL:
            assert share >= total // len(indexes)


def test_memory_unused_by_idle_services_goes_to_the_busy_one() -> None:
    busy, *idle = shares(10**6, [FULL, *[IDLE] * 49])
    assert busy == 10**6 - 49 * 2000
    assert idle == [2000] * 49
    assert shares(10**6, [FULL, FULL, SOME]) == [450_000, 450_000, 100_000]
    assert shares(10**6, [IDLE, IDLE]) == [500_000, 500_000]


async def test_a_busy_service_gets_the_memory_of_idle_ones() -> None:
    async with FakeEngine() as engine:
        document = FleetDocument(
            services=(
                service([engine]),
                *(service([], name=f"s{n}", uid=f"u{n}", model=f"m{n}") for n in range(19)),
            )
        )
        async with rig([engine], document=document, index_memory=8 << 20) as r:
            index = r.router.fleet.services["default/svc"].index
            at_first = index.capacity
            fill(index, r.replica(0).prefixes, at_first, random.Random(0))
            r.discovery.set(FleetDocument(services=document.services[:-1]))
            assert index.capacity > 10 * at_first
            assert sum(each.index.bytes for each in r.router.fleet.services.values()) <= 8 << 20
