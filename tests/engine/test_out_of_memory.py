"""A step for which a device has no memory costs its largest request, not the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from argosy_engine import EngineArgs, LLMEngine, SamplingParams
from argosy_engine.attention.backend import ModelInputs
from argosy_engine.frontend.output_processor import RequestOutput
from argosy_engine.worker import worker as worker_module
from argosy_engine.worker.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = {"first": "Hello", "second": "The sky is"}
LARGE = [5] * 90
"""A prompt whose step does not fit."""


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps of more than 80 tokens fail, after half of the model has been computed."""

    def make(*args: Any, **kwargs: Any) -> ModelRunner:
        runner = ModelRunner(*args, **kwargs)
        model: Any = runner.model
        forward = model.forward

        def limited_forward(inputs: ModelInputs) -> torch.Tensor:
            hidden: torch.Tensor = forward(inputs)
            if len(inputs.token_ids) > 80:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nmore")
            return hidden

        model.forward = limited_forward
        return runner

    monkeypatch.setattr(worker_module, "ModelRunner", make)


def run(*, large: bool, **flags: Any) -> dict[str, RequestOutput]:
    """Generate for `PROMPTS`, and for the large prompt once they have a few tokens."""
    args = EngineArgs.of(
        model="builtin://tiny", device="cpu", dtype="float32", threads=1, num_gpu_blocks_override=64,
        max_model_len=128, **flags,
    )  # fmt: skip
    engine = LLMEngine.from_engine_args(args)
    try:
        for name, prompt in PROMPTS.items():
            engine.add_request(name, prompt, GREEDY)
        finished: dict[str, RequestOutput] = {}
        for turn in range(200):
            if large and turn in (3, 4):  # the second one shares the prefix that the first did not compute
                engine.add_request(f"large {turn}", {"prompt_token_ids": LARGE}, GREEDY)
            finished |= {each.request_id: each for each in engine.step() if each.finished}
            if not engine.has_unfinished_requests():
                break
        assert not engine.has_unfinished_requests()
        if large:  # the engine goes on, and nothing of the lost step is found in the prefix cache
            engine.add_request("after", {"prompt_token_ids": LARGE[:70]}, GREEDY)
            while engine.has_unfinished_requests():
                finished |= {each.request_id: each for each in engine.step() if each.finished}
        return finished
    finally:
        engine.close()


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_largest_request_of_a_lost_step_ends_and_the_others_are_recomputed(
    async_scheduling: bool,
) -> None:
    expected = run(large=False)
    outputs = run(large=True, async_scheduling=async_scheduling)
    for name in PROMPTS:
        assert outputs[name].outputs[0].token_ids == expected[name].outputs[0].token_ids
    for name in ("large 3", "large 4"):
        assert outputs[name].outputs[0].finish_reason == "error"
        assert not outputs[name].outputs[0].token_ids
    assert outputs["after"].num_cached_tokens == 0
    assert len(outputs["after"].outputs[0].token_ids) == 12
