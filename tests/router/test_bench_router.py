"""The router benchmarks' own rules: warm-up, load, and the compared routers."""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

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
