"""LayerKernels by our Triton kernels, one launch each."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from argosy_engine.layers import layer_kernels
from argosy_engine.layers.layer_kernels import GatedActivation, TorchLayerKernels
from argosy_engine.layers.plain_operations import needs_plain_operations
from argosy_engine.quantized_rows import Activations, QuantizedRows, RowQuantization
from argosy_engine.triton_kernels.rms_norm import (
    MAX_WIDTH,
    add_rms_norm,
    add_rms_norm_fp8,
    rms_norm,
    rms_norm_fp8,
)
from argosy_engine.triton_kernels.silu_and_mul import (
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_fp8,
    relu2,
    relu2_fp8,
    silu_and_mul,
    silu_and_mul_fp8,
)

_FP8_ACTIVATIONS = {
    "silu": silu_and_mul_fp8,
    "gelu_pytorch_tanh": gelu_tanh_and_mul_fp8,
    "relu2": relu2_fp8,
}


def _unless_traced(kernel: GatedActivation, plain: GatedActivation) -> GatedActivation:
    def activate(gate_up: torch.Tensor) -> Activations:
        return plain(gate_up) if needs_plain_operations() else kernel(gate_up)

    return activate


class TritonLayerKernels:
    """Torch norms rows that are too wide for the kernels, and computes what torch.compile traces."""

    has_native = False
    gated_activations: Mapping[str, GatedActivation] = {
        "silu": _unless_traced(silu_and_mul, layer_kernels.silu_and_mul),
        "gelu_pytorch_tanh": _unless_traced(gelu_tanh_and_mul, layer_kernels.gelu_tanh_and_mul),
        "relu2": _unless_traced(relu2, layer_kernels.squared_relu),
    }

    def __init__(self) -> None:
        self._wide = TorchLayerKernels()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if needs_plain_operations() or x.shape[-1] > MAX_WIDTH:
            return self._wide.rms_norm(x, weight, eps)
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        x_weight: torch.Tensor | None,
    ) -> torch.Tensor:
        if needs_plain_operations() or x.shape[-1] > MAX_WIDTH:
            return self._wide.add_rms_norm(x, residual, weight, eps, x_weight)
        return add_rms_norm(x, residual, weight, eps, x_weight=x_weight)

    def quantized_rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, quantization: RowQuantization
    ) -> Activations:
        if x.shape[-1] > MAX_WIDTH:
            return self._wide.rms_norm(x, weight, eps)
        return QuantizedRows(*rms_norm_fp8(x, weight, eps, quantization.scale))

    def quantized_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        x_weight: torch.Tensor | None,
        quantization: RowQuantization,
    ) -> Activations:
        if x.shape[-1] > MAX_WIDTH:
            return self._wide.add_rms_norm(x, residual, weight, eps, x_weight)
        return QuantizedRows(
            *add_rms_norm_fp8(x, residual, weight, eps, quantization.scale, x_weight=x_weight)
        )

    def quantized_gated_activation(self, name: str, quantization: RowQuantization) -> GatedActivation:
        activate, scale = _FP8_ACTIVATIONS[name], quantization.scale
        return lambda gate_up: QuantizedRows(*activate(gate_up, scale))
