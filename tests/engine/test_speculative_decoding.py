"""Speculative decoding: drafts change the number of steps and nothing else, under every sampling parameter."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from argosy_engine import LLM, SamplingParams, StructuredOutputsParams
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.executor.abstract import PendingOutput
from argosy_engine.messages import EngineCoreRequest, GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from argosy_engine.worker import worker as worker_module
from checked_copies import CheckedRuntime

PROMPTS = [
    "Once upon a time",
    "The quick brown fox jumps over the lazy dog. " * 4,
    "Hello, how are you?",
    "The sea",
]
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["ann", "bo"]}, "age": {"type": "integer", "minimum": 0,
          "maximum": 999}}, "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "logprobs": 0},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "min_tokens": 9},
    {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(json=SCHEMA), "logprobs": 1},
    {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="[ab]{1,9}")},
]
REQUESTS = [
    (prompt, SamplingParams(max_tokens=24, seed=index, **params))
    for index, prompt in enumerate(PROMPTS)
    for params in PARAMS
]


class Guessing:
    """A step whose answer brings drafts: the tokens to come, as far as a coin says so, then wrong ones."""

    def __init__(self, pending: PendingOutput, oracle: Oracle) -> None:
        self._pending = pending
        self._oracle = oracle

    def sample(self, grammar: GrammarBitmask | None) -> None:
        self._pending.sample(grammar)

    def get(self) -> ModelRunnerOutput:
        output = self._pending.get()
        for request_id, token_ids in zip(output.request_ids, output.sampled_token_ids, strict=True):
            if token_ids:
                output.draft_token_ids[request_id] = self._oracle.drafts(request_id, token_ids)
        return output


class Oracle:
    """Knows what every request will say."""

    def __init__(self, llm: LLM, answers: list[list[int]]) -> None:
        assert isinstance(llm.engine.client, InprocClient)
        self.core = llm.engine.client.core
        self.answers = answers
        self.rng = random.Random(5)
        self.num_steps = 0
        self.num_drafts = self.num_accepted = 0
        self._answer_of: dict[str, list[int]] = {}
        self._num_known: dict[str, int] = {}
        self._add, self.core.add_request = self.core.add_request, self.add_request  # type: ignore[method-assign]
        self._execute = self.core.executor.execute
        self.core.executor.execute = self.execute  # type: ignore[method-assign]

    def add_request(self, message: EngineCoreRequest) -> None:
        self._answer_of[message.request_id] = self.answers[len(self._answer_of)]
        self._num_known[message.request_id] = 0
        self._add(message)

    def execute(self, step: SchedulerOutput) -> Guessing:
        self.num_steps += bool(step.num_scheduled_tokens)
        self.num_drafts += sum(map(len, step.scheduled_spec_token_ids.values()))
        return Guessing(self._execute(step), self)

    def drafts(self, request_id: str, token_ids: list[int]) -> list[int]:
        self.num_accepted += len(token_ids) - 1
        self._num_known[request_id] += len(token_ids)
        known = self._num_known[request_id]
        coming = self._answer_of[request_id][known : known + self.rng.randrange(5)]
        wrong = [self.rng.randrange(1000) for _ in range(self.rng.randrange(3))]
        return coming + wrong


def make(**changes: Any) -> LLM:
    return LLM(
        "builtin://tiny", device="cpu", dtype="float32", threads=1, num_gpu_blocks_override=1024, **changes
    )


def compile_grammars(llm: LLM) -> None:
    """Requests that wait for a grammar would start behind the others, and need steps of their own."""
    params = [
        SamplingParams(max_tokens=1, structured_outputs=request["structured_outputs"])
        for request in PARAMS
        if "structured_outputs" in request
    ]
    llm.generate([PROMPTS[0]] * len(params), params, use_tqdm=False)


def answers(llm: LLM) -> list[tuple[list[int], Any, Any]]:
    prompts, params = zip(*REQUESTS, strict=True)
    results = llm.generate(list(prompts), list(params), use_tqdm=False)
    outputs = [result.outputs[0] for result in results]
    return [(list(output.token_ids), output.logprobs, output.finish_reason) for output in outputs]


def check_same(found: list[tuple[list[int], Any, Any]], expected: list[tuple[list[int], Any, Any]]) -> None:
    """Compare answers; log probabilities but for rounding, because steps with drafts have other sizes."""
    for (token_ids, logprobs, reason), (wanted_ids, wanted, wanted_reason) in zip(
        found, expected, strict=True
    ):
        assert (token_ids, reason) == (wanted_ids, wanted_reason)
        for entry, other in zip(logprobs, wanted, strict=True):
            assert (entry.token_ids, entry.rank) == (other.token_ids, other.rank)
            assert entry.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], Any, Any]]:
    return answers(make())


@pytest.mark.parametrize(
    "changes",
    [{}, {"async_scheduling": True}, {"max_num_batched_tokens": 40, "max_num_seqs": 7}],
    ids=["sync", "async", "small steps"],
)
def test_drafts_change_nothing_but_the_number_of_steps(
    changes: dict[str, Any], expected: list[tuple[list[int], Any, Any]]
) -> None:
    llm = make(**changes)
    compile_grammars(llm)
    oracle = Oracle(llm, [token_ids for token_ids, _, _ in expected])
    check_same(answers(llm), expected)
    oracle.core.scheduler.check()
    if changes.get("async_scheduling"):
        assert not oracle.num_drafts  # they come when the next step is under way
        return
    assert 0.3 < oracle.num_accepted / oracle.num_drafts < 0.95
    if not changes:
        assert oracle.num_steps < max(len(token_ids) for token_ids, _, _ in expected)


def test_drafts_are_verified_with_inputs_in_device_buffers(
    expected: list[tuple[list[int], Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        worker_module, "ModelRunner", partial(worker_module.ModelRunner, runtime=CheckedRuntime())
    )
    llm = make()
    compile_grammars(llm)
    oracle = Oracle(llm, [token_ids for token_ids, _, _ in expected])
    check_same(answers(llm), expected)
    assert oracle.num_accepted
