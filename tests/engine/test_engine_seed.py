"""--seed: repeatable sampling for requests without a seed."""

from __future__ import annotations

import pytest

from argosy_engine.frontend.llm import LLM
from argosy_engine.params import SamplingParams

HOT = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True, n=2)
PROMPTS = ["Once upon a time", "The sea", "Once upon a time"]


def answers(seed: int | None, params: SamplingParams = HOT) -> list[list[int]]:
    """What an engine says first, started with this seed."""
    chosen = {} if seed is None else {"seed": seed}
    llm = LLM("builtin://tiny", device="cpu", threads=1, num_gpu_blocks_override=64, **chosen)
    results = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(output.token_ids) for result in results for output in result.outputs]


def test_engines_with_one_seed_say_the_same_and_nothing_twice() -> None:
    first = answers(7)
    assert answers(7) == first
    assert answers(8) != first
    assert len({tuple(tokens) for tokens in first}) == len(first)


def test_engines_without_a_seed_do_not() -> None:
    assert answers(None) != answers(None)


@pytest.mark.parametrize("seed", [None, 7])
def test_a_request_s_own_seed_wins(seed: int | None) -> None:
    assert answers(seed, HOT.replace(seed=3)) == answers(8, HOT.replace(seed=3))
