"""Replicas that come and go during a replay."""

from __future__ import annotations

import pytest

from argosy_router.observability.lines import TraceRequest
from argosy_router.simulation import EngineModel, ScalingSimulation, SimulationOutcome, Victims

MODEL = EngineModel(prefill_tokens_per_s=10_000.0, max_num_seqs=8)
BLOCK = 1000


def ask(at_s: float, *blocks: int, output: int = 1) -> TraceRequest:
    """A prompt of blocks of 1000 tokens, and a few tokens more."""
    ends = tuple(BLOCK * (number + 1) for number in range(len(blocks)))
    return TraceRequest(at_s, ends[-1] + 10, output, blocks, ends)


def cached_after(outcome: SimulationOutcome, start_s: float) -> list[int]:
    return [
        cached
        for arrival, (cached, _) in zip(outcome.arrival_s, outcome.cached, strict=True)
        if arrival >= start_s
    ]


@pytest.mark.parametrize(("tokens", "found"), [(2000, 2000), (1500, 1000), (0, 0)])
def test_a_new_replica_computes_the_hottest_prefixes(tokens: int, found: int) -> None:
    system_prompt = [ask(float(at), 1, 90 + at) for at in range(3)]
    conversation = [ask(3.0 + at, 1, 2) for at in range(4)]
    simulation = ScalingSimulation([*system_prompt, *conversation, ask(30.0, 1, 2)], "cost", 1, MODEL)
    simulation.add_replicas(10.0, 1, MODEL, warm_up_s=5.0 if tokens else 0.0, warm_up_tokens=tokens)
    simulation.remove_replicas(20.0, 1, "oldest")
    outcome = simulation.run()
    assert simulation.routable == ["new000"]
    assert cached_after(outcome, 30.0) == [found]


def test_a_replica_whose_warm_up_takes_too_long_is_used_all_the_same() -> None:
    requests = [ask(float(at), 1) for at in range(3)]
    simulation = ScalingSimulation([*requests, ask(10.3, 5)], "cost", 1, MODEL)
    simulation.add_replicas(10.0, 1, MODEL, warm_up_s=0.05, warm_up_tokens=2000)
    simulation.remove_replicas(10.2, 1, "oldest")
    assert len(simulation.run().ttft_s) == 4
    assert simulation.routable == ["new000"]


@pytest.mark.parametrize(("victims", "left"), [("newest", ["r000"]), ("least-valuable", ["r001"])])
def test_which_replica_leaves(victims: Victims, left: list[str]) -> None:
    requests = [ask(0.0, 1, output=2000), *(ask(1.0 + at, 2, 3) for at in range(5)), ask(20.0, 2, 3)]
    simulation = ScalingSimulation(requests, "cost", 2, MODEL)
    simulation.remove_replicas(10.0, 1, victims)
    outcome = simulation.run()
    assert len(outcome.ttft_s) == len(requests), "the one that leaves finishes its requests"
    assert simulation.routable == left
    assert cached_after(outcome, 20.0) == [2000 if left == ["r001"] else 0]
