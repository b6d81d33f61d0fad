"""States of recurrent layers: where checkpoints are made, who finds them, and when their blocks are taken back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy_engine.attention.kv_cache_spec import FullAttentionSpec, KVCacheSpec, RecurrentStateSpec
from argosy_engine.core import kv_cache_manager
from argosy_engine.core.kv_cache_manager import KVCacheManager
from argosy_engine.core.request import Request
from argosy_engine.messages import ChunkEnd, EngineCoreRequest
from argosy_engine.params import SamplingParams

BLOCK = 4
FULL, STATE = FullAttentionSpec(100), RecurrentStateSpec(100)


@pytest.fixture(autouse=True, scope="module")
def short_checkpoints() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache_manager, "MIN_CHECKPOINT_TOKENS", 8)
        yield


def manager(
    num_states: int = 20, interval: int = 64, *, specs: tuple[KVCacheSpec, ...] = (FULL, STATE)
) -> KVCacheManager:
    return KVCacheManager(
        200,
        BLOCK,
        True,
        specs=specs,
        max_num_batched_tokens=64,
        num_states=num_states,
        state_interval=interval,
    )


class Run:
    """A request that is computed in steps."""

    def __init__(
        self, kv: KVCacheManager, name: str, prompt: list[int], ends: list[ChunkEnd] | None = None
    ) -> None:
        self.kv = kv
        self.request = Request(
            EngineCoreRequest(name, prompt, SamplingParams(), 0.0, chunk_ends=ends or []), BLOCK, True
        )
        self.steps: list[int] = []
        """Tokens after each step."""
        self.num_cached = 0

    def step(self, most: int = 64) -> bool:
        """Schedule the next step; return whether the prompt is computed."""
        request, kv = self.request, self.kv
        start = request.num_computed_tokens
        if not request.block_ids:
            cached = kv.find_cached_prefix(request)
            start = request.num_computed_tokens = self.num_cached = len(cached[0]) * BLOCK
            end = kv.chunk_end(request, start, min(start + most, request.num_tokens))
            assert kv.admit(request, cached, end - start, apply_watermark=False)
        else:
            end = kv.chunk_end(request, start, min(start + most, request.num_tokens))
            assert kv.grow(request, end - start) is not None
        request.num_computed_tokens = end
        self.steps.append(end)
        return end == request.num_tokens

    def compute(self, most: int = 64) -> Run:
        while not self.step(most):
            pass
        return self

    def decode(self, count: int) -> Run:
        for _ in range(count):
            self.request.append_output(7)
            assert self.kv.grow(self.request, 1) is not None
            self.request.num_computed_tokens += 1
        return self

    def end(self) -> Run:
        self.kv.free(self.request, self.request.num_computed_tokens)
        return self


def test_a_prompt_has_a_checkpoint_at_its_last_full_block() -> None:
    kv = manager()
    first = Run(kv, "a", list(range(30))).compute().end()
    assert first.steps == [28, 30]
    assert Run(kv, "b", list(range(30))).compute().num_cached == 28
    assert Run(kv, "c", [*range(28), 99, 98]).compute().num_cached == 28
    assert Run(kv, "d", [*range(26), 99, 98, 97, 96]).compute().num_cached == 0


def test_a_short_prompt_is_computed_in_one_step() -> None:
    assert Run(manager(), "a", list(range(9))).compute().steps == [8, 9]
    assert Run(manager(), "a", list(range(8))).compute().steps == [
        8
    ]  # at most the tokens before the last are shared
    assert Run(manager(), "a", list(range(7))).compute().steps == [7]


def test_prompts_that_part_get_a_checkpoint_there() -> None:
    kv = manager()
    Run(kv, "a", list(range(40))).compute().end()
    second = Run(kv, "b", [*range(20), *range(100, 120)]).compute().end()
    assert (second.num_cached, second.steps) == (0, [20, 36, 40])
    third = Run(kv, "c", [*range(20), *range(200, 220)]).compute().end()
    assert (third.num_cached, third.steps) == (20, [36, 40])


def test_long_prompts_and_outputs_have_checkpoints_at_intervals() -> None:
    kv = manager(interval=16)
    first = Run(kv, "a", list(range(75))).compute(20).end()
    assert first.steps == [16, 32, 48, 64, 72, 75]
    assert Run(kv, "b", [*range(50), *range(200, 210)]).compute().num_cached == 48
    answer = Run(kv, "c", list(range(300, 310))).compute().decode(30).end()
    follow_up = Run(kv, "d", [*answer.request.all_token_ids, 1, 2, 3]).compute()
    assert follow_up.num_cached == 32


def test_a_twin_in_the_same_step_does_not_read_what_is_being_written() -> None:
    kv = manager()
    first = Run(kv, "a", list(range(30)))
    first.step()
    twin = Run(kv, "b", list(range(30)))
    twin.step()
    assert (first.steps, twin.num_cached) == ([28], 0)
    first.step()
    assert Run(kv, "c", list(range(30))).compute().num_cached == 28


def test_a_state_is_never_written_where_another_reads_it() -> None:
    kv = manager()
    Run(kv, "a", list(range(30))).compute().end()
    runs = [Run(kv, name, list(range(30))) for name in "bc"]
    for run in runs:
        run.step()
    shared = {run.request.block_ids[-1][6] for run in runs}
    own = {run.request.block_ids[-1][7] for run in runs}
    assert len(shared) == 1
    assert len(own) == 2
    assert not shared & own
    for run in runs:
        run.decode(9).end()
    kv.check([])
    assert kv.usage == 0.0


def test_without_free_blocks_states_move_on_and_nothing_is_kept() -> None:
    kv = manager(num_states=2)
    run = Run(kv, "a", list(range(30))).compute().decode(40)
    assert [block_id for block_id in run.request.block_ids[-1] if block_id] == [1]
    run.end()
    assert Run(kv, "b", list(range(30))).compute().num_cached == 0


def test_a_request_waits_for_a_block_for_its_state() -> None:
    kv = manager(num_states=2)
    run = Run(kv, "a", list(range(30)))
    run.step()
    waiting = Request(EngineCoreRequest("b", list(range(30)), SamplingParams(), 0.0), BLOCK, True)
    assert not kv.admit(waiting, kv.find_cached_prefix(waiting), 8, apply_watermark=False)
    run.compute().end()
    assert kv.admit(waiting, kv.find_cached_prefix(waiting), 8, apply_watermark=False)


def test_the_beginning_of_a_prompt_is_evicted_last() -> None:
    kv = manager(num_states=6, interval=16)
    Run(kv, "a", list(range(75))).compute(20).end()  # checkpoints after 16, 32, 48, 64 and 72
    Run(kv, "b", list(range(500, 507))).compute().end()
    assert Run(kv, "c", [*range(40), 1, 2, 3]).compute().num_cached == 32
    assert Run(kv, "d", list(range(75))).compute(20).num_cached < 72


def test_clearing_the_prefix_cache_clears_states() -> None:
    kv = manager(specs=(STATE,))
    run = Run(kv, "a", list(range(30))).compute()
    assert not kv.reset_prefix_cache()
    run.end()
    assert kv.reset_prefix_cache()
    assert Run(kv, "b", list(range(30))).compute().num_cached == 0


@pytest.mark.parametrize("specs", [(FULL,), (FULL, STATE)])
def test_a_chain_of_two_requests_blocks_loses_its_end_first(specs: tuple[KVCacheSpec, ...]) -> None:
    """Both compute the common beginning in one step, and the blocks of the first, which ends first, are those found."""
    kv = KVCacheManager(
        24, BLOCK, True, specs=specs, max_num_batched_tokens=64, num_states=20, state_interval=64
    )
    prompts = [[*range(16), *range(start, start + 16), 1] for start in (100, 200)]
    first, second = (
        Run(kv, str(number), prompt, [end(prompt, length) for length in range(BLOCK, 33, BLOCK)])
        for number, prompt in enumerate(prompts)
    )
    if specs == (FULL,):  # attention alone shares within a step: a twin that scores its prompt does not
        second.request.sampling_params = SamplingParams(prompt_logprobs=0)
    first.step()
    second.step()
    first.compute().end()
    second.compute().end()
    told: set[int] = set()
    for number in range(20):
        Run(kv, f"other {number}", [300 + number] * 5).compute().end()
        if (delta := kv.announcer.take_delta()) is not None:
            told = (told - set(delta.removed)) | {chunk.hash for chunk in delta.stored}
        asks = Request(EngineCoreRequest("asks", [*prompts[1], 99], SamplingParams(), 0.0), BLOCK, True)
        hit = len(kv.find_cached_prefix(asks)[0]) * BLOCK
        heard = max(
            (length for length in range(BLOCK, 33, BLOCK) if end(prompts[1], length).hash in told), default=0
        )
        assert heard <= hit


def end(prompt: list[int], num_tokens: int) -> ChunkEnd:
    return ChunkEnd(hash((num_tokens, *prompt[:num_tokens])) & ((1 << 63) - 1), num_tokens)


@given(
    prompts=st.lists(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=9), min_size=2, max_size=12),
    num_blocks=st.integers(24, 60),
    num_states=st.integers(3, 12),
    interval=st.sampled_from([8, 16, 64]),
    most=st.sampled_from([8, 64]),
    is_alone=st.booleans(),
)
def test_a_router_hears_of_what_a_longer_prompt_can_continue(
    prompts: list[list[int]], num_blocks: int, num_states: int, interval: int, most: int, is_alone: bool
) -> None:
    """Prompts that share beginnings, in caches that are too small for all: where a chunk is announced, a prompt that
    goes on as the one did for which it was announced finds it cached."""
    kv = KVCacheManager(
        num_blocks,
        BLOCK,
        True,
        specs=(STATE,) if is_alone else (FULL, STATE),
        max_num_batched_tokens=64,
        num_states=num_states,
        state_interval=interval,
    )
    told: set[int] = set()
    lived: dict[int, list[list[int]]] = {}
    for number, words in enumerate(prompts):
        prompt = [token for word in words for token in range(word * 50, word * 50 + BLOCK)] + [number % 3]
        ends = [end(prompt, length) for length in range(BLOCK, len(prompt), BLOCK)]
        for each in ends:
            lived.setdefault(each.hash, []).append(prompt)
        Run(kv, str(number), prompt, ends).compute(most).end()
        if (delta := kv.announcer.take_delta()) is not None:
            told = set() if delta.cleared else told - set(delta.removed)
            told |= {chunk.hash for chunk in delta.stored}
        for chunk_hash in told:
            hits = []
            for seen in lived[chunk_hash]:
                asks = Request(EngineCoreRequest("asks", [*seen, 99], SamplingParams(), 0.0), BLOCK, True)
                length = next(
                    e for e in range(BLOCK, len(seen) + 1, BLOCK) if end(seen, e).hash == chunk_hash
                )
                hits.append(len(kv.find_cached_prefix(asks)[0]) * BLOCK >= length)
            assert any(hits), chunk_hash
