"""Builds the engine's model runner on fake CUDA tensors, runs steps on it and counts what they do on the device.

A model is built twice, with few layers, and the counts of the whole model follow from the difference: layers are the
same, so that a step of 48 layers is not followed operation by operation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from argosy_engine.attention.backend import ModelInputs
from argosy_engine.attention.selector import load_backend
from argosy_engine.checkpoint.weights import DummyWeights, WeightPlan
from argosy_engine.layers.experts import ExpertsSpec, StackedExperts, TritonExperts
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.linear_method import linear_method
from argosy_engine.messages import NewRequest, SchedulerOutput
from argosy_engine.model_configs.experts_config import ExpertsConfig
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.model_configs.quantization_config import FP8_BLOCK, HEAD_BITS, INTEGER_BITS
from argosy_engine.models import registry
from argosy_engine.models.config_file import parse_config
from argosy_engine.models.loader import plan_weights
from argosy_engine.params import SamplingParams
from argosy_engine.sample.sampler import SamplerOptions
from argosy_engine.triton_kernels.launch import KNOWN_DEVICES, assume_device
from argosy_engine.worker.cuda_graphs import CapturedGraph
from argosy_engine.worker.model_runner import ModelRunner
from gpu_accounting.fake_device import CUDA, FakeRuntime, fake_cuda
from gpu_accounting.models import DENSE_LAYERS, MODELS, ONLINE, PERIODS
from gpu_accounting.step_trace import HiddenSync, Operation, StepTrace

BLOCK_SIZE = 16
CONTEXT = 1024
"""Tokens of each decoding request before the step."""
MAX_NUM_SEQS = 256
MAX_MODEL_LEN = 4096
GREEDY = SamplingParams(temperature=0.0, max_tokens=512)


@dataclass(frozen=True, slots=True)
class Shape:
    """A step: how many requests decode, and the prompts that are computed."""

    name: str
    decodes: int = 0
    prompts: tuple[int, ...] = ()


SHAPES = (
    Shape("prefill", prompts=(512,) * 4),
    Shape("mixed", decodes=8, prompts=(512,)),
    *(Shape(f"decode {count}", decodes=count) for count in (1, 8, 64, 256)),
)


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What a step of a whole model does on the device."""

    model: str
    shape: Shape
    layer: float
    """Launches per layer, of the layers that repeat."""
    rest: float
    """Launches outside the layers but those of sampling."""
    sampling: int
    """Launches of sampling."""
    copies_to_device: int
    copies_to_host: int
    blocking_copies: int
    num_bytes: float
    """Moved by all launches."""
    necessary_bytes: float
    """Of weights, keys, values and states that the step cannot do without."""
    hidden_sync: str = ""
    """Why the step could not be followed to its end: the host waits for the device there."""


