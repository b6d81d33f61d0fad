"""Layers shared by the architectures: RMSNorm. Linear layers: `linear`."""

from __future__ import annotations

import torch

from argosy_engine.attention.torch_rms_norm import rms_norm
from argosy_engine.models.linear_kernels import supporting_kernels


class RMSNorm:
    """x / rms(x) * weight over the last dimension, computed in float32 (arXiv 1910.07467)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        loaded = supporting_kernels(weight)
        self._kernels = loaded if loaded is not None and weight.shape[0] % loaded.lanes == 0 else None

    @property
    def has_kernel(self) -> bool:
        return self._kernels is not None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernels is not None and x.dim() == 2:
            return self._kernels.rms_norm(x.contiguous(), self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps)

    def after_adding(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add x to the residual in place and return the norm of the sum; both [T, width], contiguous."""
        if self._kernels is not None:
            return self._kernels.rms_norm(x, self.weight, self.eps, residual)
        return self(residual.add_(x))
