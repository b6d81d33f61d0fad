"""Which data-parallel rank gets a request, and what routers are told of the ranks' prefix caches."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import given

from argosy_engine.core.proc.rank_balancer import REQUEST_TOKENS, RankBalancer, RankPrefixes
from argosy_engine.messages import (
    ChunkEnd,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    PrefillStats,
    ResidencyDelta,
)
from argosy_engine.params import SamplingParams

FIRST_TOKEN = PrefillStats(0, 0.0, 0.0)


def request(
    name: str, size: int = 10, chunks: Sequence[int] = (), rank: int | None = None
) -> EngineCoreRequest:
    """A request whose chunks end every ten tokens."""
    ends = [ChunkEnd(chunk, 10 * (index + 1)) for index, chunk in enumerate(chunks)]
    made = EngineCoreRequest(name, [1] * size, SamplingParams(), 0.0, chunk_ends=ends)
    made.data_parallel_rank = rank
    return made


def holding(balancer: RankBalancer, rank: int, chunks: Sequence[int]) -> None:
    """Tell the balancer that a rank holds these chunks, ten tokens each."""
    stored = [ChunkEnd(chunk, 10 * (index + 1)) for index, chunk in enumerate(chunks)]
    balancer.update(rank, EngineCoreOutputs(residency=ResidencyDelta(stored=stored)))


def test_equal_ranks_take_turns() -> None:
    balancer = RankBalancer([8, 8, 8])
    assert [balancer.add(request(str(number))) for number in range(6)] == [0, 1, 2, 0, 1, 2]
    assert balancer.num_requests == (2, 2, 2)


def test_idle_ranks_take_turns_too_so_that_all_caches_fill() -> None:
    balancer = RankBalancer([8, 8])
    ranks = []
    for number in range(4):
        ranks.append(balancer.add(request(str(number))))
        balancer.update(ranks[-1], ended(str(number)))
    assert ranks == [0, 1, 0, 1]


def ended(name: str) -> EngineCoreOutputs:
    return EngineCoreOutputs([EngineCoreOutput(name, [1], FinishReason.STOP, prefill_stats=FIRST_TOKEN)])


def test_a_long_prompt_weighs_until_it_is_computed() -> None:
    balancer = RankBalancer([64, 64])
    assert balancer.add(request("long", 20 * REQUEST_TOKENS)) == 0
    assert {balancer.add(request(f"short {number}")) for number in range(5)} == {1}
    balancer.update(0, EngineCoreOutputs([EngineCoreOutput("long", [1], prefill_stats=FIRST_TOKEN)]))
    assert {balancer.add(request(f"later {number}")) for number in range(3)} == {0}


def test_requests_that_end_or_are_aborted_weigh_nothing() -> None:
    balancer = RankBalancer([8, 8])
    for number in range(4):
        balancer.add(request(str(number), 100))
    assert balancer.remove(["0", "3", "unknown"]) == {0: ["0"], 1: ["3"]}
    assert balancer.remove(["0", "3"]) == {}
    balancer.update(0, ended("2"))
    assert balancer.num_requests == (0, 1)
    assert balancer.add(request("next", 100)) == 0


def test_a_request_goes_where_its_prefix_is_cached() -> None:
    balancer = RankBalancer([8, 8])
    holding(balancer, 1, range(20))
    assert [balancer.add(request(str(number), 220, range(22))) for number in range(2)] == [1, 1]
    assert balancer.add(request("another", 220, range(100, 122))) == 0


def test_a_short_prefix_does_not_outweigh_a_running_request() -> None:
    balancer = RankBalancer([8, 8])
    holding(balancer, 0, range(6))
    assert balancer.add(request("a", 60, range(6))) == 0
    assert balancer.add(request("b", 60, range(6))) == 1


def test_a_prefix_does_not_queue_its_requests_where_the_batch_is_full() -> None:
    balancer = RankBalancer([4, 4])
    holding(balancer, 0, range(1000))
    ranks = [balancer.add(request(str(number), 10_000, range(1000))) for number in range(8)]
    assert ranks[:4] == [0] * 4
    assert 1 in ranks[4:]


def test_a_request_may_choose_its_rank() -> None:
    balancer = RankBalancer([8, 8])
    assert [balancer.add(request(str(number), rank=1)) for number in range(3)] == [1, 1, 1]
    chosen = request("free")
    assert balancer.add(chosen) == chosen.data_parallel_rank == 0


def test_the_prompts_of_a_call_count_for_the_turns_of_a_core_by_its_share() -> None:
    balancer = RankBalancer([8, 8])
    spread, pinned = request("a"), request("b", rank=0)
    spread.batch_offset = pinned.batch_offset = 1000
    balancer.add(spread)
    balancer.add(pinned)
    assert (spread.batch_offset, pinned.batch_offset) == (500, 1000)


Step = tuple[int, bool, list[int], list[int]]
CHUNKS = st.lists(st.integers(0, 8), max_size=5, unique=True)


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), CHUNKS, CHUNKS), max_size=30))
def test_merged_deltas_tell_what_any_rank_holds(steps: list[Step]) -> None:
    prefixes = RankPrefixes(3)
    ranks: list[set[int]] = [set(), set(), set()]
    heard: set[int] = set()
    for rank, cleared, removed, stored in steps:
        if cleared:
            ranks[rank].clear()
        ranks[rank] = (ranks[rank] - set(removed)) | set(stored)
        delta = ResidencyDelta(cleared, removed, [ChunkEnd(chunk, 16) for chunk in stored])
        merged = prefixes.apply(rank, delta)
        if merged is not None:
            heard = (set() if merged.cleared else heard) - set(merged.removed)
            announced = {end.hash for end in merged.stored}
            assert not heard & announced, "nothing is announced twice"
            heard |= announced
        assert heard == set().union(*ranks)
        assert len(prefixes) == len(heard)
        prompt = [ChunkEnd(chunk, chunk + 1) for chunk in range(9)]
        for number, held in enumerate(ranks):
            length = next((chunk for chunk in range(9) if chunk not in held), 9)
            assert prefixes.hits(prompt).get(number, 0) == length
