"""Chains of chunk hashes."""

from __future__ import annotations

import itertools
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from argosy_protocol.chunk_hash import (
    CHUNK_BYTES,
    COARSE_BYTES,
    Segment,
    SegmentKind,
    chain_seed,
    chunk_ends,
    chunk_hashes,
    chunk_offsets,
)

SEGMENTS = st.lists(st.tuples(st.sampled_from(list(SegmentKind)), st.binary(max_size=700)))
LONG_SEGMENTS = st.lists(st.integers(0, 8 * COARSE_BYTES), max_size=4).map(
    lambda sizes: [(SegmentKind.TEXT, bytes(size)) for size in sizes]
)


@given(SEGMENTS | LONG_SEGMENTS)
def test_one_hash_and_one_end_per_chunk(segments: list[Segment]) -> None:
    ends = chunk_ends(segments)
    offsets = chunk_offsets(len(data) for _, data in segments)
    assert len(chunk_hashes(segments, 1)) == len(ends) == len(offsets)
    before = 0
    for index, (_, data) in enumerate(segments):
        mine = [end for owner, end in ends if owner == index]
        assert mine[-1] == len(data)
        assert mine == sorted(mine)
        for start, end in itertools.pairwise([0, *mine[:-1]]):
            assert end - start == max(CHUNK_BYTES, 1 << max(0, start.bit_length() - 6))
        before += len(data)
    assert offsets[-1:] == ([before] if segments else [])


@pytest.mark.parametrize("size", [256, 257, COARSE_BYTES, COARSE_BYTES + 1, 100_000, 1_000_000])
def test_chunks_are_fine_at_the_start_and_few_in_total(size: int) -> None:
    segments = [(SegmentKind.TEXT, random.Random(0).randbytes(size))]
    hashes = chunk_hashes(segments, 1)
    assert len(hashes) <= 64 + 32 * max(0, (size - 1) // COARSE_BYTES).bit_length()
    for (_, end), chunk_hash in zip(chunk_ends(segments), hashes, strict=True):
        cut = [(SegmentKind.TEXT, segments[0][1][:end])]
        assert chunk_hashes(cut, 1)[-1] == chunk_hash, "a chunk names the prefix that ends with it"


@given(SEGMENTS, SEGMENTS, SEGMENTS)
def test_chains_agree_exactly_as_far_as_their_segments(
    shared: list[Segment], left: list[Segment], right: list[Segment]
) -> None:
    a, b = chunk_hashes(shared + left, 5), chunk_hashes(shared + right, 5)
    count = len(chunk_hashes(shared, 5))
    assert a[:count] == b[:count]
    if left and right and left[0] != right[0] and left[0][1][:CHUNK_BYTES] != right[0][1][:CHUNK_BYTES]:
        assert a[count] != b[count]


def test_models_adapters_and_salts_never_share_a_chain() -> None:
    seeds = [
        chain_seed("m"), chain_seed("m", cache_salt="s"), chain_seed("m", "s"), chain_seed("ms"),
        chain_seed("m", "", "s"), chain_seed("n"),
    ]  # fmt: skip
    assert len(set(seeds)) == len(seeds)
