"""HostRunner: the engine's model runner with a driver that starts nothing, for what a step costs the host.

Tensors are on torch's `meta` device, whose operations check shapes and compute nothing, and kernels are started by
Triton's real launcher, or by ours, on a `StubDriver`. So the host does all that it does for a GPU, but for what torch's
own operations then ask of CUDA (a few microseconds each, of 5 or so per layer) and the driver's part of a launch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from argosy_engine.attention.selector import load_backend
from argosy_engine.checkpoint.weights import DummyWeights
from argosy_engine.layers.linear_method import linear_method
from argosy_engine.messages import NewRequest, SchedulerOutput
from argosy_engine.models import registry
from argosy_engine.models.config_file import parse_config
from argosy_engine.params import SamplingParams
from argosy_engine.sample.sampler import SamplerOptions
from argosy_engine.triton_kernels import launch as launching
from argosy_engine.triton_kernels.direct_launch import Direct, load_module
from argosy_engine.triton_kernels.launch import KNOWN_DEVICES, assume_device
from argosy_engine.worker.device_runtime import PinnedMemory
from argosy_engine.worker.model_runner import ModelRunner
from argosy_engine.worker.pending_step import PendingStep
from gpu_accounting.measurement import (
    BLOCK_SIZE,
    CONTEXT,
    GREEDY,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    FirstExpertFactory,
    Shape,
)
from gpu_accounting.stub_driver import StubDriver

META = torch.device("meta")


class _Event:
    def synchronize(self) -> None: ...


class _NoCopies:
    """A DeviceRuntime whose device has no memory."""

    def pinned(self, num_bytes: int) -> PinnedMemory:
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        return PinnedMemory(memory, memory.numpy())  # tokens that are read are 0

    def copy_to_device(self, source: torch.Tensor, target: torch.Tensor) -> _Event:
        target.copy_(source, non_blocking=True)
        return _Event()

    def copy_to_host(self, source: torch.Tensor, target: torch.Tensor) -> _Event:
        return _Event()


class HostRunner:
    """A model of a published config.

    Args:
        stub: the process's driver.
        num_layers: of the config, instead of all.
        is_direct: whether compiled kernels are started by the driver, as on a device that passes the check.
        has_products: whether torch's matrix products are asked for. On `meta` they are written in Python, which takes
            longer than what the host does for CUDA; without, only their outputs are allocated.
    """

    def __init__(
        self,
        stub: StubDriver,
        raw: dict[str, Any],
        num_layers: int | None = None,
        *,
        is_direct: bool = True,
        has_products: bool = True,
        device: str = "H100",
    ) -> None:
        self.stub = stub
        layers = {} if num_layers is None else {"num_hidden_layers": num_layers}
        config = parse_config({**raw, **layers}, {}, {})
        self._traits = KNOWN_DEVICES[device]
        self._names = 0
        self._has_products = has_products
        launching.set_direct(Direct(load_module(str(stub.library))) if is_direct else None)
        with assume_device(self._traits):
            backend = load_backend("triton", torch.bfloat16)
            weights = DummyWeights(torch.bfloat16, META, 0)
            method = linear_method(
                config, None, dtype=weights.dtype, device=META, uses_triton=backend.uses_triton
            )
            factory = FirstExpertFactory(weights, backend, MAX_MODEL_LEN, method)
            model = registry.model_class(config.architecture)(config, factory)
            self.runner = ModelRunner(
                model,
                config,
                num_blocks=MAX_NUM_SEQS * (CONTEXT // BLOCK_SIZE + 2),
                block_size=BLOCK_SIZE,
                max_num_seqs=MAX_NUM_SEQS,
                max_num_batched_tokens=2048,
                max_model_len=MAX_MODEL_LEN,
                device=META,
                sampling=SamplerOptions(vocab_size=config.vocab_size, kind="kernels"),
                runtime=_NoCopies(),
                num_states=MAX_NUM_SEQS + 1,
            )

    def add(self, shape: Shape, params: SamplingParams = GREEDY) -> SchedulerOutput:
        """Return a step of new requests of this shape."""
        requests = []
        for length, computed in [(CONTEXT, CONTEXT - 1)] * shape.decodes + [
            (each, 0) for each in shape.prompts
        ]:
            self._names += 1
            blocks = [[1 + index for index in range(-(-length // BLOCK_SIZE) + 1)]] * len(self.runner.groups)
            requests.append(NewRequest(str(self._names), [3] * length, blocks, computed, params))
        scheduled = {each.request_id: len(each.token_ids) - each.num_computed_tokens for each in requests}
        return SchedulerOutput(requests, {}, scheduled, sum(scheduled.values()), [], {})

    def execute(self, step: SchedulerOutput) -> PendingStep:
        """Launch a step; `get` of the result ends it."""
        with assume_device(self._traits), self._products():
            return self.runner.execute(step)

    def finish(self, step: SchedulerOutput) -> None:
        """Take the requests of a step out of the batch."""
        self.execute(SchedulerOutput([], {}, {}, 0, list(step.num_scheduled_tokens), {}))

    def _products(self) -> AbstractContextManager[Any]:
        return (
            nullcontext() if self._has_products else patch.object(torch.nn.functional, "linear", _output_only)
        )


def _output_only(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)


def count_calls(run: Callable[[], Any]) -> Counter[str]:
    """Count the functions that a call enters, in Python (`file:name`) and in C (`c:name`). It is the same each time."""
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls[f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_code.co_name}"] += 1
        elif event == "c_call":
            calls[f"c:{getattr(argument, '__qualname__', argument)}"] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls
