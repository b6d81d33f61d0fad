"""The sampling pipeline against plain references, with rows that join, leave and mix."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from transformers import RepetitionPenaltyLogitsProcessor

from argosy_engine.params import SamplingParams
from argosy_engine.sample.builtin_processors import Penalties
from argosy_engine.sample.logits_processor import Added, BatchUpdate, Rows
from argosy_engine.sample.sampler import GrammarMask, SamplerOptions
from argosy_engine.sample.token_logprobs import LogprobsMode
from sampler_steps import CPU, EVENT, SLOTS, VOCAB, Batch, check_chosen_tokens, cut, reference


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(st.lists(EVENT, max_size=3), min_size=1, max_size=6),
    leave=st.sets(st.tuples(st.integers(0, 5), st.integers(0, SLOTS - 1))),
    skip=st.sets(st.tuples(st.integers(0, 5), st.integers(0, SLOTS - 1))),
    seed=st.integers(0, 1 << 20),
)
def test_rows_that_come_go_and_mix_give_what_they_give_alone(
    arrivals: list[list[Any]], leave: set[tuple[int, int]], skip: set[tuple[int, int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    together = Batch()
    alone: dict[int, tuple[Batch, SamplingParams, int]] = {}
    for turn, events in enumerate(arrivals):
        for slot in [slot for slot in alone if (turn, slot) in leave]:
            together.remove(slot)
            del alone[slot]
        for slot, params, prompt, output in events:
            if slot in alone:
                together.remove(slot)
            together.add(slot, params, prompt, output)
            single = Batch()
            single.add(0, params, prompt, output)
            alone[slot] = single, params, len(prompt)
        slots = [slot for slot in alone if (turn, slot) not in skip]
        if not slots:
            continue
        logits = torch.randn(len(slots), VOCAB, generator=generator) * 3
        histories = [list(together.tokens[slot]) for slot in slots]
        result = together.step(slots, logits)
        for row, slot in enumerate(slots):
            single, params, num_prompt = alone[slot]
            own = single.step([0], logits[row : row + 1])
            token = own.token_ids.item()
            assert result.token_ids[row].item() == token
            logprobs = result.logprobs.by_row().get(row) if result.logprobs is not None else None
            assert logprobs == (own.logprobs.by_row()[0] if own.logprobs is not None else None)
            assert (logprobs is not None) == (params.logprobs is not None)
            expected = reference(
                logits[row].numpy(), params, histories[row][:num_prompt], histories[row][num_prompt:]
            )
            best = expected.max()
            if best == -np.inf:
                continue  # nothing is possible: any token will do
            if params.is_greedy:
                assert expected[token] >= best - 1e-4
            else:
                assert expected[token] > -np.inf
                if params.min_p:
                    floor = best + params.temperature * math.log(params.min_p)
                    assert expected[token] >= floor - 1e-4
            if params.top_k:
                kept = np.sort(expected)[::-1][: params.top_k]
                assert expected[token] >= kept[-1] - 1e-4


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    torch.manual_seed(1)
    prompt = torch.randint(0, VOCAB, (SLOTS, 11))
    logits = torch.randn(SLOTS, VOCAB)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(prompt, logits.clone())
    batch = Batch()
    added: list[Added] = []
    for slot in range(SLOTS):
        params = SamplingParams(temperature=0.0, repetition_penalty=penalty)
        batch.add(slot, params, prompt[slot].tolist(), [])
        added.append(Added(slot, params, prompt[slot].tolist(), len(prompt[slot])))
    penalties = Penalties(SLOTS, CPU)
    penalties.update_state(BatchUpdate(added=added))
    changed = logits.clone()
    penalties.apply(changed, Rows(np.arange(SLOTS), np.full(SLOTS, prompt.shape[1]), SLOTS))
    torch.testing.assert_close(changed, expected)
    batch.step(list(range(SLOTS)), logits)
    for slot in range(SLOTS):
        assert batch.tokens[slot][-1] == expected[slot].argmax().item()


def test_logprobs_are_those_of_the_model_not_of_what_the_request_made_of_them() -> None:
    torch.manual_seed(2)
    logits = torch.randn(3, VOCAB)
    batch = Batch()
    batch.add(0, SamplingParams(temperature=0.3, logprobs=4, logit_bias={5: 50.0}), [3], [])
    batch.add(1, SamplingParams(temperature=0.0), [3], [])
    batch.add(2, SamplingParams(temperature=0.0, logprobs=0), [3], [])
    out = batch.step([0, 1, 2], logits)
    expected = logits.log_softmax(-1)
    logprobs = out.logprobs.by_row()
    assert logprobs.keys() == {0, 2}
    first, last = logprobs[0], logprobs[2]
    assert first.token_ids[0] == out.token_ids[0].item() == 5
    assert first.token_ids[1:] == expected[0].topk(4).indices.tolist()
    torch.testing.assert_close(torch.tensor(first.logprobs), expected[0, first.token_ids])
    assert first.rank == int((expected[0] > expected[0, 5]).sum()) + 1
    assert (last.token_ids, last.rank) == ([logits[2].argmax().item()], 1)


def test_logprobs_of_chosen_tokens() -> None:
    check_chosen_tokens(SamplerOptions(vocab_size=VOCAB))


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "processed_logprobs"])
def test_logprobs_modes(mode: LogprobsMode) -> None:
    """What is reported is what the documentation of the mode says, and what was drawn does not depend on it."""
    torch.manual_seed(4)
    logits = torch.randn(4, VOCAB) * 2
    requests = [
        SamplingParams(temperature=0.0, logprobs=VOCAB, logit_bias={5: 1.5}),
        SamplingParams(temperature=0.5, logprobs=VOCAB, seed=1, presence_penalty=1.0),
        SamplingParams(temperature=2.0, logprobs=VOCAB, seed=2, top_k=9, top_p=0.8, min_p=0.05),
        SamplingParams(temperature=1.0, logprobs=3, seed=3, top_p=0.5),
    ]
    usual, batch = Batch(), Batch(SamplerOptions(logprobs_mode=mode))
    for slot, params in enumerate(requests):
        for one in (usual, batch):
            one.add(slot, params, [3], [7, 9])
    drawn = usual.step([0, 1, 2, 3], logits).token_ids
    out = batch.step([0, 1, 2, 3], logits)
    assert torch.equal(out.token_ids, drawn)
    for row, params in enumerate(requests):
        reported = torch.full((VOCAB,), float("nan"))
        entry = out.logprobs.by_row()[row]
        reported[entry.token_ids] = torch.tensor(entry.logprobs)
        expected = logits[row].double()
        if mode != "raw_logits":
            expected = torch.from_numpy(reference(logits[row].numpy(), params, [3], [7, 9]))
            expected = cut(expected / (params.temperature or 1.0), params)
        if mode == "processed_logprobs":
            expected = expected.log_softmax(-1)
        seen = ~reported.isnan()
        assert int(seen.sum()) >= min(params.logprobs, VOCAB)
        torch.testing.assert_close(reported[seen], expected[seen].float(), rtol=1e-4, atol=1e-4)
        assert entry.rank == int((expected > expected[entry.token_ids[0]]).sum()) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grammar_mask_leaves_only_what_it_allows(dtype: torch.dtype) -> None:
    allowed = [0, 31, 32, 63, 64, 66]
    bitmask = np.zeros((1, 3), np.int32)
    for token in allowed:
        bitmask.view(np.uint32)[0, token // 32] |= np.uint32(1 << (token % 32))
    batch = Batch()
    for slot in range(SLOTS):
        batch.add(slot, SamplingParams(temperature=1.0, seed=slot), [3], [])
    torch.manual_seed(3)
    seen = set()
    for _ in range(40):
        grammar = GrammarMask(np.array([2]), bitmask)
        seen.add(
            batch.step(list(range(SLOTS)), torch.randn(SLOTS, VOCAB).to(dtype), grammar).token_ids[2].item()
        )
    assert seen <= set(allowed)
    assert len(seen) > 3
    assert {token for slot in (1, 3) for token in batch.tokens[slot]} - set(allowed)


def test_a_request_without_possible_tokens_affects_no_other() -> None:
    batch = Batch()
    batch.add(0, SamplingParams(temperature=1.0, allowed_token_ids=(1,), min_tokens=3, logprobs=2), [3], [])
    batch.add(1, SamplingParams(temperature=0.0), [3], [])
    logits = torch.randn(2, VOCAB)
    out = batch.step([0, 1], logits)
    assert 0 <= out.token_ids[0].item() < VOCAB
    assert out.token_ids[1].item() == logits[1].argmax().item()
