"""LayerKernels by our Triton kernels, one launch each."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from argosy_engine.models.layer_kernels import GatedActivation, TorchLayerKernels
from argosy_engine.triton_kernels.rms_norm import MAX_WIDTH, add_rms_norm, rms_norm
from argosy_engine.triton_kernels.silu_and_mul import gelu_tanh_and_mul, silu_and_mul


class TritonLayerKernels:
    """Rows that are too wide for the kernels are normed by torch."""

    gated_activations: Mapping[str, GatedActivation] = {
        "silu": silu_and_mul,
        "gelu_pytorch_tanh": gelu_tanh_and_mul,
    }

    def __init__(self) -> None:
        self._wide = TorchLayerKernels()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.shape[-1] > MAX_WIDTH:
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
        if x.shape[-1] > MAX_WIDTH:
            return self._wide.add_rms_norm(x, residual, weight, eps, x_weight)
        return add_rms_norm(x, residual, weight, eps, x_weight=x_weight)
