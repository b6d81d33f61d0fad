"""The router benchmarks' own rules: warm-up, load, and the compared routers."""

from __future__ import annotations

import argparse
import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

BENCH = Path(__file__).parents[2] / "bench" / "router"


@pytest.fixture(autouse=True)
def bench_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


async def test_all_prefixes_are_warmed_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another they would all go to the engine that a router without knowledge deems the least loaded."""
    import shared_prefixes
    from open_loop import Answer
    from shared_prefix_load import Arrival

    bursts: list[list[Arrival]] = []

    class Client:
        def __init__(self, port: int, max_tokens: int) -> None: ...

        async def send(self, arrivals: list[Arrival]) -> list[Answer]:
            bursts.append(arrivals)
            return [Answer() for _ in arrivals]

    monkeypatch.setattr(shared_prefixes, "OpenLoop", Client)
    await shared_prefixes.rising_load(0, 4.0, "seed", argparse.Namespace(rates=(), seconds=0.0))
    assert [len(burst) for burst in bursts] == [shared_prefixes.GROUPS, shared_prefixes.GROUPS]
    assert {arrival.at_s for burst in bursts for arrival in burst} == {0.0}
    assert len({arrival.prompt[:1000] for arrival in bursts[0]}) == shared_prefixes.GROUPS


def test_conversations_are_reproducible_grow_and_share_popular_prompts() -> None:
    from conversation_load import TURNS, conversations

    load = conversations("seed", 8.0, 60.0)
    assert load == conversations("seed", 8.0, 60.0)
    assert load != conversations("another", 8.0, 60.0)
    assert 8.0 * 60.0 * 0.8 < len(load) < 8.0 * 60.0 * 1.2
    assert {len(each.turns) for each in load} == set(range(TURNS[0], TURNS[1] + 1))
    counts = sorted(sum(each.system == system for each in load) for system in {e.system for e in load})
    assert counts[-1] > 5 * counts[0], "Zipf"


async def test_a_turn_s_prompt_is_all_that_was_said_before_it() -> None:
    from conversation_load import conversations
    from conversations import converse
    from open_loop import Answer

    class Client:
        async def ask(self, prompt: str, due: float, max_tokens: int = 0) -> Answer:
            return Answer()

    (conversation, *_) = conversations("seed", 8.0, 60.0)
    asked = await converse(Client(), conversation, 0.0)  # type: ignore[arg-type]
    prompts = [each.prompt for each in asked]
    assert prompts[0].startswith(conversation.system)
    assert all(later.startswith(earlier) for earlier, later in pairwise(prompts))
    assert all(prompt.endswith(turn.text) for prompt, turn in zip(prompts, conversation.turns, strict=True))


def test_ours_is_compared_with_the_better_setting_of_each_figure() -> None:
    from contenders import OURS, SGLANG
    from figures import Figures, best_peer, markdown

    one, other = SGLANG
    row = {
        OURS: Figures(100, 0.8, 1.0, 50.0, 100.0, 200.0, 0),
        "round-robin": Figures(100, 0.9, 1.0, 1.0, 1.0, 1.0, 0),
        one: Figures(100, 0.7, 0.9, 100.0, 400.0, 800.0, 0),
        other: Figures(100, 0.6, 0.8, 200.0, 200.0, 400.0, 0),
    }
    assert best_peer(row) == Figures(100, 0.7, 0.9, 100.0, 200.0, 400.0, 0)
    assert "| 0.50x, 0.50x, 0.50x | |" in markdown({"40": row}, "req/s").splitlines()[-1]
    assert best_peer({OURS: row[OURS]}) is None


def _clocked_engine() -> Any:
    from simulated_engine_server import ClockedEngine

    from argosy_router.simulation import EngineModel

    return ClockedEngine("epoch", EngineModel(prefill_tokens_per_s=1e6, decode_step_s=1e-4))


async def _computed(engine: Any, prompt: str) -> int:
    """Cached tokens of a prompt that a clocked engine computes."""
    from prompts import as_trace

    from argosy_router.simulation import Job

    ended = asyncio.get_running_loop().create_future()
    engine.submit(
        Job(as_trace(prompt, 1), lambda job, now: None, lambda job, now: ended.set_result(job.cached_tokens))
    )
    cached: int = await ended
    return cached


async def test_a_clocked_engine_warms_up_with_what_another_one_tells() -> None:
    from simulated_engine_server import HotPrefixReport

    peer, cold, warm = _clocked_engine(), _clocked_engine(), _clocked_engine()
    prompt = "tell me more " * 400
    await _computed(peer, prompt)
    assert peer.hot_prefixes(10_000).prefixes == (), "found once is no hit"
    hit = await _computed(peer, prompt)
    report = msgspec.msgpack.decode(msgspec.msgpack.encode(peer.hot_prefixes(10_000)), type=HotPrefixReport)
    await warm.warm_up(report.prefixes)
    assert hit > 1000
    assert await _computed(warm, prompt) == hit
    assert await _computed(cold, prompt) == 0
    assert peer.hot_prefixes(100).prefixes == ()


def test_the_engines_that_leave_are_those_that_the_operator_would_mark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import scaling_fleet

    from argosy_protocol.fleet import decode_fleet
    from argosy_protocol.reports import LoadReport, ReplicaLoadReport, ServiceLoadReport

    values = {901: {1: 9.0, 2: 1.0, 3: 5.0, 4: 2.0}, 902: {1: 0.0, 2: 2.0, 3: 5.0, 4: 8.0}}

    def report(admin: int) -> LoadReport:
        replicas = tuple(
            ReplicaLoadReport(name=f"engine-{port}", routable=True, cache_value=value)
            for port, value in values[admin].items()
        )
        service = ServiceLoadReport(service="bench/tiny", replicas=replicas)
        return LoadReport(router=str(admin), services=(service,))

    monkeypatch.setattr(scaling_fleet, "load_report", report)
    fleet = scaling_fleet.Fleet(tmp_path / "fleet.json", (), (901, 902), dict.fromkeys((1, 2, 3, 4), False))
    asyncio.run(scaling_fleet.halve(fleet, 2, by_value=True, seed=""))
    (service,) = decode_fleet(fleet.file.read_bytes()).services
    leaving = [each.name for each in service.endpoints if each.draining]
    assert leaving == ["engine-1", "engine-2"], "9 and 3 of all routers together; the others have 10"


def test_half_of_the_conversations_are_left_out_while_the_load_is_half() -> None:
    from conversation_load import conversations
    from scaling_fleet import halved

    load = conversations("seed", 8.0, 60.0)
    left = halved(load, lambda at_s: at_s < 30.0)
    assert [each for each in left if each.at_s >= 30.0] == [each for each in load if each.at_s >= 30.0]
    early, all_early = (sum(each.at_s < 30.0 for each in some) for some in (left, load))
    assert abs(2 * early - all_early) <= 1
