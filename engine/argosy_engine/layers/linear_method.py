"""LinearMethod: how a model's linear layers are loaded and computed, as they are or quantised, and the choice of it.

A method decides which tensors of the checkpoint make up a layer, in which dtype they are read, how they are laid out,
and what multiplies by them. Models only describe their projections (`linear.LinearSpec`). Design: vLLM's
`LinearMethodBase`.

FP8 with a scale per output channel is multiplied in FP8, or widened to the engine's dtype at load. A scale per tensor
counts as equal scales of its channels, so that projections that are fused need no common scale, and one product serves
all schemes: rows of activations have scales of their own, channels of the weight too.

FP8 with a scale per block of the weight (DeepSeek-V3, arXiv 2412.19437) and experts in MXFP4 (gpt-oss; OCP Microscaling
Formats 1.0) are always widened, a few rows at a time, and take the memory of unquantised ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from argosy_engine.checkpoint.weights import Weights
from argosy_engine.errors import ConfigError
from argosy_engine.layers.experts import ExpertsSpec, StackedExperts
from argosy_engine.layers.linear import (
    GatedLinear,
    Linear,
    LinearSpec,
    SplitGatedLinear,
    gated_linear_of,
    linear_of,
    ordered,
)
from argosy_engine.layers.norms import GatedActivation
from argosy_engine.model_configs.experts_config import ExpertLayer
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.model_configs.quantization_config import (
    QuantizationConfig,
    check_online_quantization,
    check_quantization,
    no_fp8_product,
)
from argosy_engine.model_configs.sharding import Shard
from argosy_engine.quantized_rows import Activations, RowQuantization


class LinearMethod:
    """Loads weights in the engine's dtype, whatever the checkpoint's; subclasses load quantised ones.

    Args:
        is_traceable: see `linear_of`.
    """

    def __init__(self, *, is_traceable: bool = False) -> None:
        self._is_traceable = is_traceable

    def load(self, weights: Weights, spec: LinearSpec) -> Linear:
        """Take the layer's tensors, each exactly once."""
        weight, bias = take_fused(weights, spec), take_bias(weights, spec)
        return linear_of(weight, bias, is_traceable=self._is_traceable)

    def load_gated(self, weights: Weights, spec: LinearSpec, activation: GatedActivation) -> GatedLinear:
        """The same for two parts of equal size, the gate's first, followed by the activation."""
        weight, bias = take_fused(weights, spec), take_bias(weights, spec)
        return gated_linear_of(weight, bias, activation, is_traceable=self._is_traceable)

    def load_experts(self, weights: Weights, spec: ExpertsSpec) -> StackedExperts:
        """Take the tensors of the experts that this process holds, for kernels that compute them together."""
        if spec.names.stacked is not None:
            return take_stacked(weights, spec)
        stacked = StackedExperts.empty(spec, weights.dtype, weights.device)
        # Each tensor goes to its place as it is read, so that no second copy of the experts is held.
        for place, index in enumerate(spec.held_experts):
            for name, part, _ in stacked.places(place):
                part.copy_(take_expert(weights, spec, index, name))
        return stacked

    def take_weight(self, weights: Weights, spec: LinearSpec) -> torch.Tensor:
        """Take the tensors of a layer without a bias and return its weight, [out, in] in the engine's dtype, for what
        multiplies by it in its own way."""
        return take_fused(weights, spec)

    def tie(self, embedding: torch.Tensor) -> Linear:
        """Use an embedding [vocab_size, in] that was taken before as the weight of an output head."""
        return linear_of(embedding, is_traceable=self._is_traceable)


def unsupported_experts(spec: ExpertsSpec, stored: str) -> ConfigError:
    """Return the error for experts that a method cannot take as they are stored."""
    return ConfigError(
        f"the experts of {spec.prefix} are {stored}, which is not supported; take a checkpoint with unquantised experts"
    )


