"""Which of several API processes gets which message of the core."""

from __future__ import annotations

from argosy_engine.core.proc.output_router import STATS_INTERVAL_S, OutputRouter
from argosy_engine.messages import (
    ChunkEnd,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    ResidencyDelta,
    SchedulerStats,
    UtilityOutput,
)

DELTA = ResidencyDelta(stored=[ChunkEnd(7, 10)])


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def token(request_id: str, *, is_last: bool = False) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, [1], FinishReason.STOP if is_last else None)


def ids(routed: list[tuple[int, EngineCoreOutputs]]) -> dict[int, list[str]]:
    return {client: [output.request_id for output in message.outputs] for client, message in routed}


def test_a_single_process_gets_the_very_messages() -> None:
    router, message = OutputRouter(1), EngineCoreOutputs([token("a")], SchedulerStats(1), DELTA)
    router.add("a", 0)
    assert len(router) == 0
    ((client, routed),) = router.route(message)
    assert client == 0
    assert routed is message


def test_outputs_go_to_the_process_of_their_request_until_it_ends() -> None:
    router = OutputRouter(3)
    for request_id, client in (("a", 0), ("b", 1), ("c", 2), ("d", 1)):
        router.add(request_id, client)
    routed = router.route(EngineCoreOutputs([token("a"), token("b"), token("c", is_last=True), token("d")]))
    assert ids(routed) == {0: ["a"], 1: ["b", "d"], 2: ["c"]}
    assert len(router) == 3
    router.remove(["a", "b", "unknown"])
    router.route(EngineCoreOutputs([token("d", is_last=True)]))
    assert len(router) == 0


def test_tokens_of_an_aborted_request_go_to_nobody() -> None:
    """They were computed before the abort, and are routed after it."""
    router = OutputRouter(2)
    router.add("a", 1)
    router.remove(["a"])
    assert ids(router.route(EngineCoreOutputs([token("a")])))[0] == []


def test_outputs_of_unknown_requests_go_to_all() -> None:
    """The answer to a request that could not be read, whose sender is not known."""
    assert ids(OutputRouter(2).route(EngineCoreOutputs([token("x", is_last=True)]))) == {0: ["x"], 1: ["x"]}


def test_counters_and_changes_of_the_cache_go_to_the_first_process_only() -> None:
    clock = Clock()
    router = OutputRouter(2, clock=clock)
    router.add("a", 0)
    router.add("b", 1)
    stats = SchedulerStats(
        num_running=2,
        num_waiting=1,
        prefix_cache_queries=64,
        prefix_cache_hits=32,
        num_preemptions=1,
        prefill_tokens_per_s=9.0,
        iteration_tokens=5,
        num_stalled=3,
    )
    first, second = router.route(EngineCoreOutputs([token("a"), token("b"), token("b")], stats, DELTA))
    assert first[1].residency == DELTA
    assert first[1].stats is not None
    assert first[1].stats.prefix_cache_queries == 64
    assert first[1].stats.num_tokens_elsewhere == 2
    assert second[1].residency is None
    assert second[1].stats == SchedulerStats(num_running=2, num_waiting=1, prefill_tokens_per_s=9.0)


def test_processes_without_outputs_hear_of_the_core_at_intervals() -> None:
    clock = Clock()
    router = OutputRouter(2, clock=clock)
    heard = []
    for _ in range(4):
        heard.append([client for client, _ in router.route(EngineCoreOutputs(stats=SchedulerStats()))])
        clock.now += STATS_INTERVAL_S * 0.6
    assert heard == [[0, 1], [0], [0, 1], [0]]


def test_all_who_balance_cores_get_the_changes_of_the_caches() -> None:
    router = OutputRouter(2, balances=True, clock=Clock())
    for _ in range(2):
        assert [message.residency for _, message in router.route(EngineCoreOutputs(residency=DELTA))] == [
            DELTA,
            DELTA,
        ]


def test_a_result_goes_to_its_caller_and_a_reason_of_death_to_all() -> None:
    router = OutputRouter(3, clock=Clock())
    router.route(EngineCoreOutputs())
    result = UtilityOutput(5, None, True, client_index=2)
    assert [
        (client, message.utility) for client, message in router.route(EngineCoreOutputs(utility=result))
    ] == [
        (0, None),
        (2, result),
    ]
    assert [(client, message.dead) for client, message in router.route(EngineCoreOutputs(dead="why"))] == [
        (0, "why"),
        (1, "why"),
        (2, "why"),
    ]
