"""The C modules equal their Python counterparts: hashing and the index's table, over random inputs."""

from __future__ import annotations

import importlib.util
import sysconfig
from array import array
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from setuptools import Distribution, Extension
from setuptools.errors import CompileError

from argosy_protocol import chunk_hash
from argosy_protocol.chunk_hash import Segment, SegmentKind
from argosy_router.native import substitutes
from compile_router import ROUTER, in_c

SHARDS = 4
SLOTS = 150
"""Bitmaps of three words."""


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModuleType]:
    """Builds the modules and imports them by their last name. Without a compiler there are none, and no tests."""
    folder = tmp_path_factory.mktemp("native")
    extensions = [Extension(path.stem, [str(ROUTER.parent / path)]) for path in in_c(ROUTER)]
    command = Distribution({"name": "native", "ext_modules": extensions}).get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(folder), str(folder / "objects")
    command.ensure_finalized()
    try:
        command.run()
    except CompileError as failure:
        pytest.skip(f"needs a C compiler and Python's headers: {failure}")

    def load(name: str) -> ModuleType:
        path = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


segments = st.lists(
    st.tuples(
        st.sampled_from(SegmentKind),
        st.one_of(
            st.binary(max_size=600),
            st.builds(lambda size: bytes(range(256)) * size, st.integers(0, 1200)),  # up to 300 KB
        ),
    ),
    max_size=6,
)


def test_hashes_and_tokens(native: Callable[[str], ModuleType]) -> None:
    hashing = native("_hashing")

    @settings(deadline=None)
    @given(segments, st.integers(0, 2**64 - 1), st.floats(0.25, 16))
    def agree(prompt: list[Segment], seed: int, bytes_per_token: float) -> None:
        hashes, same = (room.chunk_hashes(prompt, seed) for room in (hashing, chunk_hash))
        assert hashes.typecode == same.typecode
        assert hashes == same
        sizes = [len(data) for _, data in prompt]
        tokens, same = (room.chunk_tokens(sizes, bytes_per_token) for room in (hashing, substitutes))
        assert tokens.typecode == same.typecode
        assert tokens == same
        assert len(tokens) == len(hashes)

    agree()


def test_tokens_fit_their_items(native: Callable[[str], ModuleType]) -> None:
    for room in (native("_hashing"), substitutes):
        assert list(room.chunk_tokens([0, 3], 1e-10)) == [0, 2**32 - 1]


@pytest.mark.parametrize("prompt", [[b"text"], [(0, "text")], [(0,)], [(None, b"")], 7])
def test_what_is_no_prompt_is_a_type_error(native: Callable[[str], ModuleType], prompt: Any) -> None:
    with pytest.raises(TypeError):
        native("_hashing").chunk_hashes(prompt, 0)


def test_ranking(native: Callable[[str], ModuleType]) -> None:
    hashing = native("_hashing")

    @given(st.lists(st.binary(max_size=40), min_size=1), st.integers(0, 2**64 - 1))
    def agree(names: list[bytes], key: int) -> None:
        assert hashing.first_ranked(names, key) == substitutes.first_ranked(names, key)

    agree()
    with pytest.raises(ValueError, match="no name"):
        hashing.first_ranked([], 1)
    with pytest.raises(TypeError):
        hashing.first_ranked(["name"], 1)


def test_sizes_are_not_negative(native: Callable[[str], ModuleType]) -> None:
    with pytest.raises(ValueError, match="negative"):
        native("_hashing").chunk_tokens([256, -1], 4.0)


chunk = st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 2))
slot = st.integers(0, SLOTS - 1)


def hash_array(hashes: list[int]) -> array[int]:
    return array("Q", hashes)


def view_in_between(hashes: list[int]) -> memoryview:
    """Not aligned."""
    return memoryview(b"-" + hash_array(hashes).tobytes())[1:].cast("Q")


HOLDERS: tuple[Callable[[list[int]], Sequence[int]], ...] = (list, tuple, hash_array, view_in_between)
chain = st.builds(
    lambda hold, hashes: hold(hashes),
    st.sampled_from(HOLDERS),
    st.lists(chunk, min_size=1, max_size=12, unique=True),
)


