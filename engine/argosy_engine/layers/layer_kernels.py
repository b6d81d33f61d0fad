"""LayerKernels: what computes norms and gated activations, chosen once per model with its attention backend.

Linear layers: `linear_kernels`. Experts: `experts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from argosy_engine.attention.torch_rms_norm import rms_norm
from argosy_engine.quantized_rows import Activations, RowQuantization

GatedActivation = Callable[[torch.Tensor], Activations]
"""Maps [gate, up], [T, 2 * inner], to activation(gate) * up, [T, inner], or without a gate up to activation(up)."""


class LayerKernels(Protocol):
    """Norms and gated activations on the activations' device."""

    has_native: bool
    """Whether our CPU kernels take the place of these where they can."""
    gated_activations: Mapping[str, GatedActivation]
    """By the activation's name in configs: `silu`, `gelu_pytorch_tanh` and, without a gate, `relu2`; also those of
    experts where these run one by one."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / rms(x) * weight over the last dimension, for x [T, width] and weight [width]."""
        ...

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        x_weight: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add x, or its RMSNorm by x_weight, to the residual in place and return the RMSNorm of the sum.

        All of x, residual and the result are [T, width] and contiguous.
        """
        ...

    def quantized_rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, quantization: RowQuantization
    ) -> Activations:
        """Return the same as `rms_norm`, quantised if that takes no further launch."""
        ...

    def quantized_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        x_weight: torch.Tensor | None,
        quantization: RowQuantization,
    ) -> Activations:
        """Do the same as `add_rms_norm`, with a result that is quantised if that takes no further launch."""
        ...

    def quantized_gated_activation(self, name: str, quantization: RowQuantization) -> GatedActivation:
        """Return one of `gated_activations` with a result that is quantised if that takes no further launch."""
        ...


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def swigluoai_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gpt-oss' activation: (up + 1) * gate * sigmoid(1.702 gate), of gates of at most 7 and ups within 7."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


def squared_relu(up: torch.Tensor) -> torch.Tensor:
    """relu(up) ** 2 (arXiv 2109.08668)."""
    return F.relu(up).square()


class TorchLayerKernels:
    """Plain torch, on any device. It quantises nothing.

    Args:
        has_native: see `LayerKernels`.
    """

    gated_activations: Mapping[str, GatedActivation] = {
        "silu": silu_and_mul,
        "gelu_pytorch_tanh": gelu_tanh_and_mul,
        "swigluoai": swigluoai_and_mul,
        "relu2": squared_relu,
    }

    def __init__(self, *, has_native: bool = True) -> None:
        self.has_native = has_native

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        x_weight: torch.Tensor | None,
    ) -> torch.Tensor:
        if x_weight is not None:
            x = rms_norm(x, x_weight, eps)
        return rms_norm(residual.add_(x), weight, eps)

    def quantized_rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, quantization: RowQuantization
    ) -> Activations:
        return self.rms_norm(x, weight, eps)

    def quantized_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        x_weight: torch.Tensor | None,
        quantization: RowQuantization,
    ) -> Activations:
        return self.add_rms_norm(x, residual, weight, eps, x_weight)

    def quantized_gated_activation(self, name: str, quantization: RowQuantization) -> GatedActivation:
        return self.gated_activations[name]
