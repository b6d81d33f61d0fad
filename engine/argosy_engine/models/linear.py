"""Linear layers: what a model asks for. How they are stored, loaded and computed: `linear_method`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from argosy_engine.models.linear_kernels import GatedLinearKernel, LinearKernel
from argosy_engine.native.library import PackedLinear


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One projection, or several of the same input that are fused along their outputs."""

    parts: Mapping[str, int]
    """Output features by the projection's name in the checkpoint (without `.weight`)."""
    in_features: int
    has_bias: bool = False
    is_transposed: bool = False
    """Whether the checkpoint stores [in, out] (GPT-2's Conv1D)."""

    @property
    def out_features(self) -> int:
        return sum(self.parts.values())


class Linear:
    """y = x W^T + b for x [T, in] with W [out, in]."""

    def __init__(self, kernel: LinearKernel) -> None:
        self._kernel = kernel

    @property
    def packed(self) -> PackedLinear | None:
        """The weight in the layout of the CPU kernels, if they compute this layer."""
        return self._kernel.packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernel(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer as an output head. The CPU kernels return their float32 sums; others return x's dtype."""
        return self._kernel.logits(x)


class GatedLinear:
    """activation(gate) * up for x [T, in], where x W^T + b = [gate, up] with W [2 * inner, in]; returns [T, inner]."""

    def __init__(self, kernel: GatedLinearKernel) -> None:
        self._kernel = kernel

    @property
    def packed(self) -> PackedLinear | None:
        """The weight in the layout of the CPU kernels, if they compute this layer."""
        return self._kernel.packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernel(x)
