"""Async scheduling gives the same tokens as synchronous scheduling, with every sampling parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from argosy_engine import EngineArgs, LLMEngine, SamplingParams, StructuredOutputsParams
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.frontend.output_processor import RequestOutput

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **fields})


REQUESTS = [
    ("Hello", params()),
    ("Hello there, how are you today?", params(ignore_eos=True, max_tokens=40)),
    ("Tell me about the sea", params(temperature=1.0, seed=3, top_p=0.9, logprobs=2)),
    ("Tell me about the sea", params(temperature=0.8, seed=4, n=3)),
    ("What is 2 plus 3?", params(repetition_penalty=1.3, frequency_penalty=0.5)),
    ("A person, as JSON:", params(structured_outputs=StructuredOutputsParams(json=SCHEMA), max_tokens=60)),
    ("Yes or no?", params(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))),
    ("One, two, three,", params(min_tokens=12, stop=["e"], include_stop_str_in_output=True)),
    ("The sky is", params(max_tokens=1)),
    ("Grass is green", params(prompt_logprobs=1, max_tokens=2)),
    ("Give me words", params(logit_bias={5: 3.0, 9: -100.0}, min_p=0.05, temperature=1.2, seed=1)),
]


def generate(**flags: Any) -> dict[str, RequestOutput]:
    # A small KV cache: tables of blocks for all of the machine's memory would take longer than the requests.
    fields = {"num_gpu_blocks_override": 256, **flags}
    args = EngineArgs.of(model="builtin://tiny", device="cpu", dtype="float32", threads=1, **fields)
    engine = LLMEngine.from_engine_args(args)
    try:
        for index, (prompt, wanted) in enumerate(REQUESTS):
            engine.add_request(str(index), prompt, wanted)
        return finish(engine)
    finally:
        engine.close()


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    return finished


@pytest.fixture(scope="module")
def expected() -> dict[str, RequestOutput]:
    return generate(async_scheduling=False)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"num_gpu_blocks_override": 24, "max_model_len": 128},  # preemption
        {"max_num_batched_tokens": 16, "max_num_seqs": 5},  # prompts in chunks, slots taken again and again
        {"distributed_executor_backend": "mp"},
    ],
    ids=["plain", "crowded", "chunked", "mp"],
)
def test_tokens_are_those_of_the_synchronous_engine(
    expected: dict[str, RequestOutput], flags: dict[str, Any]
) -> None:
    found = generate(async_scheduling=True, **flags)
    for index in expected:
        assert found[index].outputs == expected[index].outputs
        assert found[index].prompt_logprobs == expected[index].prompt_logprobs
        assert found[index].error is None


@pytest.mark.parametrize(
    "flags", [{}, {"num_gpu_blocks_override": 24, "max_model_len": 128}], ids=["plain", "crowded"]
)
def test_the_modelling_code_of_transformers_gives_what_ours_gives(
    expected: dict[str, RequestOutput], flags: dict[str, Any]
) -> None:
    found = generate(async_scheduling=True, model_impl="transformers", **flags)
    for index in expected:
        assert found[index].error is None
        found_tokens, wanted = (
            [(choice.token_ids, choice.finish_reason) for choice in output[index].outputs]
            for output in (found, expected)
        )
        assert found_tokens == wanted
        assert logprobs(found[index]) == pytest.approx(logprobs(expected[index]), abs=1e-3)


def logprobs(output: RequestOutput) -> list[float]:
    """Log probabilities of the prompt's tokens, and of those that were sampled."""
    positions = [*(output.prompt_logprobs or ())]  # None for the first token
    for choice in output.outputs:
        positions += choice.logprobs or ()
    return [score for position in positions if position is not None for score in position.logprobs]


@pytest.fixture
def engine() -> Iterator[LLMEngine]:
    args = EngineArgs.of(
        model="builtin://tiny",
        device="cpu",
        dtype="float32",
        threads=1,
        num_gpu_blocks_override=256,
        async_scheduling=True,
        max_num_seqs=2,
    )
    made = LLMEngine.from_engine_args(args)
    yield made
    made.close()


def test_a_request_aborted_during_its_step_affects_no_other(engine: LLMEngine) -> None:
    greedy = params(ignore_eos=True)
    engine.add_request("reference", "The sea", greedy)
    reference = finish(engine)["reference"].token_ids
    for turn in range(6):
        engine.add_request("leaves", "Once upon a time there was", greedy)
        engine.add_request("stays", "The sea", greedy)
        for _ in range(turn):
            engine.step()
        engine.abort_request("leaves")
        engine.add_request("leaves", "The sea", greedy)  # the same id, perhaps the same slot
        finished = finish(engine)
        assert {name: finished[name].token_ids for name in ("stays", "leaves")} == {
            "stays": reference,
            "leaves": reference,
        }


def test_bad_words_see_the_token_in_flight(engine: LLMEngine) -> None:
    prompt = "Tell me about the sea"
    engine.add_request("plain", prompt, params(ignore_eos=True))
    said = finish(engine)["plain"].token_ids
    pair = engine.renderer.tokenizer.decode(said[4:6])
    engine.add_request("other", "Once", params())  # takes the slot where the same tokens lie still
    engine.add_request("careful", prompt, params(ignore_eos=True, bad_words=[pair]))
    careful = finish(engine)["careful"].token_ids
    assert said[4:6] not in [careful[index : index + 2] for index in range(len(careful))]


def test_a_step_is_in_flight_while_the_next_is_launched(engine: LLMEngine) -> None:
    client = engine.client
    assert isinstance(client, InprocClient)
    engine.add_request("a", "The sea", params(ignore_eos=True, max_tokens=3))
    assert client.core.config.async_scheduling
    in_flight = []
    while engine.has_unfinished_requests():
        engine.step()
        in_flight.append(len(client.core.scheduler.in_flight))
    assert in_flight == [1, 1, 1, 0]
