"""Models that mix kinds of attention layers: grouping, freed blocks and prefix hits."""

from __future__ import annotations

from itertools import cycle

from hypothesis import example, given
from hypothesis import strategies as st

from argosy_engine.attention.kv_cache_spec import (
    ChunkedAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
    block_bytes,
    group_layers,
    state_bytes,
)
from argosy_engine.core.kv_cache_manager import KVCacheManager
from argosy_engine.core.request import Request
from argosy_engine.messages import ChunkEnd, EngineCoreRequest
from argosy_engine.params import SamplingParams

BLOCK = 4
FULL, SLIDING = FullAttentionSpec(100), SlidingWindowSpec(100, 6)


def windows_and_chunks(least: int, most: int) -> st.SearchStrategy[SlidingWindowSpec | ChunkedAttentionSpec]:
    return st.builds(
        lambda kind, size: kind(100, size),
        st.sampled_from([SlidingWindowSpec, ChunkedAttentionSpec]),
        st.integers(least, most),
    )


def sees(spec: KVCacheSpec, position: int, key: int) -> bool:
    """Whether a token attends to another, by the kind's own words."""
    if isinstance(spec, SlidingWindowSpec):
        return position - spec.window < key <= position
    if isinstance(spec, ChunkedAttentionSpec):
        return key <= position and key // spec.chunk_size == position // spec.chunk_size
    return key <= position


def request(name: str, prompt: list[int]) -> Request:
    return Request(EngineCoreRequest(name, prompt, SamplingParams(), 0.0), BLOCK, True)


def admit(kv: KVCacheManager, name: str, prompt: list[int]) -> Request:
    live = request(name, prompt)
    cached = kv.find_cached_prefix(live)
    live.num_computed_tokens = len(cached[0]) * BLOCK
    assert kv.admit(live, cached, live.num_tokens - live.num_computed_tokens, apply_watermark=False)
    return live


def test_one_kind_of_layer_is_one_group() -> None:
    (group,) = group_layers([FULL] * 5)
    assert group.layers == (0, 1, 2, 3, 4)
    assert block_bytes([group]) == 500


def test_kinds_are_split_into_groups_of_the_rarest_kinds_size() -> None:
    """Five sliding layers to one full one, as in Gemma 3."""
    groups = group_layers([SLIDING if index % 6 != 5 else FULL for index in range(14)])
    assert [group.layers for group in groups] == [
        (5, 11), (0, 1), (2, 3), (4, 6), (7, 8), (9, 10), (12, 13),
    ]  # fmt: skip
    assert groups[0].spec == FULL
    assert block_bytes(groups) == 200


def test_layers_of_smaller_pages_form_larger_groups() -> None:
    """Two layers of 100 bytes per block take the place of one of 200."""
    wide = SlidingWindowSpec(200, 6)
    groups = group_layers([FULL, FULL, wide, FULL, FULL, wide])
    assert [group.layers for group in groups] == [(0, 1, 3, 4), (2, 5)]
    assert block_bytes(groups) == 400


def test_states_are_one_group_and_do_not_enlarge_blocks() -> None:
    groups = group_layers([RecurrentStateSpec(1000), FULL, FULL, RecurrentStateSpec(800)])
    assert [group.layers for group in groups] == [(1, 2), (0, 3)]
    assert (block_bytes(groups), state_bytes(groups)) == (200, 2000)
    alone = group_layers([RecurrentStateSpec(1000)])
    assert (block_bytes(alone), state_bytes(alone)) == (0, 1000)