class Tables(RuleBasedStateMachine):
    """The same done to both tables."""

    make_native: Callable[[int], Any]

    @initialize()
    def make(self) -> None:
        self.tables = [substitutes.ChunkTable(SHARDS), self.make_native(SHARDS)]
        self.live: set[int] = set()
        for each in self.tables:
            each.resize(10_000)

    def set_live(self, number: int) -> None:
        self.live.add(number)
        for each in self.tables:
            each.set_live(number, True)

    @rule(number=slot, hashes=chain, tokens=st.integers(0, 2**32 - 1), typecode=st.sampled_from("IQ"))
    def add(self, number: int, hashes: Sequence[int], tokens: int, typecode: str) -> None:
        self.set_live(number)
        for each in self.tables:
            each.add(number, hashes, array(typecode, [tokens] * len(hashes)))

    @rule(number=slot, hashes=chain, hold=st.sampled_from([list, lambda tokens: array("I", tokens)]))
    def insert_speculatively(
        self, number: int, hashes: Sequence[int], hold: Callable[[Sequence[int]], Sequence[int]]
    ) -> None:
        self.set_live(number)
        added = [
            each.insert_speculatively(number, hashes, lambda: hold(range(1, 1 + len(hashes))))
            for each in self.tables
        ]
        assert added[0] == added[1]

    @rule(number=slot, hashes=chain)
    def remove(self, number: int, hashes: Sequence[int]) -> None:
        for each in self.tables:
            each.remove(number, hashes)

    @rule(numbers=st.sets(slot, min_size=3, max_size=12), hashes=chain)
    def share(self, numbers: set[int], hashes: Sequence[int]) -> None:
        for number in numbers:
            self.add(number, hashes, 7, "I")

    @rule(numbers=st.sets(slot, min_size=30, max_size=150), hashes=chain)
    def drop(self, numbers: set[int], hashes: Sequence[int]) -> None:
        for number in numbers:
            self.remove(number, hashes)

    @rule(numbers=st.sets(slot, min_size=1, max_size=40))
    def leave(self, numbers: set[int]) -> None:
        self.live -= numbers
        for each in self.tables:
            for number in numbers:
                each.set_live(number, False)
            for shard in range(SHARDS):
                while not each.scrub(shard, numbers):
                    pass

    @rule(slots=st.integers(0, SLOTS), shards=st.integers(0, SHARDS))
    def narrow(self, slots: int, shards: int) -> None:
        self.leave({number for number in self.live if number >= slots})
        for each in self.tables:
            each.narrow(slots)
            for shard in range(shards):
                each.narrow_shard(shard)

    @rule(hashes=chain, number=slot)
    def look(self, hashes: Sequence[int], number: int) -> None:
        first, second = (each.match(hashes) for each in self.tables)
        assert first == second
        assert list(first[0].values()) == list(second[0].values())
        for found in (*hashes, hashes[0] ^ 1):
            assert self.tables[0].holds(number, found) == self.tables[1].holds(number, found)

    @invariant()
    def as_many(self) -> None:
        assert len(self.tables[0]) == len(self.tables[1])


def test_tables(native: Callable[[str], ModuleType]) -> None:
    class Both(Tables):
        make_native = staticmethod(native("_table").ChunkTable)

    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Both, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )


def test_the_least_recently_used_chunk_is_evicted_first(native: Callable[[str], ModuleType]) -> None:
    made = native("_table").ChunkTable(1)
    made.resize(100)
    made.set_live(0, True)
    made.add(0, range(100), [1] * 100)
    made.insert_speculatively(0, range(10), lambda: ())  # used again
    made.add(0, [100], [1])
    gone = {chunk for chunk in range(101) if not made.holds(0, chunk)}
    assert gone
    assert gone == set(range(10, 10 + len(gone)))
    assert len(made) == 101 - len(gone) <= 100


