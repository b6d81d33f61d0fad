"""Layers shared by the architectures: linear, gated linear, RMSNorm.

Weights are plain tensors in inference mode. On a CPU the layers use our own kernels (`native`). Where these are
unavailable, `Linear` stores its weight in the layout that torch multiplies fastest at decode batch sizes (bf16:
oneDNN's packed layout, about 1.4x; float32: transposed). In both cases the original weight is dropped.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from argosy_engine.attention.rms_norm import rms_norm
from argosy_engine.native.library import DTYPES, Kernels, PackedLinear, kernels


class Linear:
    """y = x W^T + b for x [T, in] with W [out, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self.num_bytes = weight.nbytes
        self._onednn: torch.Tensor | None = None
        self._transposed: torch.Tensor | None = None
        self.weight: torch.Tensor | None = None
        self.packed: PackedLinear | None = None
        """The weight in the layout of our kernels, if they apply."""
        self._kernels = _kernels(weight) if self.in_features * weight.itemsize % 4 == 0 else None
        if self._kernels is not None:
            self.packed = self._kernels.pack_linear(weight, bias)
        elif _packs(weight):
            self._onednn = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        elif weight.device.type == "cpu" and weight.dtype is torch.float32:
            # A product with W^T laid out contiguously is 3 to 6 times faster at decode batch sizes.
            self._transposed = weight.t().contiguous()
        else:
            self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernels is not None and self.packed is not None:
            return self._kernels.linear(x.contiguous(), self.packed, x.dtype)
        if self._onednn is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._onednn, self.bias, "none", [], "")
        if self._transposed is not None:
            return (
                x.mm(self._transposed) if self.bias is None else torch.addmm(self.bias, x, self._transposed)
            )
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer as an output head. The kernels return their float32 sums; other paths return x's dtype."""
        if self._kernels is None or self.packed is None:
            return self(x)
        return self._kernels.linear(x.contiguous(), self.packed, torch.float32)


class GatedLinear:
    """silu(gate) * up for x [T, in], where x W^T + b = [gate, up] with W [2 * inner, in]; returns [T, inner]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.packed: PackedLinear | None = None
        """The weight in the layout of our kernels, if they apply."""
        self._kernels = loaded = _kernels(weight)
        fits = weight.shape[1] * weight.itemsize % 4 == 0
        if loaded is not None and fits and weight.shape[0] // 2 % loaded.lanes == 0:
            self.packed = loaded.pack_linear(weight, bias, is_gated=True)
        else:
            self._linear = Linear(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernels is not None and self.packed is not None:
            return self._kernels.gated_linear(x.contiguous(), self.packed)
        gate, up = self._linear(x).chunk(2, dim=-1)
        return F.silu(gate) * up


def _kernels(weight: torch.Tensor) -> Kernels | None:
    """Return our kernels if they support this weight's device and dtype and are available on this machine."""
    return kernels() if weight.device.type == "cpu" and weight.dtype in DTYPES else None


def _packs(weight: torch.Tensor) -> bool:
    """Whether oneDNN has a packed layout for this weight."""
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16:
        return False
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class RMSNorm:
    """x / rms(x) * weight over the last dimension, computed in float32 (arXiv 1910.07467)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        loaded = _kernels(weight)
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
