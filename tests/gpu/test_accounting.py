"""What a step does on a GPU, counted on fake CUDA tensors: launches, copies between host and device, waits, bytes.

`LIMITS` only ever get lower. The goals are 10 launches per dense layer, 13 per layer with experts, 8 for sampling
whatever its parameters, 1.25 times the necessary bytes when decoding.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from argosy_engine.params import SamplingParams
from argosy_engine.worker.device_inputs import DeviceInputs
from gpu_accounting.__main__ import table_line
from gpu_accounting.fake_device import CUDA
from gpu_accounting.measurement import (
    SHAPES,
    AccountedRunner,
    Shape,
    StepCounts,
    count_steps,
    decode_again,
)
from gpu_accounting.models import MODELS
from gpu_accounting.step_trace import HiddenSync, Operation


class Limits(NamedTuple):
    layer: int
    """Launches per layer. Of DeepSeek-V3 that is prompts of four requests, each expanded by itself: decodes take 23."""
    rest: int
    """Launches outside the layers: inputs, embedding, last norm, output head, keeping the sampled tokens."""
    traffic: float
    """Bytes moved at decode over those of weights, keys, values and states."""
    copies_of_prompts: int = 0
    """Copies of steps with prompts that do not come from pinned memory: of where the chunks of a Gated DeltaNet are."""


LIMITS = {
    "Qwen3-0.6B": Limits(10, 9, 1.04),
    "Qwen3-8B": Limits(10, 9, 1.06),
    "Llama-3-8B": Limits(10, 9, 1.07),
    "Qwen3-30B-A3B": Limits(13, 9, 1.04),
    "gpt-oss-20b": Limits(13, 9, 1.04),
    "GLM-4.5-Air": Limits(18, 9, 1.03),
    "Llama-4-Scout": Limits(17.25, 16, 1.03),
    "DeepSeek-V3": Limits(122, 9, 1.03),
    "Qwen3.5-0.8B": Limits(13.5, 11, 1.12, 1),
    "Qwen3.5-35B-A3B": Limits(23.5, 11, 1.05, 1),
    "Gemma-3-12B": Limits(10, 11, 1.04),
    "Qwen3-8B-FP8-dynamic": Limits(10, 9, 1.07),
    "Qwen3-30B-A3B-FP8-dynamic": Limits(13, 9, 1.06),
    "Meta-Llama-3-8B-Instruct-FP8": Limits(10, 9, 1.07),
    "Qwen3-8B-FP8": Limits(13, 9, 1.08),
    "Qwen3-30B-A3B-FP8": Limits(14, 9, 1.07),
    "gpt-oss-20b MXFP4": Limits(13, 9, 1.09),
    "Llama-3-8B int8": Limits(10, 9, 1.07),
    "Llama-3-8B int4": Limits(10, 9, 1.08),
}


SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.7, seed=1),
    "top": SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=1),
    "penalties": SamplingParams(
        temperature=0.7, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1, seed=1
    ),
    "logprobs": SamplingParams(temperature=0.7, logprobs=3, seed=1),
    "everything": SamplingParams(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        min_tokens=3,
        logit_bias={3: 1.0},
        logprobs=3,
        seed=1,
    ),
}
MAX_SAMPLING_LAUNCHES = 8


@pytest.fixture(scope="module", params=LIMITS)
def counted(request: pytest.FixtureRequest) -> list[StepCounts]:
    return count_steps(request.param)


def test_steps_are_within_their_limits(counted: list[StepCounts]) -> None:
    assert [each.shape for each in counted] == list(SHAPES)
    for each in counted:
        limits = LIMITS[each.model]
        assert not each.hidden_sync
        blocking = limits.copies_of_prompts if each.shape.prompts else 0
        assert (each.copies_to_device, each.copies_to_host, each.blocking_copies) == (1, 1, blocking), each
        assert each.layer <= limits.layer, each
        assert each.rest <= limits.rest, each
        if not each.shape.prompts:
            assert 1 <= each.num_bytes / each.necessary_bytes <= limits.traffic, each


def test_the_page_has_these_counts(counted: list[StepCounts]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "performance-gpu.md").read_text().splitlines()
    start = f"| {counted[0].model} | "
    shown = [line for line in page if line.startswith(start) and line.count("|") == 9]
    assert shown == [table_line(each) for each in counted], "out of date; run `make gpu-accounting`"


def test_every_model_has_limits() -> None:
    assert set(LIMITS) == set(MODELS)


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_is_within_its_limits(name: str) -> None:
    (counts,) = count_steps("Qwen3-0.6B", SAMPLING[name], (Shape("decode", decodes=8),))
    assert not counts.hidden_sync
    assert counts.sampling <= MAX_SAMPLING_LAUNCHES
    assert (counts.copies_to_device, counts.copies_to_host) == (1, 1)


@pytest.fixture(scope="module")
def runner() -> AccountedRunner:
    return AccountedRunner(MODELS["Qwen3-0.6B"], 2)


def test_every_step_of_one_size_is_the_same(runner: AccountedRunner) -> None:
    """The same operations with the same shapes on tensors at the same addresses, as a CUDA graph needs it."""
    step = runner.add(Shape("decode", decodes=8))
    runner.execute(step)
    first = _without_bytes(runner.execute(decode_again(step)))
    addresses = runner.forward_addresses()
    # Another step whose requests get new blocks, and other requests.
    appended = decode_again(step)
    appended.new_block_ids = {next(iter(appended.num_scheduled_tokens)): [[7]]}
    assert _without_bytes(runner.execute(appended)) == first
    assert runner.forward_addresses() == addresses
    runner.finish(step)
    others = runner.add(Shape("decode", decodes=8))
    runner.execute(others)
    assert _without_bytes(runner.execute(decode_again(others))) == first
    assert runner.forward_addresses() == addresses
    runner.finish(others)


def test_a_captured_decode_step_is_a_few_launches() -> None:
    runner = AccountedRunner(MODELS["Qwen3-0.6B"], 2)
    runner.capture([8, 4])
    for decodes, size in ((3, 4), (8, 8)):
        step = runner.add(Shape("decode", decodes=decodes))
        runner.execute(step)
        operations = runner.execute(decode_again(step))
        runner.finish(step)
        kinds = Counter(each.kind for each in operations)
        assert (kinds["copy to device"], kinds["copy to host"], kinds["blocking copy"]) == (1, 1, 0)
        assert [each.shapes for each in operations if each.phase == "forward"] == [(size,)]
        limits = LIMITS["Qwen3-0.6B"]
        assert kinds["launch"] <= limits.rest + MAX_SAMPLING_LAUNCHES


@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen3-30B-A3B", "Gemma-3-12B"])
def test_a_captured_mixed_step_is_a_few_launches(model: str) -> None:
    runner = AccountedRunner(MODELS[model], 2)
    runner.capture([8], mixed=[192, 640])
    for shape, size in (
        (Shape("mixed", decodes=8, prompts=(512,)), 640),
        (Shape("mixed", decodes=3, prompts=(20, 140)), 192),
        (Shape("prompts", prompts=(192,)), 192),
    ):
        step = runner.add(shape)
        operations = runner.execute(step)
        runner.finish(step)
        kinds = Counter(each.kind for each in operations)
        assert (kinds["copy to device"], kinds["copy to host"], kinds["blocking copy"]) == (1, 1, 0)
        assert [each.shapes for each in operations if each.phase == "forward"] == [(size,)]
        assert kinds["launch"] <= LIMITS[model].rest + MAX_SAMPLING_LAUNCHES
    few = runner.add(Shape("few", decodes=8, prompts=(100,)))
    assert sum(each.phase == "layer" for each in runner.execute(few)) > 1, "its keys may be split"


def test_every_mixed_step_of_a_captured_size_reads_the_same_addresses(runner: AccountedRunner) -> None:
    """And launches the same, which no value of a step decides: what a captured one repeats is what it would do."""
    inputs, seen = runner.runner._inputs, []
    assert isinstance(inputs, DeviceInputs)
    original = inputs.tensors
    inputs.tensors = lambda step: original(step, num_rows=inputs.num_slots, num_tokens=640)  # type: ignore[method-assign,assignment]
    try:
        for shape in (
            Shape("", decodes=8, prompts=(512,)),
            Shape("", prompts=(300, 40)),
            Shape("", prompts=(640,)),
        ):
            step = runner.add(shape)
            launches = [
                (each.name, each.shapes)
                for each in runner.execute(step)
                if each.phase in ("forward", "layer")
                and each.name != "index_select"  # of the rows that sample
            ]
            assert len(launches) == 20
            seen.append((launches, runner.forward_addresses()))
            runner.finish(step)
    finally:
        inputs.tensors = original  # type: ignore[method-assign]
    assert seen[0] == seen[1] == seen[2]


def test_waits_and_copies_are_noticed(runner: AccountedRunner) -> None:
    """The instrument itself: a model that asks for a value, and one that copies a tensor from the host."""
    step = runner.add(Shape("decode", decodes=2))
    model = runner.runner.model
    forward = model.forward
    expected = runner.execute(step)

    def copying(*arguments: torch.Tensor) -> torch.Tensor:
        hidden = forward(*arguments)
        return hidden + torch.zeros(1, device="cpu").to(CUDA, torch.bfloat16)

    def waiting(*arguments: torch.Tensor) -> torch.Tensor:
        hidden = forward(*arguments)
        return hidden * hidden[0, 0].item()

    try:
        model.forward = copying
        operations = runner.execute(decode_again(step))
        assert [each.kind for each in operations].count("blocking copy") == 1
        assert len(operations) > len(expected)
        model.forward = waiting
        with pytest.raises(HiddenSync, match="_local_scalar_dense waits"):
            runner.execute(decode_again(step))
    finally:
        model.forward = forward
        runner.finish(step)


def _without_bytes(operations: list[Operation]) -> list[Operation]:
    """Attention's traffic depends on the lengths of the requests."""
    return [replace(each, num_bytes=0) for each in operations]
