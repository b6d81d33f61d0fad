"""Linear kernels: the ways to store an unquantised weight and multiply by it, and the choice between them.

Each keeps the weight in one layout and drops the original. `linear_kernel` chooses the fastest: on a CPU our own
kernels; where these are unavailable, the layout that torch multiplies fastest at decode batch sizes (bf16: oneDNN's
packed layout, about 1.4x; float32: transposed).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from argosy_engine.layers.layer_kernels import GatedActivation, silu_and_mul, squared_relu
from argosy_engine.native.library import DTYPES, Kernels, PackedLinear, kernels
from argosy_engine.quantized_rows import Activations, QuantizedRows, RowQuantization


class QuantizedProduct(Protocol):
    """Computes x W^T + b, [T, out], for quantised x [T, in]."""

    input_quantization: RowQuantization
    """How x has to be quantised."""

    def __call__(self, x: QuantizedRows) -> torch.Tensor: ...


class LinearKernel(Protocol):
    """Computes x W^T + b, [T, out], for x [T, in]."""

    packed: PackedLinear | None
    """The weight in the layout of the CPU kernels, if they compute this layer."""
    quantized: QuantizedProduct | None
    """What the kernel does once it has quantised x, if it does."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The same for an output head, in x's dtype or in float32."""
        ...


class GatedLinearKernel(Protocol):
    """Computes activation(gate) * up, [T, inner], for x [T, in], where [gate, up] = x W^T + b; without a gate
    activation(x W^T + b)."""

    packed: PackedLinear | None

    @property
    def input_quantization(self) -> RowQuantization | None:
        """See `TakesRows`."""
        ...

    def __call__(self, x: Activations) -> Activations: ...


def multiply(kernel: LinearKernel, x: Activations) -> torch.Tensor:
    """Apply a kernel to what the layer before it gives: a tensor, or rows quantised as the kernel asked for."""
    if isinstance(x, QuantizedRows):
        assert kernel.quantized is not None
        return kernel.quantized(x)
    return kernel(x)


def input_quantization(kernel: LinearKernel) -> RowQuantization | None:
    """Return how the inputs of a kernel should be quantised; None: not at all."""
    return None if kernel.quantized is None else kernel.quantized.input_quantization


def linear_kernel(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_traceable: bool = False
) -> LinearKernel:
    """Choose a kernel for a weight [out, in] and move the weight into its layout.

    Args:
        is_traceable: choose one that torch.compile can trace.
    """
    loaded = None if is_traceable else supporting_kernels(weight)
    if loaded is not None and _fills_units(weight):
        return CpuLinear(loaded, weight, bias)
    if not is_traceable and _has_onednn_layout(weight):
        return OneDnnLinear(weight, bias)
    if weight.device.type == "cpu" and weight.dtype is torch.float32:
        return TransposedLinear(weight, bias)
    return TorchLinear(weight, bias)


def gated_linear_kernel(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: GatedActivation = silu_and_mul,
    *,
    is_traceable: bool = False,
) -> GatedLinearKernel:
    """Choose a kernel for a weight [2 * inner, in], the gate's rows first, or without a gate [inner, in], and move the
    weight into its layout.

    Args:
        is_traceable: choose one that torch.compile can trace.
    """
    loaded = None if is_traceable or not _fills_units(weight) else supporting_kernels(weight)
    if loaded is not None and activation is silu_and_mul and weight.shape[0] // 2 % loaded.lanes == 0:
        return CpuGatedLinear(loaded, weight, bias)
    if loaded is not None and activation is squared_relu:
        return CpuSquaredReluLinear(loaded, weight, bias)
    return SplitGatedLinear(linear_kernel(weight, bias, is_traceable=is_traceable), activation)


def supporting_kernels(weight: torch.Tensor) -> Kernels | None:
    """Return our kernels if they support this weight's device and dtype and are available on this machine."""
    return kernels() if weight.device.type == "cpu" and weight.dtype in DTYPES else None


def _fills_units(weight: torch.Tensor) -> bool:
    """Whether rows consist of whole units of four bytes."""
    return weight.shape[1] * weight.itemsize % 4 == 0


def _has_onednn_layout(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16:
        return False
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class CpuLinear:
    """Our CPU kernels. As an output head it returns the float32 sums."""

    quantized: QuantizedProduct | None = None

    def __init__(self, loaded: Kernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._kernels = loaded
        self._packed = loaded.pack_linear(weight, bias)
        self.packed: PackedLinear | None = self._packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.linear(x.contiguous(), self._packed, x.dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.linear(x.contiguous(), self._packed, torch.float32)


class CpuGatedLinear:
    """Our CPU kernels. The size of each half of the outputs is a multiple of their `lanes`."""

    input_quantization: RowQuantization | None = None

    def __init__(self, loaded: Kernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._kernels = loaded
        self._packed = loaded.pack_linear(weight, bias, is_gated=True)
        self.packed: PackedLinear | None = self._packed

    def __call__(self, x: Activations) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return self._kernels.gated_linear(x.contiguous(), self._packed)


class CpuSquaredReluLinear:
    """Our CPU kernels: relu(x W^T + b) ** 2."""

    input_quantization: RowQuantization | None = None

    def __init__(self, loaded: Kernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._kernels = loaded
        self._packed = loaded.pack_linear(weight, bias)
        self.packed: PackedLinear | None = None  # of gated ones

    def __call__(self, x: Activations) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return self._kernels.squared_relu_linear(x.contiguous(), self._packed)


class OneDnnLinear:
    """oneDNN's packed layout, for bfloat16 on CPUs that multiply it natively."""

    packed: PackedLinear | None = None
    quantized: QuantizedProduct | None = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


class TransposedLinear:
    """W^T laid out contiguously: for float32 on a CPU 3 to 6 times faster than W at decode batch sizes."""

    packed: PackedLinear | None = None
    quantized: QuantizedProduct | None = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._transposed = weight.t().contiguous()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.mm(self._transposed) if self._bias is None else torch.addmm(self._bias, x, self._transposed)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


class TorchLinear:
    """The weight as it is, on any device."""

    packed: PackedLinear | None = None
    quantized: QuantizedProduct | None = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


class SplitGatedLinear:
    """A linear kernel, then the gated activation."""

    packed: PackedLinear | None = None

    def __init__(self, linear: LinearKernel, activation: GatedActivation = silu_and_mul) -> None:
        self._linear, self._activation = linear, activation
        self.input_quantization = input_quantization(linear)

    def __call__(self, x: Activations) -> Activations:
        return self._activation(multiply(self._linear, x))
