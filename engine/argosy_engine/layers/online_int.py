"""`--quantization int8` and `int4`: weights that are quantised as they are loaded, for the CPU kernels, which multiply
by them as they are packed (native/src/quantized_linear.h).

Integers are rounded to nearest and symmetric, in groups of adjacent inputs that share a scale. Output head, routers and
other layers whose spec keeps their precision stay as they are, and so do layers whose inputs no group divides.
"""

from __future__ import annotations

import torch

from argosy_engine.checkpoint.weights import Weights
from argosy_engine.layers.linear import (
    GatedLinear,
    Linear,
    LinearSpec,
    quantized_gated_linear_of,
    quantized_linear_of,
)
from argosy_engine.layers.linear_method import LinearMethod, take_bias, take_fused
from argosy_engine.layers.norms import GatedActivation
from argosy_engine.model_configs.quantization_config import group_size
from argosy_engine.native.library import Kernels, QuantizedWeight

_ROWS = 1024
"""Rows that are quantised at a time, to limit peak memory."""


class OnlineIntLinearMethod(LinearMethod):
    """Quantises unquantised weights as they are loaded.

    Args:
        bits: 8 or 4.
        loaded: multiplies by them.
    """

    def __init__(self, bits: int, loaded: Kernels) -> None:
        super().__init__()
        self._bits, self._kernels = bits, loaded

    def load(self, weights: Weights, spec: LinearSpec) -> Linear:
        if spec.keeps_precision:
            return super().load(weights, spec)
        return self.make(take_fused(weights, spec), take_bias(weights, spec))

    def load_gated(self, weights: Weights, spec: LinearSpec, activation: GatedActivation) -> GatedLinear:
        if spec.keeps_precision:
            return super().load_gated(weights, spec, activation)
        return self.make_gated(take_fused(weights, spec), take_bias(weights, spec), activation)

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        if (quantized := quantized_weight(weight, self._bits)) is None:
            return super().make(weight, bias)
        return quantized_linear_of(self._kernels, quantized, bias, weight.dtype)

    def make_gated(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: GatedActivation
    ) -> GatedLinear:
        if (quantized := quantized_weight(weight, self._bits)) is None:
            return super().make_gated(weight, bias, activation)
        return quantized_gated_linear_of(self._kernels, quantized, bias, weight.dtype, activation)


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
    for start in range(0, out, _ROWS):
        rows = slice(start, start + _ROWS)
        groups = weight[rows].float().unflatten(1, (-1, group))
        scale = groups.abs().amax(dim=2).div_(half - 0.5).clamp_(min=torch.finfo(torch.float32).tiny)
        rounded = groups.div(scale.unsqueeze(2)).round_().clamp_(-half, half - 1)
        integers[rows], scales[rows] = rounded.flatten(1).to(torch.int8), scale
    return QuantizedWeight(bits, integers, scales)
