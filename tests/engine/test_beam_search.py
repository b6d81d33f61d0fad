"""Beam search: the algorithm on a table of probabilities, and the engine against transformers."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from argosy_engine import LLM, BeamSearchParams
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.beam_search import MAX_BEAM_WIDTH, BeamSearch, BeamSearchBatch, BeamSearchSequence
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_engine.sample.token_logprobs import TokenLogprobs

EOS = 0
TABLE = {
    # A greedy walk takes 1 (0.6) and then has 0.3 at best; 2 leads to 0.9.
    (9,): {1: 0.6, 2: 0.4},
    (9, 1): {1: 0.3, 2: 0.3, EOS: 0.2},
    (9, 2): {3: 0.9, EOS: 0.1},
}


def from_table(beams: list[list[int]]) -> list[TokenLogprobs]:
    entries = []
    for beam in beams:
        probs = TABLE.get(tuple(beam), {EOS: 1.0})
        best = sorted(probs, key=lambda token: -probs[token])
        entries.append(TokenLogprobs([best[0], *best], [math.log(probs[t]) for t in (best[0], *best)], 1))
    return entries


def beam_search(
    prompts: list[list[int]],
    params: BeamSearchParams,
    next_logprobs: Callable[[list[list[int]]], list[TokenLogprobs]] = from_table,
) -> list[list[BeamSearchSequence]]:
    searches = [BeamSearch(prompt, params, {EOS}, num_logprobs=1) for prompt in prompts]
    batch = BeamSearchBatch([TokenizedPrompt(prompt, []) for prompt in prompts], searches)
    while beams := batch.beams:
        batch.advance(next_logprobs([beam.token_ids for beam in beams]))
    return [search.best() for search in searches]


def test_the_best_sequence_need_not_begin_with_the_best_token() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3, length_penalty=0.0)
    ((first, second),) = beam_search([[9]], params)
    assert first.tokens == [9, 2, 3, EOS]
    assert first.cum_logprob == pytest.approx(math.log(0.4 * 0.9))
    assert second.tokens == [9, 1, 1, EOS]
    assert {first.finish_reason, second.finish_reason} == {"stop"}
    assert [(entry.token_ids, entry.rank) for entry in first.logprobs] == [
        ([2, 1], 2), ([3, 3], 1), ([EOS, EOS], 1)
    ]  # fmt: skip
    assert sum(entry.logprobs[0] for entry in first.logprobs) == pytest.approx(first.cum_logprob)


def test_width_one_is_the_greedy_walk() -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=2, ignore_eos=True)
    ((only,),) = beam_search([[9]], params)
    assert (only.tokens, only.finish_reason) == ([9, 1, 1], "length")


def test_length_penalty_favours_longer_sequences() -> None:
    scores = {EOS: 0.5, 4: 0.5}

    def steady(beams: list[list[int]]) -> list[TokenLogprobs]:
        return [TokenLogprobs([EOS, *scores], [math.log(0.5)] * 3, 1) for _ in beams]

    short, long = (
        beam_search([[9]], BeamSearchParams(beam_width=1, max_tokens=3, length_penalty=p), steady)[0][0]
        for p in (0.0, 4.0)
    )
    assert len(short.tokens) < len(long.tokens)


def test_what_is_dropped_on_the_way_is_never_among_the_best() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        seen: dict[tuple[int, ...], TokenLogprobs] = {}

        def drawn(beams: list[list[int]], rng: random.Random = rng, seen: Any = seen) -> list[TokenLogprobs]:
            for beam in map(tuple, beams):
                weights = [rng.random() for _ in range(6)]
                order = sorted(range(6), key=lambda token, w=weights: -w[token])  # type: ignore[misc]
                logprobs = [math.log(weights[token] / sum(weights)) for token in order]
                seen.setdefault(beam, TokenLogprobs([order[0], *order], [logprobs[0], *logprobs], 1))
            return [seen[tuple(beam)] for beam in beams]

        params = BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=rng.uniform(-2, 3))
        (found,) = beam_search([[9]], params, drawn)
        beams, every = [((9,), 0.0)], list[tuple[tuple[int, ...], float]]()
        for _ in range(params.max_tokens):
            grown = [
                ((*beam, token), total + logprob)
                for beam, total in beams
                for token, logprob in zip(seen[beam].token_ids[1:7], seen[beam].logprobs[1:7], strict=True)
            ]
            grown.sort(key=lambda each: -each[1])
            every += [each for each in grown if each[0][-1] == EOS]
            beams = [each for each in grown if each[0][-1] != EOS][: params.beam_width]

        def score(each: tuple[tuple[int, ...], float], power: float = params.length_penalty) -> float:
            return float(each[1] / (len(each[0]) - (each[0][-1] == EOS)) ** power)

        best = sorted([*every, *beams], key=score, reverse=True)[: params.beam_width]
        assert [tuple(sequence.tokens) for sequence in found] == [tokens for tokens, _ in best]


def test_the_memory_of_a_search_does_not_grow_with_what_it_has_completed() -> None:
    """Each round here completes two sequences: of all together the tokens would grow with the square of the rounds."""

    def steady(beams: list[list[int]]) -> list[TokenLogprobs]:
        return [TokenLogprobs([4, 4, EOS], [math.log(0.6), math.log(0.6), math.log(0.4)], 1) for _ in beams]

    def peak(rounds: int) -> int:
        tracemalloc.start()
        beam_search([[9]], BeamSearchParams(beam_width=2, max_tokens=rounds), steady)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(10)
    assert peak(800) < 3 * peak(400)


def test_prompts_are_searched_apart() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    alone = beam_search([[9]], params)
    several = beam_search([[8], [9], [9, 2]], params)
    assert several[1] == alone[0]


@pytest.mark.parametrize(
    "fields",
    [{"beam_width": 0}, {"beam_width": MAX_BEAM_WIDTH + 1}, {"max_tokens": 0}, {"length_penalty": math.inf}],
)
def test_bounds(fields: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **fields})
    assert raised.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("mode", "max_logprobs", "says"),
    [("raw_logits", 20, "raw_logits"), ("raw_logprobs", 5, "--max-logprobs is 5")],
)
def test_an_engine_that_does_not_give_the_log_probabilities(mode: str, max_logprobs: int, says: str) -> None:
    config: Any = SimpleNamespace(logprobs_mode=mode, max_logprobs=max_logprobs)
    with pytest.raises(InvalidRequest, match=says):
        BeamSearchParams(beam_width=3, max_tokens=3).round_params(config)
    config.logprobs_mode, config.max_logprobs = "processed_logprobs", 6
    assert BeamSearchParams(beam_width=3, max_tokens=3).round_params(config, 2).logprobs == 6
    config.max_logprobs = -1
    assert BeamSearchParams(beam_width=3, max_tokens=3).round_params(config, 9).logprobs == 9


def test_equal_to_transformers() -> None:
    """Without an end token all sequences are equally long, and both rank by the sum alone."""
    prompts = ["Once upon a time", "The capital of"]
    llm = LLM("builtin://tiny", dtype="float32", threads=1, max_num_seqs=16, max_model_len=128)
    found = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True))
    token_ids = [llm.renderer.render_prompt(prompt).token_ids for prompt in prompts]
    too_long = BeamSearchParams(beam_width=2, max_tokens=500)
    with pytest.raises(InvalidRequest, match="context length"):
        llm.beam_search(prompts[0], too_long)
    with pytest.raises(InvalidRequest, match="--max-logprobs is 20"):
        llm.beam_search(prompts[0], BeamSearchParams(beam_width=11, max_tokens=2))
    llm.close()
    model = AutoModelForCausalLM.from_pretrained(resolve_model("builtin://tiny"), dtype=torch.float32)
    model.generation_config.eos_token_id = None
    for prompt, output in zip(token_ids, found, strict=True):
        reference = model.generate(
            torch.tensor([prompt]), num_beams=3, num_return_sequences=3, do_sample=False, max_new_tokens=10,
            early_stopping=False, return_dict_in_generate=True, output_scores=True, length_penalty=0.0,
        )  # fmt: skip
        assert [sequence.tokens for sequence in output.sequences] == reference.sequences.tolist()
        sums = [sequence.cum_logprob for sequence in output.sequences]
        assert sums == pytest.approx(reference.sequences_scores.tolist(), abs=1e-3)
        assert all(sequence.text for sequence in output.sequences)
