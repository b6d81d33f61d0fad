"""Self-test: the kernels of attention and of the other layers compute a small step on the device before they are
trusted. A backend that is wrong gives way to the next.

A driver, a compiler or a device may do what no test on another machine has seen. The test runs the shapes of the
model's own layers against plain torch in float32: attention with prompts and decodes over shuffled blocks, norms, gated
activations, products by packed integers and in FP8, experts, Gated DeltaNets, Mamba and short convolutions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from msgspec.structs import replace

from argosy_engine.attention.backend import (
    Attention,
    AttentionBackend,
    AttentionLayer,
    AttentionMetadata,
    AttentionWeights,
    LatentAttention,
    LatentWeights,
    RotaryEmbedding,
    StateLayer,
    metadata_of,
)
from argosy_engine.attention.params import (
    AttentionParams,
    DeltaNetParams,
    LatentAttentionParams,
    MambaParams,
    ShortConvParams,
    StateParams,
)
from argosy_engine.attention.selector import (
    AUTO,
    BIDIRECTIONAL_BACKENDS,
    AttentionNeeds,
    BackendChoice,
    load_backend,
    select_backend,
)
from argosy_engine.attention.torch_attn import TorchBackend
from argosy_engine.errors import ConfigError
from argosy_engine.layers.delta_net import DeltaNetWeights, TorchDeltaNet, TritonDeltaNet
from argosy_engine.layers.experts import ExpertsSpec, SeparateExperts, StackedExperts, TritonExperts
from argosy_engine.layers.linear import SplitGatedLinear, TorchLinear
from argosy_engine.layers.linear_method import quantized, widened_mxfp4
from argosy_engine.layers.mamba import MambaWeights, TorchMamba, TritonMamba
from argosy_engine.layers.norms import GatedActivation, LayerKernels, TritonLayerKernels
from argosy_engine.layers.products import (
    FP8,
    MAX_FP8,
    BlockFp8Linear,
    Fp8Linear,
    TritonIntegers,
    quantize_rows,
)
from argosy_engine.layers.short_conv import ShortConvWeights, TorchShortConv, TritonShortConv
from argosy_engine.model_configs.experts_config import ExpertsConfig, RoutingSpec
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.model_configs.quantization_config import FP8_BLOCK
from argosy_engine.model_configs.weight_schemes import MX_GROUP
from argosy_engine.native.library import QuantizedWeight
from argosy_engine.quantized_rows import Activations, QuantizedRows, RowQuantization

_MAX_ERROR_RATIO = 2.0
"""How many times torch's error in the same dtype a kernel's error may be."""

_FLOOR = 1e-4
"""Error that is always allowed; torch in float32 has none against itself."""


def working_backend(
    needs: AttentionNeeds,
    forced: str,
    unavailable: Mapping[str, str],
    dtype: torch.dtype,
    device: torch.device,
    test_layers: Callable[[], str | None],
) -> BackendChoice:
    """Choose a backend that passes the self-test on the device. Plain torch is not tested.

    Args:
        forced: `--attention-backend`.
        unavailable: see `select_backend`.
        test_layers: returns why the Triton kernels of the other layers, which come with some backends, must not be
            used, or None.

    Raises:
        ConfigError: the forced backend cannot serve, or fails the test.
    """
    broken = dict(unavailable)
    while True:
        choice = select_backend(needs, forced, broken)
        if choice.name == "torch":
            return choice
        reason = attention_self_test(choice.name, needs, dtype, device)
        if reason is None and load_backend(choice.name, dtype).uses_triton:
            reason = test_layers()
        if reason is None:
            return choice
        if forced != AUTO:
            raise ConfigError(
                f"--attention-backend {forced} fails its test on this device: {reason}; use --attention-backend torch"
            )
        broken[choice.name] = reason


@torch.inference_mode()
def attention_self_test(
    name: str, needs: AttentionNeeds, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Run a backend on the device with the shapes of the model's layers; return why it must not be used, or None.

    Raises:
        ConfigError: the backend has left the device unusable for this process.
    """
    has_fp8 = needs.has_fp8_kv_cache
    if name not in BIDIRECTIONAL_BACKENDS:
        needs = needs._replace(has_key_ends=False)
    for layer in _test_layers(needs, dtype, device):
        for variant in layer.variants:
            try:
                outputs = layer.outputs(load_backend(name, dtype, has_fp8_kv_cache=has_fp8), dtype, variant)
                _synchronize(device)  # a kernel's fault shows here
            except Exception as error:  # whatever a compiler or a driver raise
                reason = f"it failed with {type(error).__name__}: {str(error)[:300]}"
                _check_usable(name, device, reason)
                return reason
            truth, theirs = (
                layer.outputs(TorchBackend(each, has_fp8_kv_cache=has_fp8), each, variant)
                for each in (torch.float32, dtype)
            )
            allowed = _MAX_ERROR_RATIO * _error(theirs, truth) + _FLOOR
            error = _error(outputs, truth)
            if not error <= allowed:  # NaN is an error, too
                return f"it is wrong by {error:.2g} where {allowed:.2g} is allowed ({layer.label})"
    return None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check_usable(name: str, device: torch.device, reason: str) -> None:
    try:
        _synchronize(device)
    except Exception as error:
        raise ConfigError(
            f"attention backend {name} has left {device} unusable: {reason}; start again with --attention-backend torch"
        ) from error


