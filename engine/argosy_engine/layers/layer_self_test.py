"""Self-test of the Triton kernels of norms, gated activations, experts, Gated DeltaNets, Mamba and short convolutions:
small inputs of the model's widths, on the device, against plain torch in float32. That of attention:
`attention.self_test`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch
from msgspec.structs import replace

from argosy_engine.attention.layer import StateLayer
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.params import DeltaNetParams, MambaParams, ShortConvParams, StateParams
from argosy_engine.layers.delta_net import DeltaNetWeights, TorchDeltaNet, TritonDeltaNet
from argosy_engine.layers.experts import ExpertsSpec, SeparateExperts, StackedExperts, TritonExperts
from argosy_engine.layers.fp8_linear import FP8, MAX_FP8, quantized
from argosy_engine.layers.layer_kernels import GatedActivation, LayerKernels, TorchLayerKernels
from argosy_engine.layers.linear import GatedLinear, Linear
from argosy_engine.layers.linear_kernels import SplitGatedLinear, TorchLinear
from argosy_engine.layers.mamba import MambaWeights, TorchMamba, TritonMamba
from argosy_engine.layers.short_conv import ShortConvWeights, TorchShortConv, TritonShortConv
from argosy_engine.model_configs.experts_config import ExpertsConfig, RoutingSpec
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.quantized_rows import Activations, QuantizedRows, RowQuantization

_MAX_ERROR_RATIO = 2.0
"""How many times torch's error in the same dtype a kernel's error may be."""
_FLOOR = 1e-4
"""Error that is always allowed; torch in float32 has none against itself."""
_ROWS = 5
_MAX_EXPERTS = 16
"""More would only take memory."""
_DELTA_TOKENS, _DELTA_BLOCKS = 7, 4
"""Tokens of two steps, and blocks with states."""
_EPS = 1e-6
_FP8_SCALE = 1 / 32
"""Scale of all rows: magnitudes of up to 14 are in range."""

Outputs = Sequence[torch.Tensor]


@torch.inference_mode()
def layer_self_test(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    tensor_parallel_size: int = 1,
    *,
    has_fp8_products: bool = False,
) -> str | None:
    """Run the kernels on the device; return why they must not be used, or None.

    Args:
        tensor_parallel_size: ranks that may share a Mamba layer's groups.
        has_fp8_products: whether products of the model want their inputs in FP8.
    """
    inputs = _Inputs(config, device, has_fp8_products, tensor_parallel_size)
    try:
        from argosy_engine.layers.triton_layer_kernels import TritonLayerKernels

        ours = {name: list(out) for name, out in inputs.outputs(TritonLayerKernels(), dtype)}
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a kernel's fault shows here
    except Exception as error:  # whatever a compiler or a driver raise
        return f"a layer's kernels failed with {type(error).__name__}: {str(error)[:300]}"
    plain = TorchLayerKernels()
    truth = {name: list(out) for name, out in inputs.outputs(plain, torch.float32)}
    theirs = {name: list(out) for name, out in inputs.outputs(plain, dtype)}
    for name, out in ours.items():
        allowed = _MAX_ERROR_RATIO * _error(theirs[name], truth[name]) + _FLOOR
        error = _error(out, truth[name])
        if not error <= allowed:  # NaN is an error, too
            return f"{name} {'are' if name == 'experts' else 'is'} wrong by {error:.2g} where {allowed:.2g} is allowed"
    return None


def _error(outputs: Outputs, truth: Outputs) -> float:
    return max(
        float((ours.float() - theirs).abs().max()) for ours, theirs in zip(outputs, truth, strict=True)
    )


def _plain(out: Activations) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.values.float() * out.scales


def _quantized_by_torch(x: torch.Tensor, quantization: RowQuantization) -> QuantizedRows:
    if quantization.scale is None:
        values, scales = quantized(x)
        return QuantizedRows(values, scales.unsqueeze(1))
    values = (x.float() / quantization.scale).clamp(-MAX_FP8, MAX_FP8).to(FP8)
    return QuantizedRows(values, quantization.scale.expand(len(x), 1))


class _Inputs:
    """Random tensors of the widths of a model's layers, the same for all kernels and dtypes."""

    def __init__(
        self, config: ModelConfig, device: torch.device, has_fp8_products: bool, tensor_parallel_size: int
    ) -> None:
        self._device = device
        self._has_fp8_products = has_fp8_products
        self._generator = torch.Generator().manual_seed(0)
        hidden = config.hidden_size
        self._x, self._residual = self._draw(2, _ROWS, hidden)
        self._norms = 1 + self._draw(2, hidden) / 4
        self._gate_up = self._draw(_ROWS, 2 * getattr(config, "intermediate_size", hidden))
        self._experts: ExpertsSpec | None = None
        experts: ExpertsConfig | None = getattr(config, "experts", None)
        if experts is not None:
            routing = _smaller(experts.routing)
            count, inner, width = routing.num_experts, experts.inner, experts.latent_size or hidden
            self._experts = spec = ExpertsSpec("", routing, width, inner, experts.activation)
            rows = (len(spec.layers) - 1) * inner
            self._tokens = self._draw(_ROWS, width)
            self._router_logits = self._draw(_ROWS, count)
            self._correction = self._draw(count) / 4 if routing.has_correction else None
            self._w1 = self._draw(count, rows, width) / width**0.5
            self._w2 = self._draw(count, width, inner) / inner**0.5
            has_biases = experts.names.biases is not None
            self._biases = (self._draw(count, rows), self._draw(count, width)) if has_biases else None
        self._delta_net: DeltaNetParams | None = getattr(
            config, "delta_net", None
        )  # not every family has one
        if self._delta_net is not None:
            self._delta_net = params = _fewer_heads(self._delta_net)
            heads, num_inputs = params.num_value_heads, params.num_channels + params.num_values
            self._delta_inputs = self._draw(_DELTA_TOKENS, num_inputs), self._draw(_DELTA_TOKENS, 2 * heads)
            conv, norm = (
                self._draw(params.kernel_size, params.num_channels),
                1 + self._draw(params.value_dim) / 4,
            )
            rates, dt_bias = self._draw(heads).exp(), self._draw(heads)
            self._delta_weights = DeltaNetWeights(conv, rates, dt_bias, norm, _EPS)
        self._mamba: MambaParams | None = getattr(config, "mamba", None)
        if self._mamba is not None:
            self._mamba = of = _fewer_groups(self._mamba.of_rank(tensor_parallel_size))
            self._mamba_inputs = self._draw(_DELTA_TOKENS, of.num_inputs)
            self._mamba_weights = MambaWeights(
                self._draw(of.kernel_size, of.num_channels),
                self._draw(of.num_channels),
                self._draw(of.num_heads).exp(),
                self._draw(of.num_heads),
                self._draw(of.num_heads),
                1 + self._draw(of.num_values) / 4,
                _EPS,
            )

        self._short_conv: ShortConvParams | None = getattr(config, "short_conv", None)
        if self._short_conv is not None:
            width = self._short_conv.num_channels
            self._conv_inputs = self._draw(_DELTA_TOKENS, 3 * width)
            factors = self._draw(self._short_conv.kernel_size, width)
            self._conv_weights = ShortConvWeights(factors, self._draw(width))

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device)

    def outputs(self, kernels: LayerKernels, dtype: torch.dtype) -> Iterator[tuple[str, Outputs]]:
        """Yield the results of every kind of layer, by its name. Those of experts depend on the kind of kernels."""
        x, norm, x_norm = (each.to(dtype) for each in (self._x, *self._norms))
        yield "RMSNorm", [kernels.rms_norm(x, norm, _EPS)]
        for x_weight in (None, x_norm):
            residual = self._residual.to(dtype, copy=True)
            yield "add + RMSNorm", [kernels.add_rms_norm(x, residual, norm, _EPS, x_weight), residual]
        for name, activate in kernels.gated_activations.items():
            yield name, [_plain(activate(self._gate_up.to(dtype)))]
        if self._has_fp8_products:
            for scale in (None, torch.full((1,), _FP8_SCALE, device=self._device)):
                yield from self._fp8_outputs(kernels, dtype, RowQuantization(scale))
        if self._experts is not None:
            activation = None
            if isinstance(kernels, TorchLayerKernels):
                activation = kernels.gated_activations[self._experts.activation]
            yield "experts", [self._run_experts(self._experts, dtype, activation)]
        if self._delta_net is not None:
            delta_net = TorchDeltaNet if isinstance(kernels, TorchLayerKernels) else TritonDeltaNet
            inputs = self._delta_inputs
            run = delta_net(self._delta_net, self._delta_weights)
            yield "Gated DeltaNet", self._run_states(self._delta_net.state, run, inputs, dtype)
        if self._mamba is not None:
            mamba = TorchMamba if isinstance(kernels, TorchLayerKernels) else TritonMamba
            has_means = self._mamba.norm is not None and self._mamba.group_ranks > 1
            of_mamba = mamba(self._mamba, self._mamba_weights, _as_they_are if has_means else None)
            yield "Mamba", self._run_states(self._mamba.state, of_mamba, (self._mamba_inputs,), dtype)
        if self._short_conv is not None:
            conv = TorchShortConv if isinstance(kernels, TorchLayerKernels) else TritonShortConv
            of_conv, given = conv(self._conv_weights), (self._conv_inputs,)
            yield "short convolution", self._run_states(self._short_conv.state, of_conv, given, dtype)

    def _fp8_outputs(
        self, kernels: LayerKernels, dtype: torch.dtype, quantization: RowQuantization
    ) -> Iterator[tuple[str, Outputs]]:
        suffix = " in FP8" + (" with one scale" if quantization.scale is not None else "")
        x, norm, x_norm = (each.to(dtype) for each in (self._x, *self._norms))

        def widened(out: Activations) -> torch.Tensor:
            """Plain torch quantises nothing: in the model's dtype it is rounded here, in float32 it is the truth."""
            if isinstance(out, torch.Tensor) and dtype is not torch.float32:
                out = _quantized_by_torch(out, quantization)
            return _plain(out)

        yield "RMSNorm" + suffix, [widened(kernels.quantized_rms_norm(x, norm, _EPS, quantization))]
        for x_weight in (None, x_norm):
            residual = self._residual.to(dtype, copy=True)
            out = kernels.quantized_add_rms_norm(x, residual, norm, _EPS, x_weight, quantization)
            yield "add + RMSNorm" + suffix, [widened(out), residual]
        for name in kernels.gated_activations:
            activate = kernels.quantized_gated_activation(name, quantization)
            yield name + suffix, [widened(activate(self._gate_up.to(dtype)))]

    def _run_states(
        self,
        params: StateParams,
        run: Callable[..., torch.Tensor],
        inputs: Sequence[torch.Tensor],
        dtype: torch.dtype,
    ) -> Outputs:
        """Compute two steps of two requests, of which one moves to another block; return outputs and states.

        Args:
            run: a kernel of a layer that keeps these states.
            inputs: what it gets of a step's tokens, each [_DELTA_TOKENS, width].
        """
        state = StateLayer(params, dtype)
        device = self._device
        shapes = [((_DELTA_BLOCKS, *shape), each) for shape, each in state.tensors]
        state.bind([torch.zeros(shape, dtype=each, device=device) for shape, each in shapes], _DELTA_TOKENS)
        given = [each.to(dtype) for each in inputs]
        outputs, first = [], 0
        for ends, lens, blocks in (([1, 5], [1, 4], [1, 2]), ([1, 2], [2, 5], [3, 2])):
            table = torch.tensor([[block] for block in blocks], dtype=torch.int32, device=device)
            if first:
                for each in state.states:
                    each[3] = each[1]
            starts, seq_lens = np.array([0, *ends], np.int32), np.array(lens, np.int32)
            count = ends[-1]
            meta = AttentionMetadata(
                num_decodes=1 if not first else 2,
                query_start_loc=torch.from_numpy(starts).to(device),
                seq_lens=torch.from_numpy(seq_lens).to(device),
                positions=torch.zeros(count, dtype=torch.int64, device=device),
                slot_mapping=torch.zeros(count, dtype=torch.int64, device=device),
                block_table=table,
                query_start_loc_cpu=starts,
                seq_lens_cpu=seq_lens,
            )
            rows = slice(first, first + count)
            outputs.append(run(*(each[rows] for each in given), state, meta))
            first += count
        return [*outputs, *state.states]

    def _run_experts(
        self, spec: ExpertsSpec, dtype: torch.dtype, activation: GatedActivation | None
    ) -> torch.Tensor:
        """Run the experts one by one with an activation, or all at once."""
        w1, w2 = self._w1.to(dtype), self._w2.to(dtype)
        b1, b2 = (None, None) if self._biases is None else (each.to(dtype) for each in self._biases)
        slots = torch.arange(_ROWS, device=self._device)
        if activation is None:
            stacked = StackedExperts(w1, w2, gate_up_bias=b1, down_bias=b2)
            experts = TritonExperts(spec, stacked, self._correction)
            return experts(self._tokens.to(dtype), self._router_logits, slots)
        layers = {
            index: (
                GatedLinear(
                    SplitGatedLinear(TorchLinear(w1[index], None if b1 is None else b1[index]), activation)
                ),
                Linear(TorchLinear(w2[index], None if b2 is None else b2[index])),
            )
            for index in range(len(w1))
        }
        separate = SeparateExperts(spec, layers, self._correction)
        return separate(self._tokens.to(dtype), self._router_logits, slots)