@given(cached=st.sets(st.integers(0, 11)), length=st.integers(0, 12), spec=windows_and_chunks(1, 30))
def test_a_hit_is_the_longest_prefix_of_which_all_is_cached_that_a_token_after_it_reads(
    cached: set[int], length: int, spec: KVCacheSpec
) -> None:
    kv = KVCacheManager(40, BLOCK, True, specs=[FULL, spec], max_num_batched_tokens=64)
    pool, group = kv.pool, kv.groups[1]
    hashes = [bytes([index]) for index in range(length)]
    for index in cached:
        (block_id,) = pool.allocate(1)
        pool.register(block_id, group.key(bytes([index])))
    hit = group.find_hit(hashes)

    def read_from(num_blocks: int) -> set[int]:
        """Blocks that a token after so many reads, and the last of them."""
        end = num_blocks * BLOCK
        if not num_blocks:
            return set()
        read = (key for key in range(end) if sees(spec, end, key) or sees(spec, end + 1, key))
        return {num_blocks - 1, *(key // BLOCK for key in read)}

    assert len(hit) == max(count for count in range(length + 1) if read_from(count) <= cached)
    read = read_from(len(hit))
    for index, block_id in enumerate(hit):
        if index in read:
            assert pool.lookup([group.key(bytes([index]))]) == [block_id]
        else:
            assert block_id == 0


def test_blocks_behind_the_window_are_given_back_and_still_found() -> None:
    kv = KVCacheManager(40, BLOCK, True, specs=[FULL, SLIDING], max_num_batched_tokens=32)
    live = admit(kv, "a", list(range(24)))
    live.num_computed_tokens = 24
    assert kv.pool.num_free_blocks == 39 - 12
    live.append_output(7)
    assert [len(added) for added in kv.grow(live, 1) or ()] == [1, 1]
    # Token 24 reads from token 19 on: block 4 is the first one needed.
    assert live.block_ids[1][:5] == [0, 0, 0, 0, live.block_ids[1][4]]
    assert kv.pool.num_free_blocks == 39 - 7 - 3
    kv.check([live])
    twin = admit(kv, "b", list(range(24)))
    assert twin.num_computed_tokens == 20
    kv.check([live, twin])


def test_blocks_of_earlier_chunks_are_given_back_and_a_hit_at_the_end_of_one_needs_the_last() -> None:
    kv = KVCacheManager(
        40, BLOCK, True, specs=[FULL, ChunkedAttentionSpec(100, 10)], max_num_batched_tokens=32
    )
    live = admit(kv, "a", list(range(20)))
    live.num_computed_tokens = 20
    live.append_output(7)
    assert [len(added) for added in kv.grow(live, 1) or ()] == [1, 1]
    assert [bool(block_id) for block_id in live.block_ids[1]] == [False] * 5 + [True]
    kv.check([live])
    kv.free(live, 20)
    group = kv.groups[1]
    chunked = kv.pool.lookup([group.key(each) for each in live.block_hashes])
    kv.pool.unregister(chunked[:4])

    def hit(count: int) -> list[list[int]]:
        return kv.find_cached_prefix(request("b", list(range(count))))

    # Token 20 begins a chunk; token 16 reads from token 10 on, which nothing holds any more.
    assert hit(21)[1] == [0, 0, 0, 0, chunked[4]]
    assert hit(20) == [[], []]
    kv.pool.unregister(chunked)
    assert hit(21) == [[], []]


def test_a_hit_is_as_long_as_the_shortest_of_all_groups() -> None:
    kv = KVCacheManager(40, BLOCK, True, specs=[FULL, SLIDING], max_num_batched_tokens=32)
    live = admit(kv, "a", list(range(24)))
    kv.free(live, 24)
    pool, group = kv.pool, kv.groups[1]
    live = request("b", list(range(24)))
    pool.unregister(pool.lookup([group.key(live.block_hashes[3])]))
    # The window before token 20 needs blocks 3 and 4, that before 16 blocks 2 and 3, that before 12 blocks 1 and 2.
    hits = kv.find_cached_prefix(live)
    assert [len(hit) for hit in hits] == [3, 3]
    assert hits[1][0] == 0
    assert 0 not in hits[1][1:]


def end(prompt: list[int], num_tokens: int) -> ChunkEnd:
    """A chunk that ends with so many tokens of the prompt."""
    return ChunkEnd(hash((num_tokens, *prompt[:num_tokens])) & ((1 << 63) - 1), num_tokens)


def announced(told: set[int], kv: KVCacheManager) -> set[int]:
    """What a router knows that has heard all."""
    delta = kv.announcer.take_delta()
    if delta is not None:
        told = set() if delta.cleared else told - set(delta.removed)
        told |= {chunk.hash for chunk in delta.stored}
    return told


@given(
    prompts=st.lists(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=7), min_size=2, max_size=12),
    spec=windows_and_chunks(2, 20),
    num_blocks=st.integers(24, 40),
    is_alone=st.booleans(),
    step=st.sampled_from([8, 32]),
)
def test_what_is_announced_can_be_served(
    prompts: list[list[int]], spec: KVCacheSpec, num_blocks: int, is_alone: bool, step: int
) -> None:
    """Prompts that share beginnings, in a cache that is too small for all, computed in steps."""
    specs: list[KVCacheSpec] = [spec] if is_alone else [FULL, spec, spec]
    kv = KVCacheManager(num_blocks, BLOCK, True, specs=specs, max_num_batched_tokens=step)
    told: set[int] = set()
    lived: dict[int, tuple[list[int], int]] = {}
    for number, words in enumerate(prompts):
        prompt = [token for word in words for token in range(word * 50, word * 50 + BLOCK)] + [number % 3]
        ends = [end(prompt, length) for length in range(BLOCK, len(prompt), BLOCK)]
        own = {each.hash: (prompt, each.token_end) for each in ends}
        lived |= own
        live = Request(
            EngineCoreRequest(str(number), prompt, SamplingParams(), 0.0, chunk_ends=ends), BLOCK, True
        )
        cached = kv.find_cached_prefix(live)
        live.num_computed_tokens = len(cached[0]) * BLOCK
        new = min(step, live.num_tokens - live.num_computed_tokens)
        if not kv.admit(live, cached, new, apply_watermark=False):
            continue
        live.num_computed_tokens += new
        while live.num_computed_tokens < live.num_tokens:
            new = min(step, live.num_tokens - live.num_computed_tokens)
            assert kv.grow(live, new) is not None
            live.num_computed_tokens += new
        kv.free(live, live.num_tokens)
        told = announced(told, kv)
        for chunk_hash, (seen, length) in lived.items():
            hit = kv.find_cached_prefix(request("asks", [*seen[:length], 99]))
            is_served = len(hit[0]) * BLOCK == length
            assert chunk_hash not in told or is_served, (seen, length)
            if chunk_hash in own:  # others may be served again by what this request has computed
                assert chunk_hash in told or not is_served, (seen, length)


@given(
    length=st.integers(1, 200),
    spec=windows_and_chunks(1, 64),
    budget=st.integers(1, 64),
    steps=st.lists(st.integers(1, 64), min_size=1, max_size=4),
)
@example(length=60, spec=ChunkedAttentionSpec(100, 11), budget=8, steps=[8, 8, 5, 8, 4])
def test_a_request_holds_no_more_than_its_peak_and_what_it_may_still_take_is_reserved(
    length: int, spec: KVCacheSpec, budget: int, steps: list[int]
) -> None:
    kv = KVCacheManager(200, BLOCK, False, specs=[spec], max_num_batched_tokens=budget)
    live, counts = request("a", [1] * length), cycle(steps)
    peak = spec.peak_blocks(length, BLOCK, budget)
    while live.num_computed_tokens < length:
        count = min(next(counts), budget, length - live.num_computed_tokens)
        if live.block_ids:
            assert kv.grow(live, count) is not None
        else:
            assert kv.admit(live, [[]], count, apply_watermark=False)
        live.num_computed_tokens += count
        (block_ids,) = live.block_ids
        held = len(block_ids) - block_ids.count(0)
        assert held == 199 - kv.pool.num_free_blocks <= peak
        assert kv.pool.num_reserved_blocks == min(-(-length // BLOCK) - len(block_ids), peak - held)
