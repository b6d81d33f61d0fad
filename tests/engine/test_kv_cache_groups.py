"""Models that mix kinds of attention layers: grouping, freed blocks and prefix hits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy_engine.attention.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)
from argosy_engine.core.kv_cache.block_pool import BlockPool
from argosy_engine.core.kv_cache.kv_cache_groups import make_groups
from argosy_engine.core.kv_cache.kv_cache_manager import KVCacheManager
from argosy_engine.core.request import Request
from argosy_engine.messages.core_messages import ChunkEnd, EngineCoreRequest
from argosy_engine.messages.kv_cache_interface import (
    block_bytes,
    group_layers,
    peak_blocks,
    state_bytes,
)
from argosy_engine.params.sampling_params import SamplingParams

BLOCK = 4
FULL, SLIDING = FullAttentionSpec(100), SlidingWindowSpec(100, 6)


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


@given(cached=st.sets(st.integers(0, 11)), length=st.integers(0, 12), window=st.integers(1, 30))
def test_a_sliding_hit_is_the_longest_prefix_whose_window_is_cached(
    cached: set[int], length: int, window: int
) -> None:
    pool = BlockPool(40)
    (_, group) = make_groups([FULL, SlidingWindowSpec(100, window)], BLOCK, 64)
    hashes = [bytes([index]) for index in range(length)]
    for index in cached:
        (block_id,) = pool.allocate(1)
        pool.register(block_id, group.key(bytes([index])))
    hit = group.find_hit(pool, hashes)

    def can_go_on_from(num_blocks: int) -> bool:
        positions = range(max(num_blocks * BLOCK - window + 1, 0), num_blocks * BLOCK)
        return all(position // BLOCK in cached for position in positions)

    assert len(hit) == max(count for count in range(length + 1) if can_go_on_from(count))
    read = {position // BLOCK for position in range(max(len(hit) * BLOCK - window + 1, 0), len(hit) * BLOCK)}
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
    window=st.integers(2, 20),
    num_blocks=st.integers(24, 40),
    is_alone=st.booleans(),
    step=st.sampled_from([8, 32]),
)
def test_what_is_announced_can_be_served(
    prompts: list[list[int]], window: int, num_blocks: int, is_alone: bool, step: int
) -> None:
    """Prompts that share beginnings, in a cache that is too small for all, computed in steps."""
    sliding = SlidingWindowSpec(100, window)
    specs: list[KVCacheSpec] = [sliding] if is_alone else [FULL, sliding, sliding]
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


@given(length=st.integers(1, 200), window=st.integers(1, 64), chunk=st.integers(1, 64))
def test_no_request_holds_more_than_its_peak(length: int, window: int, chunk: int) -> None:
    spec = SlidingWindowSpec(100, window)
    kv = KVCacheManager(200, BLOCK, False, specs=[spec], max_num_batched_tokens=chunk)
    live = request("a", [1] * length)
    first = min(chunk, length)
    assert kv.admit(live, [[]], first, apply_watermark=False)
    live.num_computed_tokens, most = first, 0
    while live.num_computed_tokens < length:
        count = min(chunk, length - live.num_computed_tokens)
        assert kv.grow(live, count) is not None
        live.num_computed_tokens += count
        most = max(most, 199 - kv.pool.num_free_blocks)
    assert most <= peak_blocks(spec, length, BLOCK, chunk)