def test_memory_is_what_it_says(native: Callable[[str], ModuleType]) -> None:
    made = native("_table").ChunkTable(SHARDS)
    made.set_live(SLOTS, True)
    for limit in (2_000, 100_000):
        capacity = made.shard_capacity(limit, 0)
        made.resize(capacity)
        made.add(SLOTS, range(3 * SHARDS * capacity), range(3 * SHARDS * capacity))
        for number in range(SHARDS):
            made.trim(number)
        assert not made.is_overfull
        assert 0.9 * limit < made.bytes / SHARDS <= limit
    made.resize(capacity // 10)
    assert made.is_overfull
    for number in range(SHARDS):
        made.trim(number)
    assert not made.is_overfull
    assert 0 < len(made) <= SHARDS * (capacity // 10)
    assert made.bytes / SHARDS < limit / 5


HIGHEST = [0, 63, 64, 65_532, 65_533, 65_534, 65_535, 70_000]


@pytest.mark.parametrize("first", HIGHEST)
def test_slots_of_any_number(native: Callable[[str], ModuleType], first: int) -> None:
    """In a list they have 16 bits."""
    both = [substitutes.ChunkTable(1), native("_table").ChunkTable(1)]
    for made in both:
        made.resize(100)
    order = [first, *(number for number in HIGHEST if number != first)]
    for number in order:
        for made in both:
            made.set_live(number, True)
            made.add(number, [1], [10])
        assert both[0].match([1]) == both[1].match([1])
    for number in order:
        for made in both:
            made.remove(number, [1])
        assert both[0].match([1]) == both[1].match([1])
        assert len(both[0]) == len(both[1])


def filled(
    made: Any, limit: int, held_by: Callable[[int], Sequence[int]], chunks: int
) -> dict[int, set[int]]:
    """Fill a table of 1000 slots that may take `limit` bytes for a shard, as a router does; return all that it was
    told."""
    told: dict[int, set[int]] = {}
    made.set_live(999, True)
    for start in range(0, chunks, 500):
        made.resize(made.shard_capacity(limit, 0), limit)
        for number in range(SHARDS):
            made.trim(number)
        assert made.bytes / SHARDS <= limit
        for each in range(start, start + 500):
            told[each] = set(held_by(each))
            for number in held_by(each):
                made.set_live(number, True)
                made.add(number, [each], [each + 1])
                assert made.bytes / SHARDS <= limit
    return told


def test_a_chunk_of_few_holders_takes_32_bytes(native: Callable[[str], ModuleType]) -> None:
    made = native("_table").ChunkTable(SHARDS)
    capacity = made.shard_capacity(64_000, 0)
    filled(made, 64_000, lambda chunk: range(chunk % 900, chunk % 900 + 1 + chunk % 3), 2 * SHARDS * capacity)
    assert made.bytes / len(made) < 36, "a shard that was just full lacks a sixteenth of its entries"
    assert 64_000 / made.shard_capacity(64_000, 0) < 34


@pytest.mark.parametrize("holders", [5, 200])
@pytest.mark.parametrize("many_in", [1, 3, 20])
@pytest.mark.parametrize("limit", [8_000, 60_000])
def test_chunks_of_many_holders_keep_to_the_memory(
    native: Callable[[str], ModuleType], limit: int, many_in: int, holders: int
) -> None:
    """What is evicted for them is forgotten; nothing is told that was not announced."""
    made = native("_table").ChunkTable(SHARDS)
    told = filled(
        made,
        limit,
        lambda chunk: range(0, 5 * holders, 5)[:holders] if chunk % many_in == 0 else [chunk % 1000],
        4_000,
    )
    known = 0
    for chunk, slots in told.items():
        runs, length = made.match([chunk])
        if length:
            assert set(runs) == slots
            known += 1
    assert known == len(made) > 0
    assert made.match([3_999])[1], "the newest stays"


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda made: made.add(70, [1], [1]), IndexError),
        (lambda made: made.add(0, [1, 2], [1]), ValueError),
        (lambda made: made.add(0, ["a"], [1]), TypeError),
        (lambda made: made.add(0, 5, [1]), TypeError),
        (lambda made: made.insert_speculatively(0, [1, 2], lambda: [1]), IndexError),
        (lambda made: made.insert_speculatively(0, [1], lambda: 1 / 0), ZeroDivisionError),
        (lambda made: made.match([None]), TypeError),
        (lambda made: made.resize(0), ValueError),
        (lambda made: type(made)(3), ValueError),
    ],
)
def test_misuse_is_an_exception(
    native: Callable[[str], ModuleType], call: Callable[[Any], object], error: type[Exception]
) -> None:
    made = native("_table").ChunkTable(SHARDS)
    made.resize(10)
    made.set_live(0, True)
    with pytest.raises(error):
        call(made)
    made.add(0, [3], [30])
    assert made.match([3]) == ({0: 30}, 1)


@pytest.mark.parametrize(
    "hashes",
    [
        array("B", [3]),
        array("H", [3]),
        array("q", [3]),
        array("d", [3.0]),
        b"12345678",
        memoryview(array("Q", [3, 4, 3]))[::2],
        memoryview(array("Q", [3, 4]))[::-1],
        memoryview(bytes(32)).cast("Q", (2, 2)),
        memoryview(bytes(8)).cast("Q", ()),
    ],
)
def test_arrays_of_something_else_are_type_errors(native: Callable[[str], ModuleType], hashes: Any) -> None:
    made = native("_table").ChunkTable(SHARDS)
    made.resize(10)
    made.set_live(0, True)
    for call in (
        lambda: made.match(hashes),
        lambda: made.remove(0, hashes),
        lambda: made.add(0, hashes, [1]),
        lambda: made.add(0, [1], hashes),
        lambda: made.insert_speculatively(0, hashes, lambda: [1]),
        lambda: made.insert_speculatively(0, [1], lambda: hashes),
        lambda: native("_hashing").chunk_tokens(hashes, 4.0),
    ):
        with pytest.raises(TypeError, match="contiguous, of unsigned integers of 4 or 8 bytes"):
            call()
    assert len(made) == 0


@pytest.mark.parametrize("nothing", [(), [], array("Q"), memoryview(b"").cast("Q"), range(0)])
def test_no_chunks(native: Callable[[str], ModuleType], nothing: Any) -> None:
    for made in (native("_table").ChunkTable(SHARDS), substitutes.ChunkTable(SHARDS)):
        made.resize(10)
        made.set_live(0, True)
        made.add(0, nothing, nothing)
        made.remove(0, nothing)
        assert made.insert_speculatively(0, nothing, lambda: nothing) == []
        assert made.match(nothing) == ({}, 0)


def test_arrays_cannot_change_while_they_are_read(native: Callable[[str], ModuleType]) -> None:
    made = native("_table").ChunkTable(SHARDS)
    made.resize(10)
    made.set_live(0, True)
    hashes, listed = array("Q", [1, 2]), [3, 4]
    with pytest.raises(BufferError):
        made.insert_speculatively(0, hashes, lambda: hashes.pop())
    hashes.pop()  # released
    assert made.insert_speculatively(0, listed, lambda: [listed.pop(), listed.pop()]) == [3, 4]
