"""LinearMethod: how a model's linear layers are loaded and computed, as they are or quantised, and the choice of it.

A method decides which tensors of the checkpoint make up a layer, in which dtype they are read, how they are laid out,
and what multiplies by them. Models only describe their projections (`linear.LinearSpec`). Design: vLLM's
`LinearMethodBase`.

FP8 with a scale per output channel is multiplied in FP8, or widened to the engine's dtype at load. A scale per tensor
counts as equal scales of its channels, so that projections that are fused need no common scale, and one product serves
all schemes: rows of activations have scales of their own, channels of the weight too.

Integers of 4 and 8 bits with scales of groups or channels are multiplied by the CPU kernels as they are packed, and
widened elsewhere.

FP8 with a scale per block of the weight (DeepSeek-V3, arXiv 2412.19437) and experts in MXFP4 (gpt-oss; OCP Microscaling
Formats 1.0) are always widened, a few rows at a time, and take the memory of unquantised ones.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.nn.functional as F

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
    quantized_gated_linear_of,
    quantized_linear_of,
)
from argosy_engine.layers.norms import GatedActivation
from argosy_engine.layers.scheme_weights import ROWS, StoredWeight, fp4_pairs, group_of_inputs, take_weight
from argosy_engine.model_configs.experts_config import ExpertLayer
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.model_configs.quantization_config import (
    HEAD_BITS,
    INTEGER_BITS,
    QuantizationConfig,
    check_online_quantization,
    check_quantization,
    group_size,
    is_multiplied,
    no_fp8_product,
    no_integer_product,
    no_packed_product,
    what_becomes,
)
from argosy_engine.model_configs.sharding import Shard
from argosy_engine.model_configs.weight_schemes import MX_GROUP, Scheme
from argosy_engine.native.library import Kernels, QuantizedWeight, can_pack, kernels_for
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

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Make a layer of a weight [out, in] of `load_experts`."""
        return linear_of(weight, bias, is_traceable=self._is_traceable)

    def make_gated(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: GatedActivation
    ) -> GatedLinear:
        """The same for a gated layer."""
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


def take_expert(weights: Weights, spec: ExpertsSpec, index: int, name: ExpertLayer) -> torch.Tensor:
    """Take this process's part of a projection's weight, in the engine's dtype."""
    shape, shard = spec.weight_shape(name), spec.weight_shard(name)
    return weights.take(spec.projection(index, name) + ".weight", *shape, shard=shard)


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


def take_fused(weights: Weights, spec: LinearSpec) -> torch.Tensor:
    """Take this process's part of the weight, [out, in], of all projections."""
    return ordered(spec, fuse(spec, lambda name: take_part(weights, spec, name)))


def take_part(weights: Weights, spec: LinearSpec, name: str) -> torch.Tensor:
    """Take this process's part of the weight, [out, in], of one projection."""
    out_features, shard = spec.parts[name], spec.weight_shard(name)
    if spec.is_transposed:
        return weights.take(name + ".weight", spec.in_features, out_features, shard=shard).t()
    return weights.take(name + ".weight", out_features, spec.in_features, shard=shard)


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
_ALIGNMENT = 16
"""`torch._scaled_mm` takes sizes that are multiples of this."""


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
    check_online_quantization(config.quantization, quantization, device.type, reason)
    if config.quantization is None:
        if quantization is None:
            return LinearMethod(is_traceable=is_traceable)
        if (bits := INTEGER_BITS.get(quantization)) is not None:
            return _online_integers(bits, dtype, device)
        return OnlineFp8LinearMethod(_quantize_rows())
    found = config.quantization
    name = str(dtype).removeprefix("torch.")
    refusal = no_integer_product(device.type, has_kernels=kernels_for(device, dtype) is not None)
    logger.info("%s", what_becomes(found, name, reason, refusal))
    product: Product | None = None
    if (loaded := _integer_kernels(config, dtype, device)) is not None:
        product = IntegerProduct(loaded)
    elif found.has_fp8 and reason is None:
        product = Fp8Product(_quantize_rows())
    return SchemeLinearMethod(found, product)


