"""A step on CUDA without a GPU: torch's fake tensors know a device and a shape and hold no data.

They notice an operation over two devices, or with shapes that do not fit, up to where the values of the sampled tokens
are read. What they cannot tell is whether a real device computes the right thing. A mixture of experts reads values in
each layer, so it cannot be followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from argosy_engine.attention.torch_attn import TorchBackend
from argosy_engine.checkpoint.weights import DummyWeights
from argosy_engine.errors import ConfigError
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.messages import GrammarBitmask, NewRequest, SchedulerOutput
from argosy_engine.models import registry
from argosy_engine.models.config_file import load_model_config
from argosy_engine.params import PoolingParams, SamplingParams
from argosy_engine.sample.sampler import SamplerOptions
from argosy_engine.sample.torch_sampler import SamplingBatch, processed_logits, sample
from argosy_engine.worker.model_runner import ModelRunner
from argosy_engine.worker.worker import choose_device
from gpu_accounting.fake_device import CUDA, FakeRuntime, fake_cuda
from random_checkpoints import KINDS

READS = (DataDependentOutputException, DynamicOutputShapeException)
"""Where a value is asked for: the end of what can be followed."""
GREEDY = SamplingParams(temperature=0.0)
SAMPLING = {
    "greedy": GREEDY,
    "temperature": SamplingParams(temperature=0.7, seed=1),
    "min_p": SamplingParams(temperature=0.7, min_p=0.1, seed=1),
    "top": SamplingParams(temperature=0.7, top_k=5, top_p=0.9, seed=1),
    "penalties": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1, seed=1),
    "bias": SamplingParams(temperature=0.0, logit_bias={5: 1.0}, bad_words_token_ids=((7, 8), (9,))),
    "allowed": SamplingParams(temperature=0.0, allowed_token_ids=(4, 5), min_tokens=3, stop_token_ids=(6,)),
    "logprobs": SamplingParams(temperature=0.7, logprobs=3, seed=1),
}


@dataclass
class FakeDevice:
    mode: FakeTensorMode
    runner: ModelRunner

    def execute(self, *steps: list[NewRequest], grammar: GrammarBitmask | None = None) -> None:
        """Launches steps one after another and reads the last one's tokens. A device mismatch is another error.

        Args:
            steps: new requests of each; those of earlier steps compute one more token.
        """
        with fake_cuda(self.mode):
            for step in _schedule(steps[:-1], [], None):
                self.runner.execute(step)
            (last,) = _schedule(steps[-1:], [each for new in steps[:-1] for each in new], grammar)
            with pytest.raises(READS):
                self.runner.execute(last).get()


def _schedule(
    steps: Sequence[list[NewRequest]], running: list[NewRequest], grammar: GrammarBitmask | None
) -> Iterator[SchedulerOutput]:
    """Steps that compute what is left of the new requests and one more token of the running ones."""
    for new in steps:
        scheduled = {each.request_id: 1 for each in running}
        scheduled |= {each.request_id: len(each.token_ids) - each.num_computed_tokens for each in new}
        yield SchedulerOutput(new, {}, scheduled, sum(scheduled.values()), [], {}, grammar)
        running = [*running, *new]


def fake(name: str, path: Path) -> FakeDevice:
    kind = KINDS[name]
    getattr(transformers, kind.config)(**kind.fields, architectures=[kind.model]).save_pretrained(path)
    config = load_model_config(path)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        weights = DummyWeights(torch.bfloat16, CUDA, 0)
        factory = LayerFactory(weights, TorchBackend(torch.bfloat16), 128)
        model = registry.model_class(config.architecture)(config, factory)
        runner = ModelRunner(
            model, config, num_blocks=16, block_size=16, max_num_seqs=8, max_num_batched_tokens=128, max_model_len=128,
            device=CUDA, sampling=SamplerOptions(vocab_size=config.vocab_size), runtime=FakeRuntime(),
        )  # fmt: skip
    return FakeDevice(mode, runner)


def request(name: str, length: int, computed: int, params: SamplingParams, groups: int) -> NewRequest:
    return NewRequest(name, [3] * length, [[1, 2, 3, 4]] * groups, computed, params)


@pytest.mark.parametrize(
    "name",
    ["llama3-rope", "qwen3-yarn", "qwen2-window", "gpt2", "opt-post-norm", "gemma3", "gemma2"],
)
def test_a_model_computes_on_its_device(name: str, tmp_path: Path) -> None:
    device = fake(name, tmp_path)
    groups = len(device.runner.groups)
    # Two decodes, a prompt, and the second half of one.
    shapes = ((20, 19), (40, 39), (30, 0), (50, 30))
    requests = [request(str(shape), *shape, GREEDY, groups) for shape in shapes]
    device.execute(requests, [])


@pytest.mark.parametrize("name", SAMPLING)
def test_the_sampler_computes_on_the_device_of_its_logits(name: str, tmp_path: Path) -> None:
    requests = [request("plain", 20, 0, GREEDY, 1), request("asks", 20, 0, SAMPLING[name], 1)]
    fake("llama", tmp_path).execute(requests, [])


def test_drawing_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes hold no values: whatever asks for one raises."""
    mode, real = FakeTensorMode(allow_non_fake_inputs=True), torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda array: mode.from_tensor(real(array)))
    batch = SamplingBatch(
        temperature=np.array([0, 1, 1, 0.7, 1], np.float32),
        top_p=np.array([1, 1, 0.9, 1, 1], np.float32),
        top_k=np.array([0, 0, 0, 2000, 0]),
        min_p=np.array([0, 0, 0.1, 0, 0.1], np.float32),
        seeds=np.arange(5),
        positions=np.arange(5),
    )
    with mode:
        logits = torch.randn(5, 5000, device=CUDA)
        assert sample(logits, batch).device.type == "cuda"
        assert processed_logits(logits, batch).device.type == "cuda"


def test_a_grammar_masks_on_the_device_of_the_logits(tmp_path: Path) -> None:
    mask = GrammarBitmask(["a"], np.full((1, 16), -1, np.int32).tobytes())
    fake("llama", tmp_path).execute(
        [request("b", 20, 0, GREEDY, 1), request("a", 20, 0, GREEDY, 1)], grammar=mask
    )


def test_prompts_are_scored_and_pooled_on_the_device(tmp_path: Path) -> None:
    fake("llama", tmp_path).execute([request("scored", 20, 0, SamplingParams(prompt_logprobs=2), 1)])
    pooled = request("pooled", 20, 0, GREEDY, 1)
    pooled.pooling_params = PoolingParams(pooling_type="mean")
    fake("llama", tmp_path).execute([pooled])


def test_a_worker_takes_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert [choose_device("auto", rank, 2) for rank in range(2)] == chosen
    assert chosen == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert choose_device("cpu", 1, 2) == torch.device("cpu")
    with pytest.raises(ConfigError, match="3 workers need a GPU each, and torch sees 2"):
        choose_device("cuda", 0, 3)


def test_a_tensor_left_on_the_cpu_is_noticed() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(3, device=CUDA) + torch.ones(3)
