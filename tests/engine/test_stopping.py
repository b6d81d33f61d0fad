"""Stop conditions in the core: minimum lengths, repetitions, and requests that resume an earlier run."""

from __future__ import annotations

import sys
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from argosy_engine.core.kv_cache_manager import KVCacheManager
from argosy_engine.core.request import RepetitionDetector, Request
from argosy_engine.core.scheduler import Scheduler
from argosy_engine.errors import InvalidRequest
from argosy_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, ModelRunnerOutput
from argosy_engine.params import RepetitionDetectionParams, SamplingParams
from argosy_engine.sample.token_logprobs import TokenLogprobs

EOS = 0


def run(params: SamplingParams, model: list[int], resume: list[int] | None = None) -> list[EngineCoreOutput]:
    """A request on a model whose output tokens are given by their position."""
    scheduler = Scheduler(
        KVCacheManager(64, 4, True, 0.0),
        max_num_batched_tokens=32,
        max_num_seqs=4,
        max_model_len=64,
        eos_token_ids=frozenset({EOS}),
    )
    message = EngineCoreRequest("r", [5, 6, 7], params, 0.0, resume_token_ids=resume or [])
    scheduler.add(Request(message, 4, True))
    outputs: list[EngineCoreOutput] = []
    while scheduler.has_work:
        step = scheduler.schedule()
        result = ModelRunnerOutput([], [])
        for request_id in step.num_scheduled_tokens:
            token = model[scheduler.requests[request_id].num_output_tokens]
            result.request_ids.append(request_id)
            result.sampled_token_ids.append([token])
            if params.logprobs is not None:
                result.logprobs = {request_id: [TokenLogprobs([token], [-1.0], 1)]}
        outputs += scheduler.update_from_output(step, result)
    scheduler.check()
    assert [output.finish_reason is None for output in outputs] == [True] * (len(outputs) - 1) + [False]
    return outputs


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def test_nothing_but_length_ends_a_request_before_its_minimum() -> None:
    model = [3, EOS, 4, 3, EOS, 8]
    outputs = run(SamplingParams(max_tokens=6, min_tokens=4, stop_token_ids=(3,)), model)
    assert (tokens(outputs), outputs[-1].stop_reason) == ([3, EOS, 4, 3], 3)
    outputs = run(SamplingParams(max_tokens=3, min_tokens=3, stop_token_ids=(3,)), model)
    assert (tokens(outputs), outputs[-1].finish_reason) == ([3, EOS, 4], FinishReason.LENGTH)


def test_a_repeated_pattern_ends_the_request() -> None:
    params = SamplingParams(
        max_tokens=20, repetition_detection=RepetitionDetectionParams(max_pattern_size=3, min_count=3)
    )
    outputs = run(params, [9, 8, 9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2])
    assert tokens(outputs) == [9, 8, 9, 1, 2, 3, 1, 2, 3, 1, 2, 3]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (
        FinishReason.REPETITION,
        "repetition_detected",
    )
    assert str(outputs[-1].finish_reason) == "repetition"


@given(
    sequence=st.lists(st.integers(0, 2), min_size=1, max_size=24),
    smallest=st.integers(0, 4),
    extra=st.integers(0, 4),
    count=st.integers(2, 4),
    resumed=st.integers(0, 24),
)
def test_repetition_is_what_the_definition_says(
    sequence: list[int], smallest: int, extra: int, count: int, resumed: int
) -> None:
    """After every token, also where the first ones are of an earlier run."""
    params = RepetitionDetectionParams(max(smallest + extra, 1), smallest, count)
    detector = RepetitionDetector(params, sequence[:resumed])
    for end in range(resumed, len(sequence) + 1):
        seen = sequence[:end]
        expected = any(
            len(seen) >= size * count and seen[-size * count :] == seen[-size:] * count
            for size in range(max(smallest, 1), params.max_pattern_size + 1)
        )
        assert detector.is_met == expected
        if end < len(sequence):
            detector.append(sequence[end])


