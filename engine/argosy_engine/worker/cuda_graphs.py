"""CUDA graphs: forward passes of decode steps, captured once per number of requests and replayed with one launch.

A graph repeats the same kernels on the same addresses. `DeviceInputs` provides these: what a step needs is copied to
where the captured kernels read it. A step of fewer requests is padded to the next captured size by rows that are part
of no request. Steps that compute more than one token of a request run eagerly, and so does what follows the forward
pass: the output head and sampling.

`FULL_DECODE_ONLY` is vLLM's name for this mode. Attention must not depend on lengths that the host knows, which leaves
the backends `triton` and `flash_attn`. The latter's kernels read lengths and block tables on the device, too; what its
host code chooses by, the most queries of a request and the width of the block table, is the same in all decodes of a
captured size. What version 3 computes on the device to divide its work is part of the graph.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from argosy_engine.config import EngineArgs, capture_sizes
from argosy_engine.distributed.lockstep import Round
from argosy_engine.errors import ConfigError
from argosy_engine.worker.device_inputs import DeviceInputs
from argosy_engine.worker.input_batch import StepArrays, StepTensors, empty_step

logger = logging.getLogger(__name__)

Forward = Callable[[StepTensors], torch.Tensor]
"""Computes hidden states [T, hidden_size] of a step."""

_CAPTURABLE_BACKENDS = frozenset({"triton", "flash_attn"})


class CapturedGraph(Protocol):
    """A captured forward pass."""

    output: torch.Tensor
    """[size, hidden_size], overwritten by each replay."""

    def replay(self) -> None:
        """Start it. It reads its inputs where they were when it was captured."""
        ...


class GraphApi(Protocol):
    """Captures what a device is asked to do. All graphs of one object share the memory of intermediate results."""

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedGraph:
        """Capture a call of `run`.

        Raises:
            RuntimeError: an operation cannot be captured.
        """
        ...


def graph_sizes(args: EngineArgs, device: str, attention_backend: str) -> list[int]:
    """Return the numbers of requests whose decode steps an engine captures, ascending; none: all steps run eagerly.

    Args:
        device: `cpu` or `cuda`.
    """
    config = args.compilation_config
    if device != "cuda" or args.enforce_eager or config.cudagraph_mode == "NONE":
        return []
    if attention_backend not in _CAPTURABLE_BACKENDS:
        logger.info(
            "no CUDA graphs: the attention backend %s depends on the lengths of requests", attention_backend
        )
        return []
    if config.cudagraph_mode != "FULL_DECODE_ONLY":
        logger.info(
            "cudagraph_mode %s is taken as FULL_DECODE_ONLY: decodes are captured whole, and steps with prompts, which "
            "are long enough to hide their launches, are launched one by one",
            config.cudagraph_mode,
        )
    return capture_sizes(args.max_num_seqs, config.cudagraph_capture_sizes)


class DecodeGraphs:
    """Graphs of decode steps.

    Args:
        inputs: provides the tensors that the graphs read.
        forward: must depend on nothing but these tensors and their shapes.
        api: captures and replays.
        is_required: whether a failed capture is an error. For workers that compute a model together: the others would
            go on with steps that are padded.
    """

    def __init__(
        self, inputs: DeviceInputs, forward: Forward, api: GraphApi, *, is_required: bool = False
    ) -> None:
        self._is_required = is_required
        self._inputs = inputs
        self._forward = forward
        self._api = api
        self._graphs: dict[int, CapturedGraph] = {}
        self._size_for: list[int] = [0]
        """By number of requests; 0: none is captured."""

    def capture(self, sizes: Sequence[int], on_captured: Callable[[], None] = lambda: None) -> bool:
        """Capture steps of these numbers of requests, the largest first, so that the others fit in its memory.

        Args:
            on_captured: called after each.

        Returns:
            False if a capture failed. Then no graph is used, and a warning names the size and the operation.

        Raises:
            ConfigError: a capture failed and is required.
        """
        started = time.perf_counter()
        for size in sorted(set(sizes) - self._graphs.keys(), reverse=True):
            tensors = self._inputs.tensors(empty_step(), num_rows=size)
            last = _LastOperation()
            try:
                self._run(tensors)  # compiles kernels and lets libraries allocate, which a capture must not
                with last:
                    self._graphs[size] = self._api.capture(lambda tensors=tensors: self._run(tensors))
                on_captured()
            except RuntimeError as error:
                self._graphs.clear()
                self._size_for = [0]
                operation = last.name or "no operation"
                failure = f"capturing a step of {size} requests failed after {operation}: {error}"
                if self._is_required:
                    raise ConfigError(f"no CUDA graphs: {failure}; use --enforce-eager") from error
                logger.warning("no CUDA graphs: %s; steps run eagerly", failure)
                return False
        captured = sorted(self._graphs)
        self._size_for = [0]
        for size in captured:
            self._size_for += [size] * (size + 1 - len(self._size_for))
        if captured:
            seconds = time.perf_counter() - started
            logger.info(
                "captured %d CUDA graphs, up to %d requests, in %.1f s", len(captured), captured[-1], seconds
            )
        return True

    def _run(self, tensors: StepTensors) -> torch.Tensor:
        """Run the forward pass. What layers share is derived in it, so that a graph derives it from each step anew."""
        tensors.inputs.meta.forget()
        return self._forward(tensors)

    def run(self, step: StepArrays, agreed: Round | None = None) -> tuple[torch.Tensor, StepTensors] | None:
        """Replay a step's forward pass and return the hidden states [T, hidden_size], valid until the next call.

        None: there is no graph for this step.

        Args:
            agreed: what all engine cores compute in this step, if they share experts: all replay graphs of one size.
        """
        count = len(step.slots)
        is_decode, wanted = step.num_decodes == count, count
        if agreed is not None:
            is_decode, wanted = agreed.is_decode, agreed.num_rows
        if not is_decode or wanted >= len(self._size_for):
            return None
        size = self._size_for[wanted]
        tensors = self._inputs.tensors(step, num_rows=size)
        graph = self._graphs[size]
        graph.replay()
        return graph.output[:count], tensors


class TorchGraphs:
    """CUDA graphs of torch, in one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedGraph:
        return _TorchGraph(run, self._pool)


class _TorchGraph:
    def __init__(self, run: Callable[[], torch.Tensor], pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Other threads may call CUDA meanwhile: only this thread's calls must be capturable.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.output = run()

    def replay(self) -> None:
        self._graph.replay()


class _LastOperation(TorchDispatchMode):
    """Notes the last operation of torch, to name it if it fails."""

    name = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = str(func)
        return func(*args, **(kwargs or {}))
