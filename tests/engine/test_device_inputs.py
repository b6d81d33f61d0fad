"""Inputs of steps in fixed device buffers, filled by one copy: on a CPU, where copies arrive as late as they may."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from argosy_engine import EngineArgs, LLMEngine, SamplingParams, StructuredOutputsParams
from argosy_engine.attention.backend import AttentionMetadata
from argosy_engine.messages import NewRequest, SchedulerOutput
from argosy_engine.sample.sampler import SamplerOptions
from argosy_engine.worker import worker as worker_module
from argosy_engine.worker.device_inputs import DeviceInputs
from argosy_engine.worker.input_batch import HostInputs, InputBatch, StepArrays, StepTensors, flatten_step
from checked_copies import CheckedRuntime

CPU = torch.device("cpu")
BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **fields})


REQUESTS = [
    ("Hello there, how are you today?", params(ignore_eos=True, max_tokens=40)),
    ("Tell me about the sea", params(temperature=1.0, seed=3, top_p=0.9, logprobs=2)),
    ("Tell me about the sea", params(temperature=0.8, seed=4, n=3)),
    ("What is 2 plus 3?", params(repetition_penalty=1.3, frequency_penalty=0.5, logprobs=0)),
    ("Yes or no?", params(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))),
    ("The sky is", params(max_tokens=1, bad_words=("blue",))),
    ("Grass is green", params(prompt_logprobs=1, max_tokens=2)),
]


def generate(**flags: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"num_gpu_blocks_override": 256, **flags}
    args = EngineArgs.of(model="builtin://tiny", device="cpu", dtype="float32", threads=1, **fields)
    engine = LLMEngine.from_engine_args(args)
    try:
        for index, (prompt, wanted) in enumerate(REQUESTS):
            engine.add_request(str(index), prompt, wanted)
        finished = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    choices = [(each.token_ids, each.logprobs) for each in output.outputs]
                    finished[output.request_id] = choices, output.prompt_logprobs
        return finished
    finally:
        engine.close()


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return generate(async_scheduling=False)


@pytest.mark.parametrize(
    "flags",
    [
        {"async_scheduling": False},
        {},
        {"num_gpu_blocks_override": 24, "max_model_len": 128},  # preemption
        {"max_num_batched_tokens": 16, "max_num_seqs": 5},  # prompts in chunks, slots taken again and again
    ],
    ids=["synchronous", "asynchronous", "crowded", "chunked"],
)
def test_an_engine_generates_the_same(
    expected: dict[str, Any], flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = CheckedRuntime()
    monkeypatch.setattr(worker_module, "ModelRunner", partial(worker_module.ModelRunner, runtime=runtime))
    assert generate(**{"async_scheduling": True, **flags}) == expected
    assert runtime.to_device
    # Two pinned buffers for inputs; for outputs one per step in flight, and larger ones where log probabilities ask.
    assert runtime.num_allocations <= 6


class Steps:
    """The same steps as tensors by `HostInputs` and by `DeviceInputs`."""

    def __init__(self, *, num_groups: int = 1, num_slots: int = 8, max_blocks: int = 9) -> None:
        self.runtime = CheckedRuntime()
        self.batch = InputBatch(
            num_slots, max_blocks * BLOCK_SIZE, max_blocks, num_groups, (1,), CPU, SamplerOptions(),
            tracks_blocks=True,
        )  # fmt: skip
        self.host = HostInputs(self.batch, BLOCK_SIZE)
        self.device = DeviceInputs(
            self.batch,
            BLOCK_SIZE,
            max_num_tokens=256,
            device=CPU,
            runtime=self.runtime,
        )

    def add(self, name: str, length: int, computed: int, blocks: list[list[int]]) -> None:
        self.batch.add(NewRequest(name, list(range(7, 7 + length)), blocks, computed, GREEDY))

    def arrays(self, scheduled: dict[str, int], in_flight: np.ndarray | None = None) -> StepArrays:
        step = SchedulerOutput([], {}, scheduled, sum(scheduled.values()), [], {})
        return flatten_step(self.batch, step, in_flight)


def assert_same(found: StepTensors, expected: StepTensors) -> None:
    assert torch.equal(found.inputs.token_ids, expected.inputs.token_ids)
    assert torch.equal(found.inputs.positions, expected.inputs.positions)
    if expected.sampled_tokens is None:
        assert found.sampled_tokens is None
    else:
        assert torch.equal(found.sampled_tokens, expected.sampled_tokens)
    for group in range(len(expected.inputs.meta.groups) or 1):
        assert_same_metadata(found.inputs.meta.of_group(group), expected.inputs.meta.of_group(group))


def assert_same_metadata(found: AttentionMetadata, expected: AttentionMetadata) -> None:
    for name in ("query_start_loc", "seq_lens", "positions", "slot_mapping"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
        assert getattr(found, name).dtype is getattr(expected, name).dtype
    width = expected.block_table.shape[1]
    assert torch.equal(found.block_table[:, :width], expected.block_table)
    assert found.num_decodes == expected.num_decodes


def test_tensors_equal_those_of_the_host() -> None:
    steps = Steps(num_groups=2)
    steps.add("decode", 20, 19, [[3, 4], [5, 6]])
    steps.add("prompt", 40, 0, [[7, 8, 9], [10, 11, 12]])
    steps.add("chunk", 50, 16, [[13, 14, 15, 16], [17, 18, 19, 20]])
    arrays = steps.arrays({"prompt": 40, "decode": 1, "chunk": 20})
    assert_same(steps.device.tensors(arrays), steps.host.tensors(arrays))
    # Blocks are appended, a slot changes its owner, and the last tokens of two requests are on the device only.
    steps.batch.append_blocks(steps.batch.slot_of["decode"], [[21], [22]])
    freed = steps.batch.remove("prompt")
    steps.add("other", 18, 17, [[23, 24], [25, 26]])
    assert steps.batch.slot_of["other"] == freed
    for inputs in (steps.device, steps.host):
        inputs.keep(arrays.sampled.slots, torch.tensor([101, 102]))
    in_flight = np.zeros(8, bool)
    in_flight[steps.batch.slot_of["decode"]] = True
    steps.batch.num_tokens[steps.batch.slot_of["decode"]] = 40
    steps.batch.num_computed[steps.batch.slot_of["decode"]] = 39
    arrays = steps.arrays({"decode": 1, "other": 1}, in_flight)
    found, expected = steps.device.tensors(arrays), steps.host.tensors(arrays)
    assert found.inputs.token_ids.tolist() == [101, 7 + 17]
    assert_same(found, expected)
    assert len(steps.runtime.to_device) == 2


def test_padding_reads_and_writes_nothing() -> None:
    steps = Steps()
    steps.add("a", 20, 19, [[3, 4]])
    steps.add("b", 33, 32, [[5, 6, 7]])
    arrays = steps.arrays({"a": 1, "b": 1})
    expected = steps.host.tensors(arrays)
    found = steps.device.tensors(arrays, num_rows=8)
    meta = found.inputs.meta
    assert meta.num_decodes == len(found.inputs.token_ids) == 8
    assert found.inputs.token_ids.tolist() == [*expected.inputs.token_ids.tolist(), *[0] * 6]
    assert meta.slot_mapping.tolist() == [*expected.inputs.meta.slot_mapping.tolist(), *[-1] * 6]
    assert meta.query_start_loc.tolist() == [0, 1, *[2] * 7]
    assert meta.seq_lens.tolist() == [20, 33, *[0] * 6]
    assert torch.equal(meta.block_table[:2, :3], expected.inputs.meta.block_table)
    assert not meta.block_table[2:].any()


def test_addresses_follow_from_the_size_of_a_step() -> None:
    steps = Steps(num_groups=2)
    for name in "abc":
        steps.add(name, 20, 19, [[3, 4], [5, 6]])

    def addresses(scheduled: str) -> list[int]:
        found = steps.device.tensors(steps.arrays(dict.fromkeys(scheduled, 1)), num_rows=4)
        metas = [found.inputs.meta.of_group(group) for group in range(2)]
        names = ("query_start_loc", "seq_lens", "positions", "slot_mapping", "block_table")
        tensors = [getattr(meta, name) for meta in metas for name in names]
        return [tensor.data_ptr() for tensor in (found.inputs.token_ids, found.inputs.positions, *tensors)]

    first = addresses("abc")
    steps.batch.append_blocks(steps.batch.slot_of["a"], [[9, 10, 11], [12, 13, 14]])
    assert addresses("a") == addresses("cb") == first
    assert all(address % 16 == 0 for address in first)


def test_more_new_blocks_than_a_copy_holds_are_sent_in_several() -> None:
    steps = Steps(num_slots=2, max_blocks=40_000)
    length = 40_000 * BLOCK_SIZE
    for name in "ab":
        steps.add(name, length, length - 1, [list(range(1, 40_001))])
    arrays = steps.arrays({"a": 1, "b": 1})
    assert_same(steps.device.tensors(arrays), steps.host.tensors(arrays))
    assert len(steps.runtime.to_device) == 2
