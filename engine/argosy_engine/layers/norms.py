"""Norms and gated activations, and the LayerKernels that compute them, chosen once per model with its attention
backend.

torch.compile cannot look into our kernels and generates its own, from what it traces. So while it traces, layers call
torch (`needs_plain_operations`); the same code runs without a compiler when a compiled layer is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
import torch.nn.functional as F

from argosy_engine.attention.backend import rms_norm
from argosy_engine.distributed.parallel_state import Communicator
from argosy_engine.native.library import kernels_for
from argosy_engine.quantized_rows import Activations, QuantizedRows, RowQuantization

GatedActivation = Callable[[torch.Tensor], Activations]
"""Maps [gate, up], [T, 2 * inner], to activation(gate) * up, [T, inner], or without a gate up to activation(up)."""


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


ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""Activations of MLPs without a gate, by the names that transformers' configs use."""


class LayerKernels:
    """Norms and gated activations in plain torch, on any device. It quantises nothing.

    Args:
        has_native: whether our CPU kernels take the place of these where they can.
    """

    gated_activations: Mapping[str, GatedActivation] = {
        "silu": silu_and_mul,
        "gelu_pytorch_tanh": gelu_tanh_and_mul,
        "swigluoai": swigluoai_and_mul,
        "relu2": squared_relu,
    }
    """By the activation's name in configs: `relu2` is without a gate, `swigluoai` of experts that run one by one."""

    def __init__(self, *, has_native: bool = True) -> None:
        self.has_native = has_native

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / rms(x) * weight over the last dimension, for x [T, width] and weight [width]."""
        return rms_norm(x, weight, eps)

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
        if x_weight is not None:
            x = rms_norm(x, x_weight, eps)
        return rms_norm(residual.add_(x), weight, eps)

    def quantized_rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, quantization: RowQuantization
    ) -> Activations:
        """Return the same as `rms_norm`, quantised if that takes no further launch."""
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
        """Do the same as `add_rms_norm`, with a result that is quantised if that takes no further launch."""
        return self.add_rms_norm(x, residual, weight, eps, x_weight)

    def quantized_gated_activation(self, name: str, quantization: RowQuantization) -> GatedActivation:
        """Return one of `gated_activations` with a result that is quantised if that takes no further launch."""
        return self.gated_activations[name]


class TritonLayerKernels(LayerKernels):
    """Our Triton kernels, one launch each. Torch norms rows that are too wide for them, and computes what torch.compile
    traces."""

    def __init__(self) -> None:
        from argosy_engine.triton_kernels import activations, rms_norm

        super().__init__(has_native=False)
        self._kernels = rms_norm
        self.gated_activations = {
            "silu": _unless_traced(activations.silu_and_mul, silu_and_mul),
            "gelu_pytorch_tanh": _unless_traced(activations.gelu_tanh_and_mul, gelu_tanh_and_mul),
            "relu2": _unless_traced(activations.relu2, squared_relu),
        }
        self._fp8_activations = {
            "silu": activations.silu_and_mul_fp8,
            "gelu_pytorch_tanh": activations.gelu_tanh_and_mul_fp8,
            "relu2": activations.relu2_fp8,
        }

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if needs_plain_operations() or x.shape[-1] > self._kernels.MAX_WIDTH:
            return super().rms_norm(x, weight, eps)
        return self._kernels.rms_norm(x, weight, eps)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        x_weight: torch.Tensor | None,
    ) -> torch.Tensor:
        if needs_plain_operations() or x.shape[-1] > self._kernels.MAX_WIDTH:
            return super().add_rms_norm(x, residual, weight, eps, x_weight)
        return self._kernels.add_rms_norm(x, residual, weight, eps, x_weight=x_weight)

    def quantized_rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, quantization: RowQuantization
    ) -> Activations:
        if x.shape[-1] > self._kernels.MAX_WIDTH:
            return super().rms_norm(x, weight, eps)
        return QuantizedRows(*self._kernels.rms_norm_fp8(x, weight, eps, quantization.scale))

    def quantized_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        x_weight: torch.Tensor | None,
        quantization: RowQuantization,
    ) -> Activations:
        if x.shape[-1] > self._kernels.MAX_WIDTH:
            return super().add_rms_norm(x, residual, weight, eps, x_weight)
        scale = quantization.scale
        return QuantizedRows(
            *self._kernels.add_rms_norm_fp8(x, residual, weight, eps, scale, x_weight=x_weight)
        )

    def quantized_gated_activation(self, name: str, quantization: RowQuantization) -> GatedActivation:
        activate, scale = self._fp8_activations[name], quantization.scale
        return lambda gate_up: QuantizedRows(*activate(gate_up, scale))


def _unless_traced(kernel: GatedActivation, plain: GatedActivation) -> GatedActivation:
    def activate(gate_up: torch.Tensor) -> Activations:
        return plain(gate_up) if needs_plain_operations() else kernel(gate_up)

    return activate


_are_wanted: ContextVar[bool] = ContextVar("plain operations are wanted", default=False)


def needs_plain_operations() -> bool:
    """Whether the caller is being traced, or runs within `plain_operations`."""
    return torch.compiler.is_compiling() or _are_wanted.get()


@contextmanager
def plain_operations() -> Iterator[None]:
    """Let layers compute with torch, as if they were being traced."""
    token = _are_wanted.set(True)
    try:
        yield
    finally:
        _are_wanted.reset(token)


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
        native = kernels_for(weight.device, weight.dtype) if kernels.has_native else None
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


class LayerNorm:
    """(x - mean) / std * weight + bias over the last dimension (arXiv 1607.06450).

    Args:
        weight: [width]
        bias: [width]; None: nothing is added.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


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