class AccountedRunner:
    """A model runner on fake CUDA tensors.

    Args:
        num_layers: of the config, instead of all.
        quantization: `--quantization`.
    """

    def __init__(
        self, raw: dict[str, Any], num_layers: int, device: str = "H100", quantization: str | None = None
    ) -> None:
        self.config = parse_config({**raw, "num_hidden_layers": num_layers}, {}, {})
        self._traits = KNOWN_DEVICES[device]
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        runtime = FakeRuntime()
        self.trace = StepTrace(runtime)
        self._names = 0
        with self._on_device():
            backend = load_backend("triton", torch.bfloat16)
            weights = DummyWeights(torch.bfloat16, CUDA, 0)
            method = linear_method(
                self.config,
                quantization,
                dtype=weights.dtype,
                device=CUDA,
                uses_triton=backend.uses_triton,
            )
            factory = FirstExpertFactory(weights, backend, MAX_MODEL_LEN, method)
            model = registry.model_class(self.config.architecture)(self.config, factory)
            self.runner = ModelRunner(
                model,
                self.config,
                num_blocks=MAX_NUM_SEQS * (CONTEXT // BLOCK_SIZE + 2),
                block_size=BLOCK_SIZE,
                max_num_seqs=MAX_NUM_SEQS,
                max_num_batched_tokens=2048,
                max_model_len=MAX_MODEL_LEN,
                device=CUDA,
                sampling=SamplerOptions(vocab_size=self.config.vocab_size, kind="kernels"),
                runtime=runtime,
                num_states=MAX_NUM_SEQS + 1,
            )
        self._forward_inputs: list[torch.Tensor] = []
        self._mark_phases()

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
        return _step(requests, scheduled)

    def capture(self, sizes: list[int], mixed: list[int] | None = None) -> None:
        """Capture decode steps of these numbers of requests, and mixed steps of these numbers of tokens, as CUDA
        graphs, whose replays count as one launch."""
        with self._on_device(), self.trace.recording():
            assert self.runner.capture_graphs(sizes, _CountedGraphs(self.trace), mixed=mixed or [])

    def execute(self, step: SchedulerOutput) -> list[Operation]:
        """Launch a step and return its operations.

        Raises:
            HiddenSync: it waits for the device.
        """
        trace = self.trace
        trace.operations = []
        trace.enter("inputs")
        with self._on_device(), trace.recording():
            self.runner.execute(step)
        return trace.operations

    def finish(self, step: SchedulerOutput) -> None:
        """Take the requests of a step out of the batch."""
        with self._on_device():
            self.runner.execute(_step([], {}, list(step.num_scheduled_tokens)))

    def forward_addresses(self) -> list[tuple[int, int]]:
        """Return where the inputs of the last forward pass lie: the storage of each, and the offset in it."""
        return [
            (StorageWeakRef(tensor.untyped_storage()).cdata, tensor.storage_offset())
            for tensor in self._forward_inputs
        ]

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        with fake_cuda(self._mode), assume_device(self._traits):
            yield

    def _mark_phases(self) -> None:
        model: Any = self.runner.model
        sampler: Any = self.runner.batch.sampler
        trace, forward, logits, sample = self.trace, model.forward, model.logits, sampler.sample

        def marked_forward(inputs: ModelInputs) -> Any:
            trace.enter("forward")
            meta = inputs.meta
            trace.seq_lens = meta.seq_lens_cpu.tolist()
            names = ("query_start_loc", "seq_lens", "positions", "slot_mapping", "block_table")
            self._forward_inputs = [
                inputs.token_ids,
                inputs.positions,
                *(getattr(meta, name) for name in names),
            ]
            return forward(inputs)

        def marked_logits(hidden: Any) -> Any:
            trace.enter("logits")
            return logits(hidden)

        def marked_sample(*arguments: Any) -> Any:
            trace.enter("sampling")
            sampled = sample(*arguments)
            trace.enter("output")
            return sampled

        model.forward, model.logits, sampler.sample = marked_forward, marked_logits, marked_sample
        model.layers[:] = [_MarkedLayer(layer, trace) for layer in model.layers]


class _MarkedLayer:
    """A layer whose operations have a phase of their own."""

    def __init__(self, layer: Any, trace: StepTrace) -> None:
        self._layer, self._trace = layer, trace

    def __call__(self, *arguments: Any) -> Any:
        self._trace.enter("layer")
        out = self._layer(*arguments)
        self._trace.enter("forward")
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class FirstExpertFactory(LayerFactory):
    """Loads the first expert of a layer and allocates all: filling them one by one would take most of a count."""

    def experts(self, spec: ExpertsSpec) -> TritonExperts:
        loaded = self._method.load_experts(self.weights, replace(spec, held=range(1)))
        first, scale = loaded.gate_up, loaded.gate_up_scale
        block = FP8_BLOCK if scale is not None and scale.dim() == 3 else None
        stacked = StackedExperts.empty(spec, first.dtype, first.device, block)
        correction = None
        if spec.names.biases is not None:
            sizes = ((spec.num_experts, size) for size in (2 * spec.inner, spec.hidden))
            biases = [torch.empty(size, dtype=self.dtype, device=first.device) for size in sizes]
            stacked = stacked._replace(gate_up_bias=biases[0], down_bias=biases[1])
        if spec.routing.has_correction:
            name = spec.prefix + spec.names.correction
            correction = self.weights.take_scale(name, spec.num_experts, is_signed=True)
        return TritonExperts(spec, stacked, correction)


class _CountedGraphs:
    """A GraphApi that records replays."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedGraph:
        return _CountedGraph(run(), self._trace)


class _CountedGraph:
    def __init__(self, output: torch.Tensor, trace: StepTrace) -> None:
        self.output = output
        self._trace = trace

    def replay(self) -> None:
        self._trace.note_replay(len(self.output))


def decode_again(step: SchedulerOutput) -> SchedulerOutput:
    """Return the step that computes one more token of each request of a step."""
    return _step([], dict.fromkeys(step.num_scheduled_tokens, 1))


def count_steps(
    model: str, params: SamplingParams = GREEDY, shapes: tuple[Shape, ...] = SHAPES
) -> list[StepCounts]:
    """Count the steps of a published model."""
    raw, period = MODELS[model], PERIODS.get(model, 1)
    config = parse_config(raw, {}, {})
    plan = plan_weights(config, torch.bfloat16)
    dense = DENSE_LAYERS.get(model, 0)
    small, large = (
        AccountedRunner(raw, dense + depth, quantization=ONLINE.get(model)) for depth in (period, 2 * period)
    )
    return [_count(model, config, plan, period, shape, small, large, params) for shape in shapes]


def _count(
    model: str,
    config: ModelConfig,
    plan: WeightPlan,
    period: int,
    shape: Shape,
    small: AccountedRunner,
    large: AccountedRunner,
    params: SamplingParams,
) -> StepCounts:
    totals = []
    for runner in (small, large):
        step = runner.add(shape, params)
        try:
            operations = runner.execute(step)
            if not shape.prompts:  # the first step also sends the requests' block tables
                operations = runner.execute(decode_again(step))
        except HiddenSync as error:
            return StepCounts(model, shape, 0, 0, 0, 0, 0, 0, 0, 0, hidden_sync=str(error))
        finally:
            runner.finish(step)
        totals.append((operations, Counter(each.phase for each in operations if each.kind == "launch")))
    (few, few_launches), (many, many_launches) = totals
    layer = (many_launches["layer"] - few_launches["layer"]) / period
    layer_bytes = (sum(each.num_bytes for each in many) - sum(each.num_bytes for each in few)) / period
    # What layers share is computed by the first of them, and counts as outside.
    in_layers = few_launches["layer"] if model in DENSE_LAYERS else layer * period
    kinds = Counter(each.kind for each in many)
    return StepCounts(
        model=model,
        shape=shape,
        layer=layer,
        rest=sum(few_launches.values()) - in_layers - few_launches["sampling"],
        sampling=many_launches["sampling"],
        copies_to_device=kinds["copy to device"],
        copies_to_host=kinds["copy to host"],
        blocking_copies=kinds["blocking copy"],
        num_bytes=sum(each.num_bytes for each in many)
        + layer_bytes * (config.num_hidden_layers - large.config.num_hidden_layers),
        necessary_bytes=_necessary_bytes(config, plan, shape, ONLINE.get(model)),
    )


def _necessary_bytes(config: ModelConfig, plan: WeightPlan, shape: Shape, quantization: str | None) -> int:
    """Return the bytes of weights (of the experts that tokens can choose), keys, values and states that a step
    moves. Packed integers have a scale of 16 bits per 128."""
    tokens = shape.decodes + sum(shape.prompts)
    experts: ExpertsConfig | None = getattr(config, "experts", None)
    hit = 0.0
    if experts is not None:
        hit = min(1.0, tokens * experts.routing.experts_per_token / experts.routing.num_experts)
    weights = 0.0
    for name, dims in plan.shapes.items():
        if "embed_tokens" not in name or config.tie_word_embeddings:
            is_fp8 = f"{name}_scale" in plan.shapes or f"{name}_scale_inv" in plan.shapes
            element = 1.0 if is_fp8 else 4.0 if name.endswith(("_scale", "_scale_inv")) else 2.0
            if name.endswith(("_blocks", "_scales")):
                element = 1.0
            if quantization is not None and name.endswith(("_proj.weight", "lm_head.weight")):
                bits = HEAD_BITS if name.endswith("lm_head.weight") else INTEGER_BITS[quantization]
                element = bits / 8 + 2 / 128
            weights += element * math.prod(dims) * (hit if ".experts." in name else 1.0)
    kv = 0
    for layer in config.attention_layers:
        token = layer.kv_cache_spec(block_size=1, itemsize=2)
        seen = CONTEXT - token.first_read(CONTEXT - 1)
        kv += token.page_bytes * (shape.decodes * seen + sum(shape.prompts) + tokens)
    # States are read and written; those of prompts begin with the step.
    states = sum(layer.kv_cache_spec(itemsize=2).page_bytes for layer in config.state_layers)
    return int(weights) + kv + states * (2 * shape.decodes + len(shape.prompts))


def _step(
    new: list[NewRequest], scheduled: dict[str, int], finished: list[str] | None = None
) -> SchedulerOutput:
    return SchedulerOutput(new, {}, scheduled, sum(scheduled.values()), finished or [], {})
