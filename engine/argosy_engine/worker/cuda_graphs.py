"""CUDA graphs: forward passes, captured once per size of step and replayed with one launch.

A graph repeats the same kernels on the same addresses. `DeviceInputs` provides these: what a step needs is copied to
where the captured kernels read it. A smaller step is padded to the next captured size by requests without tokens and
tokens that are part of no request, whose keys and values are not written. What follows the forward pass, the output
head and sampling, is launched one by one, for the step's own rows.

Decodes are captured by their number of requests (`FULL_DECODE_ONLY`, vLLM's name). Attention must not depend on lengths
that the host knows, which leaves the backends `triton` and `flash_attn`. The latter's kernels read lengths and block
tables on the device, too; what its host code chooses by, the most queries of a request and the width of the block
table, is the same in all decodes of a captured size. What version 3 computes on the device to divide its work is part
of the graph.

Mixed steps, with prompts or without decodes, are captured by their number of tokens, attention included (`FULL`): the
grid of `triton`'s attention has a tile for every `max_num_seqs` requests and as many as their tokens can fill, and a
program that finds no queries ends at once. So a graph has the launches of the largest step of its size. It is replayed
only for steps that would be launched with the same configuration of that kernel, namely where a request computes more
than `MIN_QUERIES` tokens (fewer would have their keys split, for which the lengths decide). Vectors for prompts are
never computed so, because they outlive the step, and nor is what several engine cores compute together.
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
MIN_QUERIES = 128
"""A step in which no request computes more tokens is not replayed as a mixed one: the largest query tile that
`paged_attention` chooses, above which all tiles are of one kind."""
_MIXED_SIZES = (160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
"""Tokens of mixed steps that are captured: up to a quarter is padding. Larger steps take the device longer than the
host."""


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
    return capture_sizes(args.max_num_seqs, config.cudagraph_capture_sizes)


def mixed_graph_sizes(args: EngineArgs, device: str, attention_backend: str, reason: str | None) -> list[int]:
    """Return the numbers of tokens of the mixed steps that an engine captures, ascending; none: they run eagerly.

    Args:
        device: `cpu` or `cuda`.
        reason: why those of this model can't be captured, or None.
    """
    config = args.compilation_config
    mode = config.cudagraph_mode
    if device != "cuda" or args.enforce_eager or mode in ("NONE", "FULL_DECODE_ONLY"):
        return []
    if attention_backend != "triton":
        reason = f"the attention backend {attention_backend} depends on the lengths of prompts"
    if reason is not None:
        logger.info("cudagraph_mode %s is taken as FULL_DECODE_ONLY: %s", mode, reason)
        return []
    if mode != "FULL":
        logger.info("cudagraph_mode %s is taken as FULL: attention is part of the graphs", mode)
    most = args.max_num_batched_tokens
    wanted = config.cudagraph_capture_sizes or (*_MIXED_SIZES, min(most, _MIXED_SIZES[-1]))
    return sorted({size for size in wanted if MIN_QUERIES < size <= most})


class _Graphs:
    """Graphs of one kind of step, by size."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        """What a size counts."""
        self.by_size: dict[int, CapturedGraph] = {}
        self._size_for: list[int] = []
        """By size of a step; 0: none is captured."""

    def settle(self) -> None:
        """Take up what was captured, or removed."""
        self._size_for = [0]
        for size in sorted(self.by_size):
            self._size_for += [size] * (size + 1 - len(self._size_for))

    def size_for(self, count: int) -> int:
        """Return the captured size for a step of `count`; 0: there is none."""
        return self._size_for[count] if count < len(self._size_for) else 0


class StepGraphs:
    """Graphs of decodes and of mixed steps.

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
        self._decodes, self._mixed = _Graphs("requests"), _Graphs("tokens")

    def capture(
        self, sizes: Sequence[int], on_captured: Callable[[], None] = lambda: None, *, is_mixed: bool = False
    ) -> bool:
        """Capture steps of these sizes, the largest first, so that the others fit in its memory.

        Args:
            sizes: numbers of requests, or of tokens of mixed steps.
            on_captured: called after each.

        Returns:
            False if a capture failed. Then no graph of this kind is used, and a warning names the size and the
            operation.

        Raises:
            ConfigError: a capture failed and is required.
        """
        started = time.perf_counter()
        graphs = self._mixed if is_mixed else self._decodes
        for size in sorted(set(sizes) - graphs.by_size.keys(), reverse=True):
            tensors = self._inputs.tensors(empty_step(), **self._padding(size, is_mixed))
            last = _LastOperation()
            try:
                self._run(tensors)  # compiles kernels and lets libraries allocate, which a capture must not
                with last:
                    graphs.by_size[size] = self._api.capture(lambda tensors=tensors: self._run(tensors))
                on_captured()
            except RuntimeError as error:
                graphs.by_size.clear()
                graphs.settle()
                operation = last.name or "no operation"
                failure = f"capturing a step of {size} {graphs.unit} failed after {operation}: {error}"
                if self._is_required:
                    raise ConfigError(f"no CUDA graphs: {failure}; use --enforce-eager") from error
                kind = "mixed steps" if is_mixed else "steps"
                logger.warning("no CUDA graphs: %s; %s run eagerly", failure, kind)
                return False
        graphs.settle()
        if graphs.by_size:
            logger.info(
                "captured %d CUDA graphs, up to %d %s, in %.1f s",
                len(graphs.by_size),
                max(graphs.by_size),
                graphs.unit,
                time.perf_counter() - started,
            )
        return True

    def _padding(self, size: int, is_mixed: bool) -> dict[str, int]:
        """Return what `DeviceInputs.tensors` pads a step of this kind to."""
        return {"num_rows": self._inputs.num_slots, "num_tokens": size} if is_mixed else {"num_rows": size}

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
        is_mixed = not is_decode
        if is_mixed:
            if agreed is not None or step.query_lens.max() <= MIN_QUERIES:
                return None
            count = wanted = step.num_tokens
        graphs = self._mixed if is_mixed else self._decodes
        size = graphs.size_for(wanted)
        if not size:
            return None
        tensors = self._inputs.tensors(step, **self._padding(size, is_mixed))
        graph = graphs.by_size[size]
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