def take_expert(
    weights: Weights,
    spec: ExpertsSpec,
    index: int,
    name: ExpertLayer,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Take this process's part of a projection's weight.

    Args:
        dtype: see `Weights.take`.
    """
    shape, shard = spec.weight_shape(name), spec.weight_shard(name)
    return weights.take(spec.projection(index, name) + ".weight", *shape, dtype=dtype, shard=shard)


TakeRows = Callable[[Weights, str, tuple[int, int, int], Shard | None], torch.Tensor]
"""Takes this process's part of a tensor of all experts, [experts, rows, columns], given its name and whole shape."""


def take_stacked(weights: Weights, spec: ExpertsSpec, take_rows: TakeRows | None = None) -> StackedExperts:
    """Take this process's part of experts that the checkpoint stores in two tensors, in the engine's dtype.

    Args:
        take_rows: None: weights are stored as `spec.names` says, unquantised.
    """
    names = spec.names
    assert names.stacked is not None
    count, hidden, inner = spec.num_experts, spec.hidden, spec.inner
    held = None if spec.held is None or len(spec.held) == count else Shard(0, (spec.held,))
    both: tuple[range, ...] | None = None
    """The part of [gate, up] that goes with `features`."""
    if (own := spec.features) is not None:
        if names.is_interleaved:
            both = (range(2 * own.start, 2 * own.stop),)
        else:
            both = (own, range(inner + own.start, inner + own.stop))

    def take(name: str, rows: int, columns: int, shard: Shard | None) -> torch.Tensor:
        """Return [experts, rows, columns] of this process."""
        if take_rows is not None:
            return take_rows(weights, name, (count, rows, columns), shard)
        if not names.is_transposed:
            return weights.take(name, count, rows, columns, shard=shard)
        if shard is not None and shard.dim:
            shard = Shard(3 - shard.dim, shard.ranges)
        return weights.take(name, count, columns, rows, shard=shard).transpose(1, 2)

    def joined(gate_up: torch.Tensor) -> torch.Tensor:
        """Put the gates before the ups, along dimension 1."""
        if gate_up.is_meta:  # where indexing would import torch's compiler
            return gate_up
        if not names.is_interleaved:
            return gate_up.contiguous()
        whole = gate_up.new_empty(gate_up.shape)
        half = gate_up.shape[1] // 2
        whole[:, :half], whole[:, half:] = gate_up[:, 0::2], gate_up[:, 1::2]
        return whole

    gate_up_name, down_name = map(spec.stacked, names.stacked)
    gate_up = take(gate_up_name, 2 * inner, hidden, Shard(1, both) if both else held)
    down = take(down_name, hidden, inner, held if own is None else Shard(2, (own,)))
    gate_up_bias = down_bias = None
    if names.biases is not None:
        bias_names = [spec.stacked(name) for name in names.biases]
        gate_up_bias = joined(
            weights.take(bias_names[0], count, 2 * inner, shard=Shard(1, both) if both else held)
        )
        down_bias = weights.take(bias_names[1], count, hidden, shard=held)
        if not spec.has_down_bias:
            down_bias = None
    return StackedExperts(
        joined(gate_up),
        down if down.is_meta else down.contiguous(),
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )


def take_fused(weights: Weights, spec: LinearSpec, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Take this process's part of the weight, [out, in], of all projections.

    Args:
        dtype: see `Weights.take`.
    """

    def take_weight(name: str) -> torch.Tensor:
        out_features, shard = spec.parts[name], spec.weight_shard(name)
        if spec.is_transposed:
            return weights.take(
                name + ".weight", spec.in_features, out_features, dtype=dtype, shard=shard
            ).t()
        return weights.take(name + ".weight", out_features, spec.in_features, dtype=dtype, shard=shard)

    return ordered(spec, fuse(spec, take_weight))


def take_bias(weights: Weights, spec: LinearSpec) -> torch.Tensor | None:
    """Take this process's part of the bias, [out], of all projections, if they have one."""
    if not spec.has_bias:
        return None
    bias = fuse(
        spec, lambda name: weights.take(name + ".bias", spec.parts[name], shard=spec.output_shard(name))
    )
    return ordered(spec, bias)


def fuse(spec: LinearSpec, take: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Concatenate the parts along dimension 0, copying each into place as it is read to limit peak memory."""
    if len(spec.parts) == 1:
        return take(next(iter(spec.parts)))
    fused: torch.Tensor | None = None
    start = 0
    for name in spec.parts:
        size = spec.num_outputs(name)
        part = take(name)
        if fused is None:
            fused = part.new_empty((spec.out_features, *part.shape[1:]))
        fused[start : start + size].copy_(part)
        start += size
    assert fused is not None
    return fused


logger = logging.getLogger("argosy.models")

FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0
"""Largest number of this format."""
_ROWS = 1024
"""Rows that are widened or quantised at a time, to limit peak memory."""
_ALIGNMENT = 16
"""`torch._scaled_mm` takes sizes that are multiples of this."""


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of e2m1, those with a sign after them."""

_MX_BLOCK = 32
"""Numbers that share a scale, 2 ** (scale - 127)."""

QuantizeRows = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
"""See `triton_kernels.activations.quantize_fp8`."""


def linear_method(
    config: ModelConfig,
    quantization: str | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    uses_triton: bool,
    is_traceable: bool = False,
) -> LinearMethod:
    """Choose the method of a model, and log what becomes of quantised weights.

    Args:
        quantization: `--quantization`.
        uses_triton: `AttentionBackend.uses_triton`.
        is_traceable: see `linear_of`; ignored if weights are quantised.

    Raises:
        ConfigError: the flag asks for another scheme than the checkpoint's, or the device cannot do it.
    """
    check_quantization(config.quantization, quantization)
    reason = _no_fp8_product(dtype, device, uses_triton)
    check_online_quantization(config.quantization, quantization, reason)
    if config.quantization is None:
        if quantization is None:
            return LinearMethod(is_traceable=is_traceable)
        return OnlineFp8LinearMethod(_quantize_rows())
    method = config.quantization.method
    name = str(dtype).removeprefix("torch.")
    if (widened := _widened(config.quantization)) is not None:
        form = "MXFP4" if method == "mxfp4" else "FP8 in blocks"
        logger.info("weights in %s: widened to %s at load", form, name)
        return widened
    if reason is None:
        logger.info("FP8 weights (%s): multiplied in FP8", method)
        return Fp8LinearMethod(config.quantization, _quantize_rows())
    logger.info("FP8 weights (%s): widened to %s at load, because %s", method, name, reason)
    return Fp8LinearMethod(config.quantization, None)


def has_fp8_products(
    config: ModelConfig, quantization: str | None, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether the model's products are in FP8 if the Triton kernels serve. Arguments: `linear_method`."""
    if config.quantization is not None and (config.widens_fp8 or config.quantization.is_widened):
        return False
    is_quantised = config.quantization is not None or quantization is not None
    return is_quantised and _no_fp8_product(dtype, device, uses_triton=True) is None


def planned_linear_method(config: ModelConfig) -> LinearMethod:
    """Return a method that takes the same tensors, for a plan."""
    if config.quantization is None:
        return LinearMethod()
    return _widened(config.quantization) or Fp8LinearMethod(config.quantization, _unused)


def _widened(config: QuantizationConfig) -> LinearMethod | None:
    if config.method == "mxfp4":
        return Mxfp4LinearMethod()
    return None if config.block is None else BlockFp8LinearMethod(config)


def _no_fp8_product(dtype: torch.dtype, device: torch.device, uses_triton: bool) -> str | None:
    """Return why this device does not multiply in FP8, or None."""
    name = str(dtype).removeprefix("torch.")
    if (reason := no_fp8_product(name, device.type, uses_triton)) is not None:
        return reason
    from argosy_engine.triton_kernels.launch import device_traits

    if not device_traits(device).has_fp8:
        return "this GPU has no FP8 (it needs compute capability 8.9)"
    return None


def _quantize_rows() -> QuantizeRows:
    from argosy_engine.triton_kernels.activations import quantize_fp8

    return quantize_fp8


def _unused(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError("a planned model is never run")


class Fp8Linear(Linear):
    """A product in FP8, which quantises its inputs in a launch of its own if the layer before it has not.

    Args:
        weight: float8_e4m3fn [out, in].
        scale: float32 [out].
        bias: [out].
        input_scale: float32 [1], of all inputs; None: each row has the scale that suits it.
        dtype: of the result.
        quantize: quantises rows.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        input_scale: torch.Tensor | None,
        dtype: torch.dtype,
        quantize: QuantizeRows,
    ) -> None:
        self._weight, self._scale = weight.t(), scale.unsqueeze(0)
        self._bias, self._input_scale, self._dtype = bias, input_scale, dtype
        self._quantize = quantize
        self.input_quantization = RowQuantization(input_scale)

    def __call__(self, x: Activations) -> torch.Tensor:
        values, scales = self._quantize(x, self._input_scale) if isinstance(x, torch.Tensor) else x
        return torch._scaled_mm(values, self._weight, scales, self._scale, self._bias, out_dtype=self._dtype)


class Fp8LinearMethod(LinearMethod):
    """Reads FP8 weights of a checkpoint.

    Args:
        config: which layers are quantised, and how.
        quantize: of a device that multiplies FP8; None: weights are widened to the engine's dtype at load.
    """

    def __init__(self, config: QuantizationConfig, quantize: QuantizeRows | None) -> None:
        super().__init__()
        self._config = config
        self._quantize = quantize

    def load(self, weights: Weights, spec: LinearSpec) -> Linear:
        if not self._config.quantises_all(tuple(spec.parts)):
            return super().load(weights, spec)
        weight, scale, bias = self._take(weights, spec)
        input_scale = self._input_scale(weights, tuple(spec.parts))
        if self._quantize is None or not is_aligned(weight):
            return linear_of(widened(weight, scale, weights.dtype), bias)
        return Fp8Linear(weight, scale, bias, input_scale, weights.dtype, self._quantize)

    def load_gated(self, weights: Weights, spec: LinearSpec, activation: GatedActivation) -> GatedLinear:
        if not self._config.quantises_all(tuple(spec.parts)):
            return super().load_gated(weights, spec, activation)
        if self._quantize is not None:
            return SplitGatedLinear(self.load(weights, spec), activation)
        weight, scale, bias = self._take(weights, spec)
        self._input_scale(weights, tuple(spec.parts))
        return gated_linear_of(widened(weight, scale, weights.dtype), bias, activation)

    def load_experts(self, weights: Weights, spec: ExpertsSpec) -> StackedExperts:
        if spec.names.stacked is not None:  # which are no linear layers, and left as they are
            return super().load_experts(weights, spec)
        names = tuple(
            spec.projection(index, name) for index in range(spec.num_experts) for name in spec.layers
        )
        if not self._config.quantises_all(names):
            return super().load_experts(weights, spec)
        stacked = StackedExperts.empty(spec, FP8 if self._quantize else weights.dtype, weights.device)
        for place, index in enumerate(spec.held_experts):
            for layer, part, scale in stacked.places(place):
                name = spec.projection(index, layer)
                stored = take_expert(weights, spec, index, layer, FP8)
                whole, shard = spec.weight_shape(layer)[0], spec.output_shard(layer)
                scales = self._scale(weights, name, whole, shard, len(part))
                self._input_scale(weights, (name,))  # experts do not quantise activations
                if scale is None:
                    part.copy_(widened(stored, scales, weights.dtype))
                else:
                    part.copy_(stored)
                    scale.copy_(scales)
        return stacked

    def take_weight(self, weights: Weights, spec: LinearSpec) -> torch.Tensor:
        if not self._config.quantises_all(tuple(spec.parts)):
            return super().take_weight(weights, spec)
        weight, scale, _ = self._take(weights, spec)
        self._input_scale(weights, tuple(spec.parts))
        return widened(weight, scale, weights.dtype)

    def _take(
        self, weights: Weights, spec: LinearSpec
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Take the weight [out, in], the scale of each channel [out] and the bias."""
        weight = take_fused(weights, spec, dtype=FP8)
        scales = [
            self._scale(weights, name, size, spec.output_shard(name), spec.num_outputs(name))
            for name, size in spec.parts.items()
        ]
        return weight, ordered(spec, _joined(scales)), take_bias(weights, spec)

    def _scale(
        self, weights: Weights, name: str, out_features: int, shard: Shard | None, num_outputs: int
    ) -> torch.Tensor:
        """Return the scale of each of the `num_outputs` channels that this process computes."""
        if self._config.is_per_channel:
            return weights.take_scale(name + ".weight_scale", out_features, shard)
        return weights.take_scale(name + ".weight_scale", 1).expand(num_outputs).contiguous()

    def _input_scale(self, weights: Weights, names: tuple[str, ...]) -> torch.Tensor | None:
        """Take the scale of the inputs, the largest of the projections that share them."""
        if not self._config.is_static:
            return None
        scales = [weights.take_scale(name + ".input_scale", 1) for name in names]
        if len(scales) == 1 or scales[0].is_meta:  # where it would import sympy
            return scales[0]
        return torch.stack(scales).amax(dim=0)


class OnlineFp8LinearMethod(LinearMethod):
    """Quantises unquantised weights as they are loaded, with a scale per output channel.

    Layers whose spec keeps their precision are left as they are.
    """

    def __init__(self, quantize: QuantizeRows) -> None:
        super().__init__()
        self._quantize = quantize

    def load(self, weights: Weights, spec: LinearSpec) -> Linear:
        weight, bias = take_fused(weights, spec), take_bias(weights, spec)
        if spec.keeps_precision or not is_aligned(weight):
            return linear_of(weight, bias)
        return Fp8Linear(*quantized(weight), bias, None, weights.dtype, self._quantize)

    def load_gated(self, weights: Weights, spec: LinearSpec, activation: GatedActivation) -> GatedLinear:
        return SplitGatedLinear(self.load(weights, spec), activation)

    def load_experts(self, weights: Weights, spec: ExpertsSpec) -> StackedExperts:
        stacked = StackedExperts.empty(spec, FP8, weights.device)
        if spec.names.stacked is not None:
            plain = take_stacked(weights, spec)
            assert stacked.gate_up_scale is not None
            assert stacked.down_scale is not None
            for place in range(len(plain.down)):
                for whole, parts, part_scales in (
                    (plain.gate_up, stacked.gate_up, stacked.gate_up_scale),
                    (plain.down, stacked.down, stacked.down_scale),
                ):
                    values, scales = quantized(whole[place])
                    parts[place].copy_(values)
                    part_scales[place].copy_(scales)
            return stacked._replace(gate_up_bias=plain.gate_up_bias, down_bias=plain.down_bias)
        for place, index in enumerate(spec.held_experts):
            for layer, part, scale in stacked.places(place):
                assert scale is not None
                values, scales = quantized(take_expert(weights, spec, index, layer))
                part.copy_(values)
                scale.copy_(scales)
        return stacked


class BlockFp8LinearMethod(LinearMethod):
    """FP8 weights with a scale per block of rows and columns.

    Layers whose spec keeps their precision, and those that the config names, are as the checkpoint has them.
    """

    def __init__(self, config: QuantizationConfig) -> None:
        super().__init__()
        assert config.block is not None
        self._config, self._block = config, config.block
        self._suffix = ".weight_scale_inv" if config.method == "fp8" else ".weight_scale"

    def load(self, weights: Weights, spec: LinearSpec) -> Linear:
        if not self._is_quantised(spec):
            return super().load(weights, spec)
        return linear_of(self._take(weights, spec), take_bias(weights, spec))

    def load_gated(self, weights: Weights, spec: LinearSpec, activation: GatedActivation) -> GatedLinear:
        if not self._is_quantised(spec):
            return super().load_gated(weights, spec, activation)
        return gated_linear_of(self._take(weights, spec), take_bias(weights, spec), activation)

    def load_experts(self, weights: Weights, spec: ExpertsSpec) -> StackedExperts:
        if spec.names.stacked is not None:  # which are no linear layers, and left as they are
            return super().load_experts(weights, spec)
        stacked = StackedExperts.empty(spec, weights.dtype, weights.device)
        for place, index in enumerate(spec.held_experts):
            for layer, part, _ in stacked.places(place):
                name, shape = spec.projection(index, layer), spec.weight_shape(layer)
                part.copy_(self._widened(weights, name, shape, spec.weight_shard(layer)))
        return stacked

    def take_weight(self, weights: Weights, spec: LinearSpec) -> torch.Tensor:
        return self._take(weights, spec) if self._is_quantised(spec) else super().take_weight(weights, spec)

    def _is_quantised(self, spec: LinearSpec) -> bool:
        return not spec.keeps_precision and self._config.quantises_all(tuple(spec.parts))

    def _take(self, weights: Weights, spec: LinearSpec) -> torch.Tensor:
        """Take the weight [out, in]."""

        def take_part(name: str) -> torch.Tensor:
            shape = spec.parts[name], spec.in_features
            return self._widened(weights, name, shape, spec.weight_shard(name))

        return ordered(spec, fuse(spec, take_part))

    def _widened(
        self, weights: Weights, name: str, shape: tuple[int, int], shard: Shard | None
    ) -> torch.Tensor:
        """Take this process's part of a weight [out, in]."""
        stored = weights.take(name + ".weight", *shape, dtype=FP8, shard=shard)
        counts = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=True))
        scales = weights.take_scale(name + self._suffix, counts, is_signed=True)
        if stored.is_meta:  # where indexing would import torch's compiler
            return torch.empty(stored.shape, dtype=weights.dtype, device=stored.device)
        rows, columns = (
            _indices(size, shard, dim, stored.device) // block
            for dim, (size, block) in enumerate(zip(shape, self._block, strict=True))
        )
        factors = scales[:, columns]
        return _by_rows(
            stored, weights.dtype, lambda part, at: part.float() * factors[rows[at : at + len(part)]]
        )


class Mxfp4LinearMethod(LinearMethod):
    """Experts in MXFP4, stored stacked; all else is unquantised."""

    def load_experts(self, weights: Weights, spec: ExpertsSpec) -> StackedExperts:
        if spec.names.stacked is None:
            raise unsupported_experts(spec, "in MXFP4 and stored one by one")
        return take_stacked(weights, spec, take_mxfp4)


def take_mxfp4(weights: Weights, name: str, shape: tuple[int, int, int], shard: Shard | None) -> torch.Tensor:
    """Take this process's part of [experts, rows, columns], of which pairs of columns are in a byte, the first in
    its lower half. A part of the columns is cut out of the whole blocks that it is in."""
    count, num_rows, columns = shape
    if columns % _MX_BLOCK:
        raise ConfigError(f"{name} has rows of {columns}, which is not a multiple of {_MX_BLOCK}")
    cut: range | None = None
    if shard is not None and shard.dim == 2:
        (cut,) = shard.ranges
        first, last = cut.start // _MX_BLOCK, -(-cut.stop // _MX_BLOCK)
        shard, cut = Shard(2, (range(first, last),)), range(cut.start - first * 32, cut.stop - first * 32)
    blocks = columns // _MX_BLOCK
    packed = weights.take(
        name + "_blocks", count, num_rows, blocks, _MX_BLOCK // 2, dtype=torch.uint8, shard=shard
    )
    scales = weights.take(name + "_scales", count, num_rows, blocks, dtype=torch.uint8, shard=shard)
    width = packed.shape[2] * _MX_BLOCK
    if packed.is_meta:
        widths = width if cut is None else len(cut)
        return torch.empty(*packed.shape[:2], widths, dtype=weights.dtype, device=packed.device)
    numbers = torch.tensor((*_FP4, *(-each for each in _FP4)), device=packed.device)

    def widen(part: torch.Tensor, at: int) -> torch.Tensor:
        halves = torch.stack((part & 15, part >> 4), dim=-1).int()
        exponents = flat_scales[at : at + len(part)].int() - 127
        widened = torch.ldexp(numbers[halves].flatten(2), exponents.unsqueeze(-1)).flatten(1)
        return widened if cut is None else widened[:, cut.start : cut.stop]

    flat_scales = scales.flatten(0, 1)
    flat = _by_rows(packed.flatten(0, 1), weights.dtype, widen, columns=width if cut is None else len(cut))
    return flat.view(*packed.shape[:2], -1)


def _indices(size: int, shard: Shard | None, dim: int, device: torch.device) -> torch.Tensor:
    """Return the indices, int64, along a dimension of a tensor that a process takes."""
    ranges: Sequence[range] = (range(size),) if shard is None or shard.dim != dim else shard.ranges
    return torch.cat([torch.arange(each.start, each.stop, device=device) for each in ranges])


def widened(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an FP8 weight [out, in] in another dtype, multiplied by the scale of each channel [out]."""
    if weight.is_meta:  # where the product would import sympy
        return torch.empty(weight.shape, dtype=dtype, device=weight.device)
    return _by_rows(weight, dtype, lambda part, at: part.float().mul_(scale[at : at + len(part), None]))


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [out, in] in FP8 and the scale of each channel, float32 [out]."""
    out = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scale = weight.abs().amax(dim=1).float().div_(MAX_FP8).clamp_(min=1e-12)
    for start in range(0, len(weight), _ROWS):
        rows = slice(start, start + _ROWS)
        out[rows] = (weight[rows].float() / scale[rows, None]).clamp_(-MAX_FP8, MAX_FP8).to(FP8)
    return out, scale


def _joined(scales: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate vectors. On the meta device `torch.cat` would import torch's compiler, which takes seconds."""
    if len(scales) == 1:
        return scales[0]
    return scales[0].new_empty(sum(map(len, scales))) if scales[0].is_meta else torch.cat(scales)


def is_aligned(weight: torch.Tensor) -> bool:
    return all(size % _ALIGNMENT == 0 for size in weight.shape)


def _by_rows(
    stored: torch.Tensor,
    dtype: torch.dtype,
    widen: Callable[[torch.Tensor, int], torch.Tensor],
    *,
    columns: int | None = None,
) -> torch.Tensor:
    """Widen a few rows at a time, to limit peak memory.

    Args:
        widen: maps rows, and the number of the first, to their numbers [rows, columns].
        columns: of the result; None: those of `stored`.
    """
    shape = (len(stored), stored.shape[1] if columns is None else columns)
    out = torch.empty(shape, dtype=dtype, device=stored.device)
    for start in range(0, len(stored), _ROWS):
        out[start : start + _ROWS] = widen(stored[start : start + _ROWS], start)
    return out