def _fewer_heads(params: DeltaNetParams) -> DeltaNetParams:
    """Return a Gated DeltaNet with as many value heads per key head, and two key heads at most."""
    shared, count = params.num_value_heads // params.num_key_heads, min(params.num_key_heads, 2)
    return replace(params, num_key_heads=count, num_value_heads=count * shared)


def _as_they_are(squares: torch.Tensor) -> torch.Tensor:
    """Stands for `GroupMeans` of ranks whose heads have nothing to add."""
    return squares


def _fewer_groups(params: MambaParams) -> MambaParams:
    """Return a Mamba layer with two groups at most of two heads at most."""
    shared, count = params.num_heads // params.num_groups, min(params.num_groups, 2)
    return replace(params, num_groups=count, num_heads=count * min(shared, 2))


def _smaller(routing: RoutingSpec) -> RoutingSpec:
    """Return the routing among fewer experts, in as many groups if there are enough for them."""
    count = min(routing.num_experts, _MAX_EXPERTS)
    per_token = min(routing.experts_per_token, count)
    for groups, taken in ((routing.num_groups, routing.groups_per_token), (1, 1)):
        with suppress(ValueError):  # too few experts in groups
            return replace(
                routing,
                num_experts=count,
                experts_per_token=min(per_token, max(count // groups * taken, 1)),
                num_groups=groups,
                groups_per_token=taken,
            )
    raise AssertionError("without groups there are enough")
