"""Custom logits processors: loading, arguments, and isolation of faulty ones."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from argosy_engine import LLM, LogitsProcessor, SamplingParams
from argosy_engine.errors import ConfigError, InvalidRequest, RequestFailed
from argosy_engine.frontend.input_processor import check_extra_args
from argosy_engine.sample.logits_processor import Rows, load_logits_processors, processor_path
from argosy_engine.sample.sampler import Sampler, SamplerOptions, make_sampler
from probe_processors import Faulty, NeverTwice

VOCAB, SLOTS = 11, 6
EXAMPLES = Path(__file__).parents[2] / "examples"


def sampler_with(processor: type[LogitsProcessor]) -> Sampler:
    return make_sampler(
        np.zeros((SLOTS, 32), np.int32),
        (1,),
        torch.device("cpu"),
        SamplerOptions(logits_processors=(processor,)),
    )


def step(sampler: Sampler, slots: list[int]) -> Any:
    logits = torch.zeros(len(slots), VOCAB)
    logits[:, 5] = 1.0
    return sampler.sample(logits, np.array(slots), np.full(len(slots), 4))


def greedy(**extra_args: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, extra_args=extra_args or None)


def test_a_processor_sees_the_rows_that_use_it_and_no_others() -> None:
    applied_to: list[list[int]] = []

    class Recording(Faulty):
        """Records the slots of each call of `apply`."""

        reads_tokens = True

        def apply(self, logits: torch.Tensor, rows: Rows) -> None:
            applied_to.append(rows.slots.tolist())
            super().apply(logits, rows)

    sampler = sampler_with(Recording)
    for slot, params in enumerate([greedy(), greedy(harmless=True), greedy(), greedy(harmless=True)]):
        sampler.add(slot, params, [7], 1)
    out = step(sampler, [0, 1, 2, 3])
    assert out.token_ids.tolist() == [5, 3, 5, 3]
    step(sampler, [2, 0])
    step(sampler, [3, 2])
    assert sampler.reads_tokens
    sampler.remove(1)
    sampler.remove(3)
    assert not sampler.reads_tokens, "no request uses the processor any more"
    step(sampler, [0, 2])
    assert applied_to == [[1, 3], [3]]


@pytest.mark.parametrize("where", ["apply", "update_state", "is_used_by"])
def test_a_fault_fails_the_request_that_causes_it(where: str, caplog: pytest.LogCaptureFixture) -> None:
    sampler = sampler_with(Faulty)
    for slot, params in enumerate([greedy(harmless=True), greedy(fail_in=where), greedy()]):
        sampler.add(slot, params, [7], 1)
    with caplog.at_level(logging.CRITICAL):
        for slots, row in (([0, 1, 2], 1), ([2, 1], 1)):
            out = step(sampler, slots)
            assert list(out.failed) == [row]
            assert "Faulty" in out.failed[row]
            assert [token for index, token in enumerate(out.token_ids.tolist()) if index != row] == [
                3 if slot == 0 else 5 for slot in slots if slot != 1
            ]
        sampler.remove(1)
        sampler.add(1, greedy(harmless=True), [7], 1)
        out = step(sampler, [0, 1, 2])
    assert (out.token_ids.tolist(), out.failed) == ([3, 3, 5], {})


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere_to_be_found:Thing", "No module named"),
        ("probe_processors:Missing", "no attribute 'Missing'"),
        ("probe_processors:NoProcessor", "not a subclass"),
        ("probe_processors", "MODULE:CLASS"),
        (":Faulty", "MODULE:CLASS"),
    ],
)
def test_an_unusable_processor_is_refused_with_its_reason(path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        load_logits_processors([path])
    assert path in str(raised.value)


def test_a_processor_that_cannot_start_ends_the_start() -> None:
    with pytest.raises(ConfigError, match=r"CannotStart.*no such list of words"):
        LLM("builtin://tiny", threads=1, max_num_seqs=2, logits_processors=["probe_processors:CannotStart"])


def test_a_class_within_a_function_has_no_path() -> None:
    class Local(NeverTwice):
        pass

    assert processor_path(NeverTwice) == "probe_processors:NeverTwice"
    with pytest.raises(ConfigError, match="top of a module"):
        processor_path(Local)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    sys.path.insert(0, str(EXAMPLES))
    from logits_processor import OnlyToken

    processors: list[str | type[LogitsProcessor]] = [OnlyToken, "probe_processors:NeverTwice"]
    engine = LLM("builtin://tiny", threads=1, max_num_seqs=8, max_model_len=256, logits_processors=processors)
    yield engine
    engine.close()
    sys.path.remove(str(EXAMPLES))


def test_the_example_says_one_token_and_leaves_its_neighbours_alone(llm: LLM) -> None:
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    plain = llm.generate("Once upon", SamplingParams(**fields))[0]
    llm.engine.add_request("a", "Once upon", SamplingParams(**fields, extra_args={"only_token": 42}))
    llm.engine.add_request("b", "Once upon", SamplingParams(**fields))
    results = {}
    while llm.engine.has_unfinished_requests():
        results |= {output.request_id: output.token_ids for output in llm.engine.step()}
    assert results == {"a": [42] * 6, "b": plain.token_ids}
    assert set(plain.token_ids) != {42}


def test_a_processor_can_read_the_tokens_so_far(llm: LLM) -> None:
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    plain, unique = (
        llm.generate("la la la la", SamplingParams(**fields, extra_args=extra))[0].token_ids
        for extra in (None, {"never_twice": True})
    )
    assert len(set(unique)) == len(unique) == 40
    assert len(set(plain)) < 40


def test_a_token_beyond_the_vocabulary_fails_its_request_only(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, extra_args={"only_token": 1 << 40})
    failed, fine = llm.generate(["x", "x"], [params, SamplingParams(max_tokens=2)])
    assert "OnlyToken failed on this request" in (failed.error or "")
    assert (failed.finish_reason, failed.text, fine.error, len(fine.token_ids)) == ("error", "", None, 2)
    assert llm.generate("x", SamplingParams(max_tokens=2, extra_args={"only_token": 9}))[0].token_ids == [
        9,
        9,
    ]
    assert llm.client.call_utility("check")


@pytest.mark.parametrize(
    ("extra_args", "says"),
    [
        ({"only_token": "forty-two"}, "only_token must be a token id"),
        ({f"key {number}": 1 for number in range(65)}, "takes 64"),
        ({"key": "x" * (1 << 16)}, "bytes in all"),
        ({"key": object()}, "JSON"),
        ({"key": 1 << 70}, "JSON"),
    ],
)
def test_bad_extra_arguments_are_refused(llm: LLM, extra_args: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        llm.generate("x", SamplingParams(extra_args=extra_args))


def test_extra_arguments_without_a_processor_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="uses only_token"):
        check_extra_args(greedy(only_token=1), ())
    with pytest.raises(InvalidRequest, match="must name a method"):
        check_extra_args(greedy(fail_in="nothing"), (Faulty,))
    for where in ("validate_params", "is_used_by"):
        with pytest.raises(RequestFailed, match="Faulty"):
            check_extra_args(greedy(fail_in=where), (Faulty,))
