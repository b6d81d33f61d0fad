"""Layers shared by the architectures: RMSNorm, and the norm before a product. Linear layers: `linear`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from argosy_engine.distributed.communicator import Communicator
from argosy_engine.layers.layer_kernels import LayerKernels
from argosy_engine.layers.linear_kernels import supporting_kernels
from argosy_engine.quantized_rows import Activations, RowQuantization


class RMSNorm:
    """x / rms(x) * weight over the last dimension, computed in float32 (arXiv 1910.07467).

    Args:
        weight: [width], in the activations' dtype or in float32.
        dtype: of the activations.
        kernels: compute where our CPU kernels cannot.
    """

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype, kernels: LayerKernels) -> None:
        self.weight = weight
        self.eps = eps
        self._kernels = kernels
        native = supporting_kernels(weight) if kernels.has_native else None
        can_serve = native is not None and weight.dtype is dtype and weight.shape[0] % native.lanes == 0
        self._native = native if can_serve else None

    @property
    def has_kernel(self) -> bool:
        """Whether our CPU kernels compute it."""
        return self._native is not None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._native is not None and x.dim() == 2:
            return self._native.rms_norm(x.contiguous(), self.weight, self.eps)
        return self._kernels.rms_norm(x, self.weight, self.eps)

    def after_adding(
        self, x: torch.Tensor, residual: torch.Tensor, x_norm: RMSNorm | None = None
    ) -> torch.Tensor:
        """Add x to the residual in place and return the norm of the sum; both [T, width], contiguous.

        Args:
            x_norm: a norm with the same eps, which is applied to x before it is added.
        """
        if self._native is None:
            x_weight = None if x_norm is None else x_norm.weight
            return self._kernels.add_rms_norm(x, residual, self.weight, self.eps, x_weight)
        if x_norm is not None:
            x = x_norm(x)
        return self._native.rms_norm(x, self.weight, self.eps, residual)


class InputNorm:
    """An RMSNorm whose output is the input of products, quantised as they want it.

    Args:
        quantization: None: plain.
    """

    def __init__(self, norm: RMSNorm, kernels: LayerKernels, quantization: RowQuantization | None) -> None:
        self._norm = norm
        self._kernels = kernels
        self._quantization = quantization

    @property
    def weight(self) -> torch.Tensor:
        return self._norm.weight

    @property
    def eps(self) -> float:
        return self._norm.eps

    @property
    def has_kernel(self) -> bool:
        """See `RMSNorm`."""
        return self._norm.has_kernel

    def __call__(self, x: torch.Tensor) -> Activations:
        if self._quantization is None:
            return self._norm(x)
        return self._kernels.quantized_rms_norm(x, self.weight, self.eps, self._quantization)

    def after_adding(
        self, x: torch.Tensor, residual: torch.Tensor, x_norm: RMSNorm | None = None
    ) -> Activations:
        """See `RMSNorm`."""
        if self._quantization is None:
            return self._norm.after_adding(x, residual, x_norm)
        x_weight = None if x_norm is None else x_norm.weight
        return self._kernels.quantized_add_rms_norm(
            x, residual, self.weight, self.eps, x_weight, self._quantization
        )


class HeadsNorm:
    """LayerNorms without bias of each head of q and k, with a weight for each head (Command R+).

    Args:
        weight: of this rank's query heads, then of its key heads, [num_heads + num_kv_heads, head_dim].
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight.float()
        self._eps = eps

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """Norm q and k of qkv [T, (num_heads + 2 num_kv_heads) * head_dim] in place; returns qkv."""
        count, dim = self._weight.shape
        heads = qkv[:, : count * dim].unflatten(1, (count, dim))
        heads.copy_(F.layer_norm(heads.float(), (dim,), eps=self._eps) * self._weight)
        return qkv


class WidthNorm:
    """RMSNorms of q over all its heads and of k over all its heads, which ranks may share (OLMo 2, arXiv 2501.00656).

    Args:
        q_norm: of this rank's heads, [num_heads * head_dim].
        k_norm: [num_kv_heads * head_dim]
        communicator: of the ranks, whose sums of squares count; None: this one has all heads.
    """

    def __init__(self, q_norm: RMSNorm, k_norm: RMSNorm, communicator: Communicator | None) -> None:
        self._norms = q_norm, k_norm
        self._communicator = communicator

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """Norm q and k of qkv [T, (num_heads + 2 num_kv_heads) * head_dim] in place; returns qkv."""
        q_size, k_size = (len(norm.weight) for norm in self._norms)
        parts = qkv[:, :q_size], qkv[:, q_size : q_size + k_size]
        if self._communicator is None:
            for part, norm in zip(parts, self._norms, strict=True):
                part.copy_(norm(part.contiguous()))
            return qkv
        squares = torch.stack([part.float().square().mean(dim=1) for part in parts])
        # Each rank has as many heads, and each head is on as many ranks.
        squares = self._communicator.all_reduce(squares) / self._communicator.size
        for part, norm, square in zip(parts, self._norms, squares, strict=True):
            factor = torch.rsqrt(square + norm.eps).unsqueeze(1)
            part.copy_((part.float() * factor).to(part.dtype) * norm.weight)
        return qkv