def _error(outputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    return max(
        float((ours.float() - theirs).abs().max()) for ours, theirs in zip(outputs, truth, strict=True)
    )


_Step = Sequence[tuple[int, int]]
"""First and end position of the tokens that each of three requests computes."""

_STEPS: Sequence[_Step] = (
    ((0, 37), (0, 90), (0, 5)),
    ((37, 38), (90, 91), (5, 33)),
    ((38, 39), (91, 92), (33, 34)),
)
"""Prompts; two decodes and a chunk; decodes alone, whose kernels have other tiles and split the keys."""

_FIRST_TOKENS: Sequence[_Step] = (((0, 1), (0, 1), (0, 1)),)

_MAX_TOKENS = 96

_TABLE_TOKENS = 1024
"""What the block table has room for, by which kernels choose how far they split the keys of a decode."""

_MAX_WINDOW = 40
"""Longer sliding windows are shortened to this, so that the test sees their ends."""


class _Variant(NamedTuple):
    """Whether heads are normed and rotated, which are kernels of their own, and the steps that are computed so."""

    has_norms: bool
    has_rotary: bool
    steps: Sequence[_Step]


_VARIANTS = (
    _Variant(True, True, _STEPS),
    _Variant(False, True, _FIRST_TOKENS),
    _Variant(False, False, _FIRST_TOKENS),
)


def _num_tokens(step: _Step) -> int:
    return sum(end - start for start, end in step)


class _TestLayer(ABC):
    """One layer's random weights and inputs, the same for every backend."""

    label: str
    variants: Sequence[_Variant] = _VARIANTS

    def __init__(self, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._block_size, self._dtype, self._device = block_size, dtype, device
        self._generator = torch.Generator().manual_seed(0)
        blocks = -(-_MAX_TOKENS // block_size)
        self._num_blocks = 3 * blocks
        order = torch.randperm(self._num_blocks, generator=self._generator).to(torch.int32)
        self._table = torch.zeros(3, -(-_TABLE_TOKENS // block_size), dtype=torch.int32)
        self._table[:, :blocks] = order.view(3, blocks)

    @abstractmethod
    def outputs(self, backend: AttentionBackend, dtype: torch.dtype, variant: _Variant) -> list[torch.Tensor]:
        """Compute the steps and return their results."""

    def _drawn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device, self._dtype)

    def _frequencies(self, width: int) -> torch.Tensor:
        return (1e4 ** (-torch.arange(0, width // 2) * 2 / width)).float()

    def _bind_stale(self, attention: AttentionLayer) -> None:
        """Give a layer a cache of stale values, NaN included, which must not reach a result."""
        shape = attention.kv_cache_shape(self._num_blocks, self._block_size)
        attention.bind(torch.full(shape, torch.nan, device=self._device).to(attention.kv_cache_dtype))

    def _metadata(self, step: _Step) -> AttentionMetadata:
        rows = [(row, *ends) for row, ends in enumerate(step)]
        return metadata_of(rows, self._table, self._block_size, self._device)


class _HeadsLayer(_TestLayer):
    """Attention to keys and values of heads."""

    def __init__(
        self,
        params: AttentionParams,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        has_key_ends: bool = False,
    ) -> None:
        super().__init__(block_size, dtype, device)
        self._has_key_ends = has_key_ends
        window = params.sliding_window and min(params.sliding_window, _MAX_WINDOW)
        self._params = replace(params, sliding_window=window)
        self.label = f"{params.num_heads} heads of {params.head_dim}, {params.num_kv_heads} KV heads"
        width = (params.num_heads + 2 * params.num_kv_heads) * params.head_dim
        self._qkv = [self._drawn(_num_tokens(step), width) for step in _STEPS]
        norms = 1 + torch.rand(2, params.head_dim, generator=self._generator)
        self._norms = norms.to(device, dtype)
        self._sinks = torch.randn(params.num_heads, generator=self._generator).to(device)
        self._slopes = torch.rand(params.num_heads, generator=self._generator).to(device)

    def outputs(self, backend: AttentionBackend, dtype: torch.dtype, variant: _Variant) -> list[torch.Tensor]:
        frequencies = self._frequencies(self._params.head_dim)
        rotary = (
            RotaryEmbedding(frequencies, _MAX_TOKENS, dtype, self._device) if variant.has_rotary else None
        )
        q_norm, k_norm = self._norms.to(dtype) if variant.has_norms else (None, None)
        weights = AttentionWeights(rotary, q_norm, k_norm, 1e-6)
        if self._params.has_sinks:
            weights = weights._replace(sinks=self._sinks)
        if self._params.has_alibi:
            weights = weights._replace(alibi_slopes=self._slopes)
        if backend.kv_cache_dtype is torch.float8_e4m3fn:
            k_scale, v_scale = torch.tensor([[0.5], [0.25]], device=self._device)
            weights = weights._replace(k_scale=k_scale, v_scale=v_scale)
        attention = Attention(self._params, backend, weights)
        self._bind_stale(attention)
        outputs: list[torch.Tensor] = [
            attention(qkv[: _num_tokens(step)].to(dtype, copy=True), self._metadata(step))
            for qkv, step in zip(self._qkv, variant.steps, strict=False)
        ]
        if self._has_key_ends and variant.steps is _STEPS:
            outputs += [
                attention(qkv[: _num_tokens(step)].to(dtype, copy=True), _to_the_end(self._metadata(step)))
                for qkv, step in zip(self._qkv, _STEPS[:2], strict=False)  # which have prompts
            ]
        return outputs


def _to_the_end(meta: AttentionMetadata) -> AttentionMetadata:
    """Let all tokens of each request attend to all of them."""
    meta.key_ends = meta.seq_lens.repeat_interleave(meta.query_start_loc.diff())
    return meta


class _LatentLayer(_TestLayer):
    """Multi-head latent attention."""

    variants = (_Variant(True, True, _STEPS),)

    def __init__(
        self, params: LatentAttentionParams, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(block_size, dtype, device)
        self._params = params
        self.label = (
            f"{params.num_heads} heads, latents of {params.kv_lora_rank} and {params.qk_rope_head_dim}"
        )
        width = params.num_heads * params.qk_head_dim
        self._q, self._compressed = (
            [self._drawn(_num_tokens(step), size) for step in _STEPS] for size in (width, params.cached_dim)
        )
        self._norm = 1 + torch.rand(params.kv_lora_rank, generator=self._generator)
        up = self._drawn(params.num_heads, params.qk_nope_head_dim + params.v_head_dim, params.kv_lora_rank)
        self._kv_b = up * params.kv_lora_rank**-0.5

    def outputs(self, backend: AttentionBackend, dtype: torch.dtype, variant: _Variant) -> list[torch.Tensor]:
        frequencies = self._frequencies(self._params.qk_rope_head_dim)
        rotary = RotaryEmbedding(frequencies, _MAX_TOKENS, dtype, self._device)
        norm = self._norm.to(self._device, self._dtype).to(dtype)
        kv_b = self._kv_b.to(dtype)
        weights = LatentWeights.of_kv_b(kv_b, self._params.qk_nope_head_dim, rotary, norm, 1e-6)
        attention = LatentAttention(self._params, backend, weights)
        self._bind_stale(attention)
        return [
            attention(q.to(dtype, copy=True), compressed.to(dtype), self._metadata(step))
            for q, compressed, step in zip(self._q, self._compressed, variant.steps, strict=True)
        ]


def _test_layers(needs: AttentionNeeds, dtype: torch.dtype, device: torch.device) -> Iterator[_TestLayer]:
    """Yield each kind of the model's layers once."""
    for heads in dict.fromkeys(needs.plain_layers):
        has_key_ends = needs.has_key_ends
        yield _HeadsLayer(heads, needs.block_size, dtype, device, has_key_ends=has_key_ends)
    for latent in dict.fromkeys(needs.latent_layers):
        yield _LatentLayer(latent, needs.block_size, dtype, device)


_ROWS = 5
_PACKED_OUTPUTS, _PACKED_TOKENS = 80, (1, 7, 33)
_FP8_INPUTS = 448
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
    packed: Sequence[tuple[int, int | None]] = (),
    has_mxfp4: bool = False,
) -> str | None:
    """Run the kernels on the device; return why they must not be used, or None.

    Args:
        tensor_parallel_size: ranks that may share a Mamba layer's groups.
        has_fp8_products: whether products of the model want their inputs in FP8.
        packed: bits and group sizes of integers that the model multiplies by as they are packed (`packed_forms`).
        has_mxfp4: whether experts in MXFP4 stay packed.
    """
    inputs = _Inputs(config, device, has_fp8_products, packed, has_mxfp4, tensor_parallel_size)
    try:
        ours = {name: list(out) for name, out in inputs.outputs(TritonLayerKernels(), dtype)}
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a kernel's fault shows here
    except Exception as error:  # whatever a compiler or a driver raise
        return f"a layer's kernels failed with {type(error).__name__}: {str(error)[:300]}"
    plain = LayerKernels()
    truth = {name: list(out) for name, out in inputs.outputs(plain, torch.float32)}
    theirs = {name: list(out) for name, out in inputs.outputs(plain, dtype)}
    for name, out in ours.items():
        allowed = _MAX_ERROR_RATIO * _error(theirs[name], truth[name]) + _FLOOR
        error = _error(out, truth[name])
        if not error <= allowed:  # NaN is an error, too
            verb = "are" if name.startswith("experts") else "is"
            return f"{name} {verb} wrong by {error:.2g} where {allowed:.2g} is allowed"
    return None


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
        self,
        config: ModelConfig,
        device: torch.device,
        has_fp8_products: bool,
        packed: Sequence[tuple[int, int | None]],
        has_mxfp4: bool,
        tensor_parallel_size: int,
    ) -> None:
        self._device = device
        self._has_fp8_products = has_fp8_products
        self._generator = torch.Generator().manual_seed(0)
        hidden = config.hidden_size
        self._x, self._residual = self._draw(2, _ROWS, hidden)
        self._norms = 1 + self._draw(2, hidden) / 4
        self._gate_up = self._draw(_ROWS, 2 * getattr(config, "intermediate_size", hidden))
        self._packed = [self._integers(*form) for form in packed]
        if has_fp8_products:
            width = min(hidden // 16 * 16, _FP8_INPUTS)
            self._fp8_weight = self._draw(_PACKED_OUTPUTS, width)
            self._fp8_scales = (1 + self._draw(-(-width // FP8_BLOCK), _PACKED_OUTPUTS) / 8) / width**0.5
            self._fp8_inputs = self._draw(max(_PACKED_TOKENS), width)
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
            self._mxfp4 = [self._pairs(each) for each in (self._w1, self._w2)] if has_mxfp4 else []
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

    def _pairs(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a weight [experts, rows, columns] in MXFP4: pairs and exponents."""
        *sizes, columns = weight.shape
        drawn = torch.randint(0, 256, (*sizes, columns // 2), generator=self._generator)
        # Numbers of up to 6 become those of a weight whose columns are summed.
        exponents = torch.full((*sizes, columns // MX_GROUP), 127 - round(math.log2(2 * columns**0.5)))
        exponents += torch.randint(0, 2, exponents.shape, generator=self._generator)
        return drawn.to(self._device, torch.uint8), exponents.to(self._device, torch.uint8)

    def _integers(self, bits: int, group: int | None) -> tuple[QuantizedWeight, torch.Tensor]:
        """Draw a weight of integers with zero points, and inputs for it."""
        inputs, half = 3 * (group or 96), 1 << bits - 1
        integers = (self._draw(_PACKED_OUTPUTS, inputs) * half / 2).round().clamp(-half, half - 1)
        scales = (1 + self._draw(_PACKED_OUTPUTS, 3 if group else 1) / 8) / (half * inputs**0.5)
        zeros = (self._draw(*scales.shape) * half / 4).round().clamp(-half, half - 1)
        weight = QuantizedWeight(bits, integers.to(torch.int8), scales, -scales * zeros)
        return weight, self._draw(max(_PACKED_TOKENS), inputs)

    def outputs(self, kernels: LayerKernels, dtype: torch.dtype) -> Iterator[tuple[str, Outputs]]:
        """Yield the results of every kind of layer, by its name. Those of experts depend on the kind of kernels."""
        x, norm, x_norm = (each.to(dtype) for each in (self._x, *self._norms))
        yield "RMSNorm", [kernels.rms_norm(x, norm, _EPS)]
        for x_weight in (None, x_norm):
            residual = self._residual.to(dtype, copy=True)
            yield "add + RMSNorm", [kernels.add_rms_norm(x, residual, norm, _EPS, x_weight), residual]
        for name, activate in kernels.gated_activations.items():
            yield name, [_plain(activate(self._gate_up.to(dtype)))]
        for weight, x in self._packed:
            if isinstance(kernels, TritonLayerKernels):
                product = TritonIntegers().linear(weight, None, dtype)
            else:
                product = TorchLinear(weight.widened(dtype), None)
            tokens = x.to(dtype)
            yield (
                f"a product by int{weight.bits} in groups of {weight.group}",
                [product(tokens[:count]) for count in _PACKED_TOKENS],
            )
        if self._has_fp8_products:
            for scale in (None, torch.full((1,), _FP8_SCALE, device=self._device)):
                yield from self._fp8_outputs(kernels, dtype, RowQuantization(scale))
            yield "a product by FP8 in blocks", self._block_products(kernels, dtype)
        if self._experts is not None:
            activation = None
            if not isinstance(kernels, TritonLayerKernels):
                activation = kernels.gated_activations[self._experts.activation]
            yield "experts", [self._run_experts(self._experts, dtype, activation)]
            if self._mxfp4:
                (w1, s1), (w2, s2) = self._mxfp4
                if activation is None:
                    stacked = StackedExperts(w1, w2, s1, s2)
                else:
                    stacked = StackedExperts(widened_mxfp4(w1, s1).to(dtype), widened_mxfp4(w2, s2).to(dtype))
                yield "experts in MXFP4", [self._run_experts(self._experts, dtype, activation, stacked)]
        if self._delta_net is not None:
            delta_net = TritonDeltaNet if isinstance(kernels, TritonLayerKernels) else TorchDeltaNet
            inputs = self._delta_inputs
            run = delta_net(self._delta_net, self._delta_weights)
            yield "Gated DeltaNet", self._run_states(self._delta_net.state, run, inputs, dtype)
        if self._mamba is not None:
            mamba = TritonMamba if isinstance(kernels, TritonLayerKernels) else TorchMamba
            has_means = self._mamba.norm is not None and self._mamba.group_ranks > 1
            of_mamba = mamba(self._mamba, self._mamba_weights, _as_they_are if has_means else None)
            yield "Mamba", self._run_states(self._mamba.state, of_mamba, (self._mamba_inputs,), dtype)
        if self._short_conv is not None:
            conv = TritonShortConv if isinstance(kernels, TritonLayerKernels) else TorchShortConv
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
        weight = self._fp8_weight.to(FP8)
        if isinstance(kernels, TritonLayerKernels):
            product = Fp8Linear(weight, self._fp8_scales[0], None, quantization.scale, dtype, quantize_rows())
            found = product(x[:, : weight.shape[1]].contiguous())
        else:
            factors = (weight.float() * self._fp8_scales[0][:, None]).to(dtype)
            found = widened(x[:, : weight.shape[1]]).to(dtype) @ factors.t()
        yield "a product" + suffix, [found]
        for x_weight in (None, x_norm):
            residual = self._residual.to(dtype, copy=True)
            out = kernels.quantized_add_rms_norm(x, residual, norm, _EPS, x_weight, quantization)
            yield "add + RMSNorm" + suffix, [widened(out), residual]
        for name in kernels.gated_activations:
            activate = kernels.quantized_gated_activation(name, quantization)
            yield name + suffix, [widened(activate(self._gate_up.to(dtype)))]

    def _block_products(self, kernels: LayerKernels, dtype: torch.dtype) -> Outputs:
        """Multiply one token, and more than the kernel for few takes, which are quantised."""
        weight, x = self._fp8_weight.to(FP8), self._fp8_inputs.to(dtype)
        blocks = self._fp8_scales[: -(-weight.shape[1] // FP8_BLOCK)].contiguous()
        counts = (1, len(x))
        if isinstance(kernels, TritonLayerKernels):
            product = BlockFp8Linear(weight, blocks, None)
            return [product(x[:count]) for count in counts]
        factors = blocks.repeat_interleave(FP8_BLOCK, dim=0)[: weight.shape[1]].t()
        widened = (weight.float() * factors).to(dtype)
        if dtype is not torch.float32:
            parts = [_quantized_by_torch(each, RowQuantization(None)) for each in x.split(FP8_BLOCK, dim=1)]
            rounded = torch.cat([_plain(each) for each in parts], dim=1).to(dtype)
            return [x[:1] @ widened.t(), rounded @ widened.t()]
        return [x[:count] @ widened.t() for count in counts]

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
        for step, blocks in (([(0, 0, 1), (1, 0, 4)], [1, 2]), ([(0, 1, 2), (1, 4, 5)], [3, 2])):
            if first:
                for each in state.states:
                    each[3] = each[1]
            meta = metadata_of(step, torch.tensor(blocks, dtype=torch.int32)[:, None], _DELTA_TOKENS, device)
            rows = slice(first, first + len(meta.positions))
            outputs.append(run(*(each[rows] for each in given), state, meta))
            first = rows.stop
        return [*outputs, *state.states]

    def _run_experts(
        self,
        spec: ExpertsSpec,
        dtype: torch.dtype,
        activation: GatedActivation | None,
        stacked: StackedExperts | None = None,
    ) -> torch.Tensor:
        """Run the experts one by one with an activation, or all at once.

        Args:
            stacked: weights of experts, without biases; None: those that were drawn.
        """
        if stacked is None:
            stacked = StackedExperts(self._w1.to(dtype), self._w2.to(dtype))
        w1, w2 = stacked.gate_up, stacked.down
        b1, b2 = (None, None) if self._biases is None else (each.to(dtype) for each in self._biases)
        slots = torch.arange(_ROWS, device=self._device)
        if activation is None:
            stacked = stacked._replace(gate_up_bias=b1, down_bias=b2)
            experts = TritonExperts(spec, stacked, self._correction)
            return experts(self._tokens.to(dtype), self._router_logits, slots)
        layers = {
            index: (
                SplitGatedLinear(TorchLinear(w1[index], None if b1 is None else b1[index]), activation),
                TorchLinear(w2[index], None if b2 is None else b2[index]),
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