def keeps_integers(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether integers of the checkpoint stay packed, so that sums are rounded otherwise than of widened weights."""
    return _integer_kernels(config, dtype, device) is not None


def _integer_kernels(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """Return what multiplies by the checkpoint's integers as they are packed."""
    found = config.quantization
    if found is None or config.widens_fp8 or not found.has_packed:
        return None
    return kernels_for(device, dtype)


def has_fp8_products(
    config: ModelConfig, quantization: str | None, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether the model's products are in FP8 if the Triton kernels serve. Arguments: `linear_method`."""
    if config.quantization is not None and (config.widens_fp8 or not config.quantization.has_fp8):
        return False
    is_quantised = config.quantization is not None or quantization == "fp8"
    return is_quantised and _no_fp8_product(dtype, device, uses_triton=True) is None


def planned_linear_method(config: ModelConfig) -> LinearMethod:
    """Return a method that takes the same tensors, for a plan."""
    if config.quantization is None:
        return LinearMethod()
    return SchemeLinearMethod(config.quantization)


def _no_fp8_product(dtype: torch.dtype, device: torch.device, uses_triton: bool) -> str | None:
    """Return why this device does not multiply in FP8, or None."""
    name = str(dtype).removeprefix("torch.")
    if (reason := no_fp8_product(name, device.type, uses_triton)) is not None:
        return reason
    from argosy_engine.triton_kernels.launch import device_traits

    if not device_traits(device).has_fp8:
        return "this GPU has no FP8 (it needs compute capability 8.9)"
    return None


def _online_integers(bits: int, dtype: torch.dtype, device: torch.device) -> LinearMethod:
    """Return the method that quantises unquantised weights to integers.

    Raises:
        ConfigError: the CPU kernels do not serve.
    """
    loaded = kernels_for(device, dtype)
    if loaded is None:
        raise ConfigError(
            f"--quantization int{bits} needs the CPU kernels, which are off or do not run here in "
            f"{str(dtype).removeprefix('torch.')}; leave the flag out"
        )
    logger.info(
        "weights are quantised to int%d as they are loaded, in groups of up to 128 inputs, the output head to int%d",
        bits,
        HEAD_BITS,
    )
    return OnlineIntLinearMethod(bits, loaded)


def _quantize_rows() -> QuantizeRows:
    from argosy_engine.triton_kernels.activations import quantize_fp8

    return quantize_fp8


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


TakeExpert = Callable[[int, ExpertLayer], StoredWeight]
"""Takes the weight of a projection of an expert, given its number; each exactly once."""


class Product(ABC):
    """Multiplies by quantised weights as they are stored. Where it returns None, they are widened instead."""

    @abstractmethod
    def linear(
        self, spec: LinearSpec, parts: Sequence[StoredWeight], bias: torch.Tensor | None, dtype: torch.dtype
    ) -> Linear | None:
        """Make a layer of the parts of a spec, which come in its order.

        Args:
            dtype: of the activations.
        """

    def gated(
        self,
        spec: LinearSpec,
        parts: Sequence[StoredWeight],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        activation: GatedActivation,
    ) -> GatedLinear | None:
        """The same for two parts, the gate's first, followed by the activation."""
        layer = self.linear(spec, parts, bias, dtype)
        return None if layer is None else SplitGatedLinear(layer, activation)

    def experts(
        self, weights: Weights, spec: ExpertsSpec, schemes: Collection[Scheme], take: TakeExpert
    ) -> StackedExperts | None:
        """Make stacked experts.

        Args:
            schemes: of their projections.
        """
        return None


class OnlineIntLinearMethod(LinearMethod):
    """Quantises unquantised weights to integers as they are loaded, for native/src/quantized_linear.h.

    Integers are rounded to nearest and symmetric, in groups of adjacent inputs that share a scale. The output head has
    `HEAD_BITS`, of a tied embedding only in its role as head. Other layers whose spec keeps their precision are left as
    they are, and so are layers whose inputs no group divides.

    Args:
        bits: 8 or 4.
        loaded: multiplies by them.
    """

    def __init__(self, bits: int, loaded: Kernels) -> None:
        super().__init__()
        self._bits, self._kernels = bits, loaded

    def load(self, weights: Weights, spec: LinearSpec) -> Linear:
        if spec.keeps_precision and not spec.is_head:
            return super().load(weights, spec)
        bits = HEAD_BITS if spec.is_head else self._bits
        return self._quantised(take_fused(weights, spec), take_bias(weights, spec), bits)

    def load_gated(self, weights: Weights, spec: LinearSpec, activation: GatedActivation) -> GatedLinear:
        if spec.keeps_precision:
            return super().load_gated(weights, spec, activation)
        return self.make_gated(take_fused(weights, spec), take_bias(weights, spec), activation)

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self._quantised(weight, bias, self._bits)

    def tie(self, embedding: torch.Tensor) -> Linear:
        return self._quantised(embedding, None, HEAD_BITS)

    def _quantised(self, weight: torch.Tensor, bias: torch.Tensor | None, bits: int) -> Linear:
        if (quantized := quantized_weight(weight, bits)) is None:
            return super().make(weight, bias)
        return quantized_linear_of(self._kernels, quantized, bias, weight.dtype)

    def make_gated(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: GatedActivation
    ) -> GatedLinear:
        if (quantized := quantized_weight(weight, self._bits)) is None:
            return super().make_gated(weight, bias, activation)
        return quantized_gated_linear_of(self._kernels, quantized, bias, weight.dtype, activation)


class SchemeLinearMethod(LinearMethod):
    """Reads quantised weights of a checkpoint, each layer's by its scheme.

    Args:
        config: which layers are quantised, and how.
        product: of a device that multiplies by some of the schemes; None: all weights are widened to the engine's dtype
            at load.
    """

    def __init__(self, config: QuantizationConfig, product: Product | None = None) -> None:
        super().__init__()
        self._config = config
        self._product = product

    def load(self, weights: Weights, spec: LinearSpec) -> Linear:
        parts = self._take(weights, spec)
        if parts is None:
            return super().load(weights, spec)
        bias = take_bias(weights, spec)
        layer: Linear | None = None
        if self._product is not None and (stored := _all_stored(parts)) is not None:
            layer = self._product.linear(spec, stored, bias, weights.dtype)
        return layer or linear_of(self._widened(weights, spec, parts), bias)

    def load_gated(self, weights: Weights, spec: LinearSpec, activation: GatedActivation) -> GatedLinear:
        parts = self._take(weights, spec)
        if parts is None:
            return super().load_gated(weights, spec, activation)
        bias = take_bias(weights, spec)
        layer: GatedLinear | None = None
        if self._product is not None and (stored := _all_stored(parts)) is not None:
            layer = self._product.gated(spec, stored, bias, weights.dtype, activation)
        return layer or gated_linear_of(self._widened(weights, spec, parts), bias, activation)

    def load_experts(self, weights: Weights, spec: ExpertsSpec) -> StackedExperts:
        if spec.names.stacked is not None:  # which are no linear layers
            take_rows = None if self._config.experts is None else take_mxfp4
            return take_stacked(weights, spec, take_rows)
        if self._config.experts is not None:
            raise unsupported_experts(spec, "in MXFP4 and stored one by one")
        schemes = {
            self._config.scheme_of(spec.projection(index, name))
            for index in spec.held_experts
            for name in spec.layers
        }

        def take(index: int, layer: ExpertLayer) -> StoredWeight:
            name = spec.projection(index, layer)
            scheme = self._config.scheme_of(name)
            assert scheme is not None
            return take_weight(weights, name, scheme, spec.weight_shape(layer), spec.weight_shard(layer))

        if self._product is not None and (found := {each for each in schemes if each is not None}) == schemes:
            multiplied = self._product.experts(weights, spec, found, take)
            if multiplied is not None:
                return multiplied
        stacked = StackedExperts.empty(spec, weights.dtype, weights.device)
        for place, index in enumerate(spec.held_experts):
            for layer, part, _ in stacked.places(place):
                if self._config.quantises(spec.projection(index, layer)):
                    _widen(take(index, layer), part)
                else:
                    part.copy_(take_expert(weights, spec, index, layer))
        return stacked

    def take_weight(self, weights: Weights, spec: LinearSpec) -> torch.Tensor:
        parts = self._take(weights, spec)
        return take_fused(weights, spec) if parts is None else self._widened(weights, spec, parts)

    def _take(self, weights: Weights, spec: LinearSpec) -> Parts | None:
        """Take the parts of a layer, by name, those that are not quantised as they are; None: none is quantised."""
        schemes = {name: self._config.scheme_of(name) for name in spec.parts}
        if spec.keeps_precision:
            schemes = {
                name: None if scheme is not None and scheme.keeps_kept_layers else scheme
                for name, scheme in schemes.items()
            }
        if not any(schemes.values()):
            return None
        parts: dict[str, StoredWeight | torch.Tensor] = {}
        for name, scheme in schemes.items():
            if scheme is None:
                parts[name] = take_part(weights, spec, name)
                continue
            if (
                spec.is_transposed and not scheme.is_told_by_storage
            ):  # whose tools transpose such a layer first
                raise ConfigError(
                    f"{name} is stored transposed, and in {scheme.about}, which is not supported; take the unquantised "
                    "checkpoint or one in GPTQ"
                )
            shape, shard = (spec.parts[name], spec.in_features), spec.feature_shard(name)
            parts[name] = take_weight(weights, name, scheme, shape, shard)
        return parts

    def _widened(self, weights: Weights, spec: LinearSpec, parts: Parts) -> torch.Tensor:
        """Return the weight of all parts, [out, in] in the engine's dtype, in the order of a spec."""
        columns = spec.in_features if spec.inputs is None else len(spec.inputs)
        fused = torch.empty(spec.out_features, columns, dtype=weights.dtype, device=weights.device)
        start = 0
        for name, part in parts.items():
            place = fused[start : start + spec.num_outputs(name)]
            if isinstance(part, StoredWeight):
                _widen(part, place)
            else:
                place.copy_(part)
            start += len(place)
        return ordered(spec, fused)


Parts = Mapping[str, StoredWeight | torch.Tensor]
"""Weights of the parts of a layer by name, those that are not quantised in the engine's dtype."""


def _all_stored(parts: Parts) -> list[StoredWeight] | None:
    """Return the parts of a layer if all of them are quantised."""
    stored = [part for part in parts.values() if isinstance(part, StoredWeight)]
    return stored if len(stored) == len(parts) else None


def _widen(part: StoredWeight, out: torch.Tensor) -> None:
    if not out.is_meta:  # where it would import sympy
        part.widen(out)


class Fp8Product(Product):
    """Products in FP8, by weights that have one scale per channel or tensor.

    Args:
        quantize: quantises rows of activations.
    """

    def __init__(self, quantize: QuantizeRows) -> None:
        self._quantize = quantize

    def linear(
        self, spec: LinearSpec, parts: Sequence[StoredWeight], bias: torch.Tensor | None, dtype: torch.dtype
    ) -> Linear | None:
        if not all(is_multiplied(part.scheme) and is_aligned(part.shape) for part in parts):
            return None
        tensors = {part.name: part.tensors for part in parts}
        weight = ordered(spec, fuse(spec, lambda name: tensors[name][".weight"]))
        scales = _joined([_channel_scales(part) for part in parts])
        inputs = [part.tensors[each.suffix] for part in parts for each in part.scheme.tensors[2:]]
        input_scale: torch.Tensor | None = None
        if (
            inputs
        ):  # the largest of the projections that share them; on the meta device `stack` would import sympy
            input_scale = inputs[0] if inputs[0].is_meta else torch.stack(inputs).amax(dim=0)
            if len(inputs) < len(parts):
                return None
        return Fp8Linear(weight, ordered(spec, scales), bias, input_scale, dtype, self._quantize)

    def experts(
        self, weights: Weights, spec: ExpertsSpec, schemes: Collection[Scheme], take: TakeExpert
    ) -> StackedExperts | None:
        if not all(map(is_multiplied, schemes)):
            return None
        stacked = StackedExperts.empty(spec, FP8, weights.device)
        for place, index in enumerate(spec.held_experts):
            for layer, part, scale in stacked.places(place):
                assert scale is not None
                stored = take(
                    index, layer
                )  # experts do not quantise activations, whatever the scale of inputs
                part.copy_(stored.tensors[".weight"])
                scale.copy_(_channel_scales(stored))
        return stacked


def _channel_scales(part: StoredWeight) -> torch.Tensor:
    """Return the scale of each output of an FP8 weight, float32 [out]."""
    return part.tensors[part.scheme.tensors[1].suffix].expand(part.shape[0])


class _Unpackable(Exception):
    """Why the CPU kernels do not take a weight as it is packed."""


class IntegerProduct(Product):
    """Products of the CPU kernels by integers of 4 or 8 bits, which stay packed (native/src/quantized_linear.h).

    Parts of a layer are one product if they have bits, groups and order of inputs in common. Why others are widened is
    logged once for each reason.
    """

    def __init__(self, loaded: Kernels) -> None:
        self._kernels = loaded
        self._told: set[str] = set()

    def linear(
        self, spec: LinearSpec, parts: Sequence[StoredWeight], bias: torch.Tensor | None, dtype: torch.dtype
    ) -> Linear | None:
        weight = self._fused(spec, parts)
        return None if weight is None else quantized_linear_of(self._kernels, weight, bias, dtype)

    def gated(
        self,
        spec: LinearSpec,
        parts: Sequence[StoredWeight],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        activation: GatedActivation,
    ) -> GatedLinear | None:
        weight = self._fused(spec, parts)
        if weight is None:
            return None
        return quantized_gated_linear_of(self._kernels, weight, bias, dtype, activation)

    def _fused(self, spec: LinearSpec, parts: Sequence[StoredWeight]) -> QuantizedWeight | None:
        """Return the weight of all parts; None: it has to be widened."""
        try:
            found = [packed_weight(part) for part in parts]
            first = found[0]
            if not all(_is_alike(first, each) for each in found):
                raise _Unpackable("its parts differ in bits, groups or the order of inputs")
        except _Unpackable as reason:
            if str(reason) not in self._told:
                self._told.add(str(reason))
                logger.info("%s is widened, and others may be: %s", parts[0].name, reason)
            return None
        offsets: torch.Tensor | None = None
        if any(each.offsets is not None for each in found):
            offsets = torch.cat(
                [torch.zeros_like(each.scales) if each.offsets is None else each.offsets for each in found]
            )
        return QuantizedWeight(
            first.bits,
            ordered(spec, torch.cat([each.integers for each in found])),
            ordered(spec, torch.cat([each.scales for each in found])),
            None if offsets is None else ordered(spec, offsets),
            first.order,
        )


def packed_weight(part: StoredWeight) -> QuantizedWeight:
    """Return a weight of integers as the CPU kernels take it. Inputs of one group are brought together, and groups of
    unequal sizes, as a rank may have them, divided into equal ones.

    Raises:
        _Unpackable: they do not take it.
    """
    if (reason := no_packed_product(part.scheme)) is not None:
        raise _Unpackable(reason)
    bits, (out, inputs) = getattr(part.scheme, "bits", 8), part.shape
    integers = torch.empty(out, inputs, dtype=torch.int8)
    all_scales, all_zeros = [], []
    groups: int | torch.Tensor = inputs
    for place, (values, scales, zeros, own) in part.numbers():
        groups = own
        zeros = torch.zeros_like(scales) if zeros is None else zeros
        if values.dtype is torch.uint8:  # from 0
            half = 1 << (bits - 1)
            values, zeros = (values.to(torch.int16) - half).to(torch.int8), zeros - half
        integers[place : place + len(values)] = values
        all_scales.append(scales.float())
        all_zeros.append(zeros)
    scales, zeros = torch.cat(all_scales), torch.cat(all_zeros)
    order: torch.Tensor | None = None
    if not isinstance(groups, int) or groups * scales.shape[1] != inputs:
        index = group_of_inputs(groups, inputs, integers.device)
        if bool((index.diff() < 0).any()):
            order = index.argsort(stable=True)
            index, integers = index[order], integers[:, order]
        found, counts = index.unique_consecutive(return_counts=True)
        repeated = found.repeat_interleave(counts // math.gcd(*counts.tolist()))
        scales, zeros = scales[:, repeated], zeros[:, repeated]
    offsets = -scales * zeros if bool(zeros.any()) else None
    weight = QuantizedWeight(bits, integers, scales, offsets, None if order is None else order.int())
    if not can_pack(weight):
        raise _Unpackable(f"{weight.group} inputs share a scale, and the CPU kernels take multiples of 8")
    return weight


def _is_alike(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    if (one.bits, one.scales.shape[1]) != (other.bits, other.scales.shape[1]):
        return False
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)


class OnlineFp8LinearMethod(LinearMethod):
    """Quantises unquantised weights as they are loaded, with a scale per output channel.

    Layers whose spec keeps their precision are left as they are.
    """

    def __init__(self, quantize: QuantizeRows) -> None:
        super().__init__()
        self._quantize = quantize

    def load(self, weights: Weights, spec: LinearSpec) -> Linear:
        weight, bias = take_fused(weights, spec), take_bias(weights, spec)
        if spec.keeps_precision or not is_aligned(weight.shape):
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


def take_mxfp4(weights: Weights, name: str, shape: tuple[int, int, int], shard: Shard | None) -> torch.Tensor:
    """Take this process's part of [experts, rows, columns], of which pairs of columns are in a byte, the first in
    its lower half. A part of the columns is cut out of the whole blocks that it is in."""
    count, num_rows, columns = shape
    if columns % MX_GROUP:
        raise ConfigError(f"{name} has rows of {columns}, which is not a multiple of {MX_GROUP}")
    cut: range | None = None
    if shard is not None and shard.dim == 2:
        (cut,) = shard.ranges
        first, last = cut.start // MX_GROUP, -(-cut.stop // MX_GROUP)
        shard, cut = Shard(2, (range(first, last),)), range(cut.start - first * 32, cut.stop - first * 32)
    blocks = columns // MX_GROUP
    packed = weights.take(
        name + "_blocks", count, num_rows, blocks, MX_GROUP // 2, dtype=torch.uint8, shard=shard
    )
    scales = weights.take(name + "_scales", count, num_rows, blocks, dtype=torch.uint8, shard=shard)
    width = packed.shape[2] * MX_GROUP
    if packed.is_meta:
        widths = width if cut is None else len(cut)
        return torch.empty(*packed.shape[:2], widths, dtype=weights.dtype, device=packed.device)
    pairs = fp4_pairs(packed.device)

    def widen(part: torch.Tensor, at: int) -> torch.Tensor:
        exponents = flat_scales[at : at + len(part)].int() - 127
        widened = torch.ldexp(F.embedding(part.int(), pairs).flatten(2), exponents.unsqueeze(-1)).flatten(1)
        return widened if cut is None else widened[:, cut.start : cut.stop]

    flat_scales = scales.flatten(0, 1)
    flat = _by_rows(packed.flatten(0, 1), weights.dtype, widen, columns=width if cut is None else len(cut))
    return flat.view(*packed.shape[:2], -1)


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [out, in] in FP8 and the scale of each channel, float32 [out]."""
    out = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scale = weight.abs().amax(dim=1).float().div_(MAX_FP8).clamp_(min=1e-12)
    for start in range(0, len(weight), ROWS):
        rows = slice(start, start + ROWS)
        out[rows] = (weight[rows].float() / scale[rows, None]).clamp_(-MAX_FP8, MAX_FP8).to(FP8)
    return out, scale


def _joined(scales: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate vectors. On the meta device `torch.cat` would import torch's compiler, which takes seconds."""
    if len(scales) == 1:
        return scales[0].contiguous()
    return scales[0].new_empty(sum(map(len, scales))) if scales[0].is_meta else torch.cat(scales)


def quantized_weight(weight: torch.Tensor, bits: int) -> QuantizedWeight | None:
    """Quantise a weight [out, in]; None: no group divides its inputs.

    The scale of a group is its largest magnitude divided by half the number of steps, as compressed-tensors computes it
    for symmetric integers (`calculate_qparams`).
    """
    out, inputs = weight.shape
    if (group := group_size(inputs)) is None:
        return None
    half = 1 << (bits - 1)
    integers = torch.empty(out, inputs, dtype=torch.int8)
    scales = torch.empty(out, inputs // group)
    for start in range(0, out, ROWS):
        rows = slice(start, start + ROWS)
        groups = weight[rows].float().unflatten(1, (-1, group))
        scale = groups.abs().amax(dim=2).div_(half - 0.5).clamp_(min=torch.finfo(torch.float32).tiny)
        rounded = groups.div(scale.unsqueeze(2)).round_().clamp_(-half, half - 1)
        integers[rows], scales[rows] = rounded.flatten(1).to(torch.int8), scale
    return QuantizedWeight(bits, integers, scales)


def is_aligned(shape: Sequence[int]) -> bool:
    return all(size % _ALIGNMENT == 0 for size in shape)


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
    for start in range(0, len(stored), ROWS):
        out[start : start + ROWS] = widen(stored[start : start + ROWS], start)
    return out
