"""FP8 linear layers: weights in 8 bits with a scale per output channel, multiplied in FP8 or widened at load.

A scale per tensor counts as equal scales of its channels, so that projections that are fused need no common scale, and
one product serves all schemes: rows of activations have scales of their own, channels of the weight too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from argosy_engine.checkpoint.weights import Weights
from argosy_engine.layers.experts import ExpertsSpec, StackedExperts
from argosy_engine.layers.layer_kernels import GatedActivation
from argosy_engine.layers.linear import LinearSpec, ordered
from argosy_engine.layers.linear_kernels import (
    GatedLinearKernel,
    LinearKernel,
    QuantizedProduct,
    SplitGatedLinear,
    gated_linear_kernel,
    linear_kernel,
)
from argosy_engine.layers.linear_method import (
    UnquantizedLinearMethod,
    take_bias,
    take_expert,
    take_fused,
    take_stacked,
)
from argosy_engine.model_configs.quantization_config import QuantizationConfig
from argosy_engine.model_configs.sharding import Shard
from argosy_engine.native.library import PackedLinear
from argosy_engine.quantized_rows import QuantizedRows, RowQuantization

FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0
"""Largest number of this format."""
_ROWS = 4096
"""Rows that are widened at a time, to limit peak memory."""
_ALIGNMENT = 16
"""`torch._scaled_mm` takes sizes that are multiples of this."""

QuantizeRows = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
"""See `triton_kernels.quantize_fp8`."""


class Fp8Product:
    """x W^T + b for x in FP8.

    Args:
        weight: float8_e4m3fn [out, in].
        scale: float32 [out].
        bias: [out].
        input_scale: float32 [1], of all inputs; None: each row has the scale that suits it.
        dtype: of the result.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        input_scale: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self._weight, self._scale = weight.t(), scale.unsqueeze(0)
        self._bias, self._dtype = bias, dtype
        self.input_quantization = RowQuantization(input_scale)

    def __call__(self, x: QuantizedRows) -> torch.Tensor:
        return torch._scaled_mm(
            x.values, self._weight, x.scales, self._scale, self._bias, out_dtype=self._dtype
        )


class Fp8Linear:
    """An FP8 product, which quantises its inputs in a launch of its own if the layer before it has not."""

    packed: PackedLinear | None = None

    def __init__(self, product: Fp8Product, quantize: QuantizeRows) -> None:
        self._product, self._quantize = product, quantize
        self.quantized: QuantizedProduct | None = product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(QuantizedRows(*self._quantize(x, self._product.input_quantization.scale)))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


class Fp8LinearMethod(UnquantizedLinearMethod):
    """Reads FP8 weights of a checkpoint.

    Args:
        config: which layers are quantised, and how.
        quantize: of a device that multiplies FP8; None: weights are widened to the engine's dtype at load.
    """

    def __init__(self, config: QuantizationConfig, quantize: QuantizeRows | None) -> None:
        super().__init__()
        self._config = config
        self._quantize = quantize

    def load(self, weights: Weights, spec: LinearSpec) -> LinearKernel:
        if not self._config.quantises_all(tuple(spec.parts)):
            return super().load(weights, spec)
        weight, scale, bias = self._take(weights, spec)
        input_scale = self._input_scale(weights, tuple(spec.parts))
        if self._quantize is None or not is_aligned(weight):
            return linear_kernel(widened(weight, scale, weights.dtype), bias)
        return Fp8Linear(Fp8Product(weight, scale, bias, input_scale, weights.dtype), self._quantize)

    def load_gated(
        self, weights: Weights, spec: LinearSpec, activation: GatedActivation
    ) -> GatedLinearKernel:
        if not self._config.quantises_all(tuple(spec.parts)):
            return super().load_gated(weights, spec, activation)
        if self._quantize is not None:
            return SplitGatedLinear(self.load(weights, spec), activation)
        weight, scale, bias = self._take(weights, spec)
        self._input_scale(weights, tuple(spec.parts))
        return gated_linear_kernel(widened(weight, scale, weights.dtype), bias, activation)

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


class OnlineFp8LinearMethod(UnquantizedLinearMethod):
    """Quantises unquantised weights as they are loaded, with a scale per output channel.

    Layers whose spec keeps their precision are left as they are.
    """

    def __init__(self, quantize: QuantizeRows) -> None:
        super().__init__()
        self._quantize = quantize

    def load(self, weights: Weights, spec: LinearSpec) -> LinearKernel:
        weight, bias = take_fused(weights, spec), take_bias(weights, spec)
        if spec.keeps_precision or not is_aligned(weight):
            return linear_kernel(weight, bias)
        return Fp8Linear(Fp8Product(*quantized(weight), bias, None, weights.dtype), self._quantize)

    def load_gated(
        self, weights: Weights, spec: LinearSpec, activation: GatedActivation
    ) -> GatedLinearKernel:
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


def widened(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an FP8 weight [out, in] in another dtype, multiplied by the scale of each channel [out]."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    if weight.is_meta:  # where the product would import sympy
        return out
    for start in range(0, len(weight), _ROWS):
        rows = slice(start, start + _ROWS)
        out[rows] = weight[rows].float().mul_(scale[rows, None])
    return out


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
