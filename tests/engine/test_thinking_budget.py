"""thinking_token_budget: after that many tokens of reasoning its end is forced, whatever the request was before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from argosy_engine.params import SamplingParams, ThinkingMarks
from sampler_steps import VOCAB, Batch

START, END_1, END_2, WORD, OTHER = 10, 11, 12, 20, 21
MARKS = (START,), (END_1, END_2)


def params(budget: int, num_open_tokens: int = -1, **fields: Any) -> SamplingParams:
    marks = ThinkingMarks(*MARKS, num_open_tokens)
    return SamplingParams(temperature=0.0, thinking_token_budget=budget, thinking_marks=marks, **fields)


def logits_for(token: int) -> torch.Tensor:
    logits = torch.zeros(1, VOCAB)
    logits[0, token] = 5.0
    return logits


def written(batch: Batch, wanted: list[int]) -> list[int]:
    """Return what the request in slot 0 gets, one token for each that the model wants to write."""
    return [int(batch.step([0], logits_for(token)).token_ids[0]) for token in wanted]


CASES: list[tuple[str, SamplingParams, list[int], list[int], list[int]]] = [
    # name, parameters, prompt, what the model would write, what it writes
    ("open", params(2, 0), [5, START], [WORD] * 6, [WORD, WORD, END_1, END_2, WORD, WORD]),
    ("thoughts in the prompt", params(3, 2), [START, 5, 5], [WORD] * 4, [WORD, END_1, END_2, WORD]),
    ("all in the prompt", params(2, 5), [START, *[5] * 5], [WORD] * 3, [END_1, END_2, WORD]),
    ("none", params(0, 0), [START], [WORD] * 3, [END_1, END_2, WORD]),
    ("opened", params(1), [5], [START, *[WORD] * 4], [START, WORD, END_1, END_2, WORD]),
    ("none, opened", params(0), [5], [START, *[WORD] * 3], [START, END_1, END_2, WORD]),
    ("never opened", params(1), [5], [WORD] * 5, [WORD] * 5),
    (
        "ended before",
        params(3, 0),
        [START],
        [WORD, END_1, END_2, *[WORD] * 5],
        [WORD, END_1, END_2, *[WORD] * 5],
    ),
    (
        "opened again",
        params(2, 0),
        [START],
        [WORD, END_1, END_2, START, *[WORD] * 5],
        [WORD, END_1, END_2, START, WORD, WORD, END_1, END_2, WORD],
    ),
    (
        "another mark in the block",
        params(3, 0),
        [START],
        [WORD, START, WORD, WORD, WORD, WORD],
        [WORD, START, WORD, END_1, END_2, WORD],
    ),
    ("half of the end", params(2, 0), [START], [WORD, END_1, WORD, WORD], [WORD, END_1, END_2, WORD]),
    ("half too early", params(3, 0), [START], [END_1, WORD, WORD, WORD], [END_1, WORD, WORD, END_1]),
    (
        "not allowed otherwise",
        params(1, 0, allowed_token_ids=(WORD,), logit_bias={WORD: 50.0}),
        [START],
        [WORD] * 4,
        [WORD, END_1, END_2, WORD],
    ),
]


@pytest.mark.parametrize(("name", "given", "prompt", "wanted", "expected"), CASES)
def test_the_end_is_forced(
    name: str, given: SamplingParams, prompt: list[int], wanted: list[int], expected: list[int]
) -> None:
    batch = Batch()
    batch.add(0, given, prompt, [])
    assert written(batch, wanted) == expected, name


@pytest.mark.parametrize(("name", "given", "prompt", "wanted", "expected"), CASES)
def test_a_request_that_goes_on_elsewhere_gets_the_same(
    name: str, given: SamplingParams, prompt: list[int], wanted: list[int], expected: list[int]
) -> None:
    for cut in range(len(wanted)):
        batch = Batch()
        batch.add(0, given, prompt, expected[:cut])
        assert written(batch, wanted[cut:]) == expected[cut:], (name, cut)


def test_others_are_left_alone() -> None:
    batch = Batch()
    batch.add(0, params(1, 0), [START], [])
    batch.add(1, SamplingParams(temperature=0.0), [START], [])
    both = torch.cat([logits_for(WORD), logits_for(OTHER)])
    assert [batch.step([0, 1], both).token_ids.tolist() for _ in range(3)] == [
        [WORD, OTHER],
        [END_1, OTHER],
        [END_2, OTHER],
    ]
    batch.remove(0)
    batch.add(0, SamplingParams(temperature=0.0), [START], [])
    assert written(batch, [WORD] * 3) == [WORD] * 3


def test_a_step_waits_for_tokens_only_if_a_budget_may_be_used_up() -> None:
    batch = Batch()
    batch.add(0, params(1000, 0), [START], [])
    assert not batch.sampler.reads_tokens
    written(batch, [WORD] * 3)
    assert not batch.sampler.reads_tokens
    batch.add(1, params(10, 0), [START], [])
    assert batch.sampler.reads_tokens
    batch.remove(1)
    assert not batch.sampler.reads_tokens