@pytest.mark.parametrize("sequence", [[7] * 3000, [1, 2] * 1500, list(range(3000)), [5] * 1500 + [6] * 1500])
@pytest.mark.parametrize("bounds", [(1024, 1, 1024), (1024, 1024, 1024), (1024, 512, 2), (4, 1, 2)])
def test_repetition_detection_takes_a_few_lines_of_code_per_token(
    sequence: list[int], bounds: tuple[int, int, int]
) -> None:
    """They run between two steps of all requests."""
    params = SamplingParams(max_tokens=4000, repetition_detection=RepetitionDetectionParams(*bounds))
    request = Request(EngineCoreRequest("r", [5, 6, 7], params, 0.0), 4, False)
    request.max_num_tokens = 4000
    num_lines = 0

    def trace(_frame: Any, event: str, _argument: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for token_id in sequence:
            request.append_output(token_id)
            request.check_stop(frozenset())
    finally:
        sys.settrace(before)
    assert num_lines < 60 * len(sequence)


@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("cut", range(1, 6))
def test_a_resumed_request_ends_where_the_undisturbed_one_does(cut: int, logprobs: int | None) -> None:
    for params, model in (
        (SamplingParams(max_tokens=6, logprobs=logprobs), [3] * 9),
        (SamplingParams(max_tokens=9, min_tokens=3, logprobs=logprobs), [3, EOS, 4, 4, 4, EOS, 7]),
        (SamplingParams(max_tokens=9, stop_token_ids=(4,), logprobs=logprobs), [1, 2, 3, 3, 3, 4, 4]),
    ):
        whole = run(params, model)
        rest = run(params, model, tokens(whole)[:cut])
        assert tokens(whole)[:cut] + tokens(rest) == tokens(whole)
        assert (rest[-1].finish_reason, rest[-1].stop_reason) == (
            whole[-1].finish_reason,
            whole[-1].stop_reason,
        )
        assert rest[0].prefill_stats is not None
        if logprobs is not None:
            assert all(len(output.logprobs or []) == len(output.new_token_ids) for output in rest)


def test_a_run_that_was_at_its_end_is_not_continued() -> None:
    for params, output, reason in (
        (SamplingParams(max_tokens=9), [3, EOS], FinishReason.STOP),
        (SamplingParams(max_tokens=2), [3, 4], FinishReason.LENGTH),
    ):
        (only,) = run(params, [9] * 20, output)
        assert (only.new_token_ids, only.finish_reason) == ([], reason)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logit_bias": {3: float("inf")}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(2000), 1.0)}, "logit_bias"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"bad_words": ("",)}, "bad_words"),
        ({"bad_words": ("x",) * 129}, "bad_words"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logprobs": -2}, "logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"stop": ("a", "")}, "stop"),
        ({"stop_token_ids": tuple(range(300))}, "stop_token_ids"),
        ({"repetition_detection": RepetitionDetectionParams(4, 5, 2)}, "repetition_detection"),
        ({"repetition_detection": RepetitionDetectionParams(4, 1, 1)}, "repetition_detection"),
        ({"max_token": 3}, "max_token"),
        ({"top_k": "3"}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"temperature": "0.5"}, "temperature"),
        ({"seed": "a"}, "seed"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop": [5]}, "stop"),
    ],
)
def test_parameters_have_bounds(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param
    if param == "max_token":
        assert "did you mean 'max_tokens'" in str(caught.value)


def test_one_string_alone_is_a_list_of_one() -> None:
    params = SamplingParams(stop="word", bad_words="there")
    assert (params.stop, params.bad_words) == (("word",), ("there",))
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_verified_parameters_are_not_verified_again() -> None:
    """The core decodes parameters by the thousand."""
    params = SamplingParams(stop=("x",), temperature=0.5)
    wrong = params.replace(temperature=-1.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=SamplingParams) == wrong
