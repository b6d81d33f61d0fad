"""Linear layers: what a model asks for (`LinearSpec`), and the ways to store an unquantised weight and multiply by it.

Each keeps the weight in one layout and drops the original. `linear_of` chooses the fastest: on a CPU our own kernels;
where these are unavailable, the layout that torch multiplies fastest at decode batch sizes (bf16: oneDNN's packed
layout, about 1.4x; float32: transposed). How weights are loaded, and products in FP8: `linear_method`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from argosy_engine.distributed.parallel_state import Communicator
from argosy_engine.layers.norms import GatedActivation, silu_and_mul, squared_relu
from argosy_engine.model_configs.sharding import Shard
from argosy_engine.native.library import Kernels, PackedLinear, QuantizedWeight, kernels_for
from argosy_engine.quantized_rows import Activations, RowQuantization


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One projection, or several of the same input that are fused along their outputs."""

    parts: Mapping[str, int]
    """Output features by the projection's name in the checkpoint (without `.weight`)."""
    in_features: int
    has_bias: bool = False
    is_transposed: bool = False
    """Whether the checkpoint stores [in, out] (GPT-2's Conv1D)."""
    outputs: Mapping[str, tuple[range, ...]] | None = None
    """Output features of each part that this process computes; None: all."""
    inputs: range | None = None
    """Input features that this process multiplies; None: all."""
    order: tuple[int, ...] | None = None
    """Order into which this process brings its output features; None: as they are."""
    keeps_precision: bool = False
    """Whether weights that the checkpoint does not quantise must stay so: a router's, the output head's."""
    is_head: bool = False
    """Whether it is the output head, which may be quantised at load to `HEAD_BITS`."""

    @property
    def out_features(self) -> int:
        """Number of output features that this process computes."""
        return sum(self.num_outputs(name) for name in self.parts)

    def num_outputs(self, name: str) -> int:
        """Return the number of output features of a part that this process computes."""
        if self.outputs is None:
            return self.parts[name]
        return sum(len(each) for each in self.outputs[name])

    def feature_shard(self, name: str) -> Shard | None:
        """Return what this process takes of a part's weight [out, in]. Divided along one dimension at most."""
        if self.inputs is not None:
            return Shard(1, (self.inputs,))
        return self.output_shard(name)

    def weight_shard(self, name: str) -> Shard | None:
        """Return what this process takes of a part's weight as it is stored."""
        shard = self.feature_shard(name)
        return shard._replace(dim=1 - shard.dim) if shard is not None and self.is_transposed else shard

    def output_shard(self, name: str) -> Shard | None:
        """Return what this process takes of a tensor with one element per output feature of a part."""
        return None if self.outputs is None else Shard(0, self.outputs[name])


def ordered(spec: LinearSpec, tensor: torch.Tensor) -> torch.Tensor:
    """Bring a tensor with an entry of dimension 0 per output feature into the order of a spec."""
    if spec.order is None or tensor.is_meta:  # where indexing would import torch's compiler
        return tensor
    index = torch.tensor(spec.order, device=tensor.device)
    if tensor.itemsize == 1:  # torch indexes FP8 only as bytes
        return tensor.view(torch.uint8)[index].view(tensor.dtype)
    return tensor[index]


def fuse(spec: LinearSpec, take: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Concatenate the parts along dimension 0, copying each into place as it is read to limit peak memory."""
    if len(spec.parts) == 1:
        return take(next(iter(spec.parts)))
    fused: torch.Tensor | None = None
    start = 0
    for name in spec.parts:
        size = spec.num_outputs(name)
        part = take(name)
        if fused is None:
            fused = part.new_empty((spec.out_features, *part.shape[1:]))
        fused[start : start + size].copy_(part)
        start += size
    assert fused is not None
    return fused


class Linear(ABC):
    """y = x W^T + b for x [T, in] with W [out, in]."""

    packed: PackedLinear | None = None
    """The weight in the layout of the CPU kernels, if they compute this layer."""
    input_quantization: RowQuantization | None = None
    """See `TakesRows`."""

    @abstractmethod
    def __call__(self, x: Activations) -> torch.Tensor: ...

    def partial(self, x: Activations) -> torch.Tensor:
        """Return what `sum_ranks` makes the layer's output of. Exchanges nothing between ranks."""
        return self(x)

    def sum_ranks(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer as an output head. The CPU kernels return their float32 sums; others return x's dtype."""
        return self(x)


class GatedLinear(ABC):
    """activation(gate) * up for x [T, in], where x W^T + b = [gate, up] with W [2 * inner, in]; returns [T, inner].
    Without a gate W is [inner, in], and the result activation(x W^T + b)."""

    packed: PackedLinear | None = None
    """The weight in the layout of the CPU kernels, if they compute this layer."""
    input_quantization: RowQuantization | None = None
    """See `TakesRows`."""

    @abstractmethod
    def __call__(self, x: Activations) -> Activations: ...


def linear_of(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_traceable: bool = False
) -> Linear:
    """Make a layer of a weight [out, in], which is moved into the layout that the layer multiplies by.

    Args:
        is_traceable: choose one that torch.compile can trace.
    """
    loaded = None if is_traceable else kernels_for(weight.device, weight.dtype)
    if loaded is not None and _fills_units(weight):
        return CpuLinear(loaded, loaded.pack_linear(weight, bias))
    if not is_traceable and _has_onednn_layout(weight):
        return OneDnnLinear(weight, bias)
    if weight.device.type == "cpu" and weight.dtype is torch.float32:
        return TransposedLinear(weight, bias)
    return TorchLinear(weight, bias)


def gated_linear_of(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: GatedActivation = silu_and_mul,
    *,
    is_traceable: bool = False,
) -> GatedLinear:
    """Make a layer of a weight [2 * inner, in], the gate's rows first, or without a gate [inner, in]. See
    `linear_of`."""
    loaded = None
    if not is_traceable and _fills_units(weight):
        loaded = kernels_for(weight.device, weight.dtype)
    if loaded is not None and activation is silu_and_mul and weight.shape[0] // 2 % loaded.lanes == 0:
        return CpuGatedLinear(loaded, loaded.pack_linear(weight, bias, is_gated=True))
    if loaded is not None and activation is squared_relu:
        return CpuSquaredReluLinear(loaded, loaded.pack_linear(weight, bias))
    return SplitGatedLinear(linear_of(weight, bias, is_traceable=is_traceable), activation)


def quantized_linear_of(
    loaded: Kernels, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> Linear:
    """Make a layer of a weight that stays packed.

    Args:
        weight: `can_pack` holds of it.
        dtype: of the activations and the bias.
    """
    return CpuLinear(loaded, loaded.pack_quantized(weight, dtype, bias))


def quantized_gated_linear_of(
    loaded: Kernels,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    activation: GatedActivation,
) -> GatedLinear:
    """The same for a weight [2 * inner, in], the gate's rows first, or without a gate [inner, in]."""
    if activation is silu_and_mul and weight.integers.shape[0] // 2 % loaded.lanes == 0:
        return CpuGatedLinear(loaded, loaded.pack_quantized(weight, dtype, bias, is_gated=True))
    if activation is squared_relu:
        return CpuSquaredReluLinear(loaded, loaded.pack_quantized(weight, dtype, bias))
    return SplitGatedLinear(quantized_linear_of(loaded, weight, bias, dtype), activation)


def _fills_units(weight: torch.Tensor) -> bool:
    """Whether rows consist of whole units of four bytes."""
    return weight.shape[1] * weight.itemsize % 4 == 0


def _has_onednn_layout(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16:
        return False
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class CpuLinear(Linear):
    """Our CPU kernels. As an output head it returns the float32 sums."""

    def __init__(self, loaded: Kernels, packed: PackedLinear) -> None:
        self._kernels = loaded
        self.packed = self._packed = packed

    def __call__(self, x: Activations) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return self._kernels.linear(x.contiguous(), self._packed, x.dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.linear(x.contiguous(), self._packed, torch.float32)


class OneDnnLinear(Linear):
    """oneDNN's packed layout, for bfloat16 on CPUs that multiply it natively."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias

    def __call__(self, x: Activations) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")


class TransposedLinear(Linear):
    """W^T laid out contiguously: for float32 on a CPU 3 to 6 times faster than W at decode batch sizes."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._transposed = weight.t().contiguous()
        self._bias = bias

    def __call__(self, x: Activations) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return x.mm(self._transposed) if self._bias is None else torch.addmm(self._bias, x, self._transposed)


class TorchLinear(Linear):
    """The weight as it is, on any device."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Activations) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return F.linear(x, self._weight, self._bias)


class CpuGatedLinear(GatedLinear):
    """Our CPU kernels. The size of each half of the outputs is a multiple of their `lanes`."""

    def __init__(self, loaded: Kernels, packed: PackedLinear) -> None:
        self._kernels = loaded
        self.packed = self._packed = packed

    def __call__(self, x: Activations) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return self._kernels.gated_linear(x.contiguous(), self._packed)


class CpuSquaredReluLinear(GatedLinear):
    """Our CPU kernels: relu(x W^T + b) ** 2. Its weight is not packed as gated ones are."""

    def __init__(self, loaded: Kernels, packed: PackedLinear) -> None:
        self._kernels, self._packed = loaded, packed

    def __call__(self, x: Activations) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return self._kernels.squared_relu_linear(x.contiguous(), self._packed)


class SplitGatedLinear(GatedLinear):
    """A linear layer, then the gated activation."""

    def __init__(self, linear: Linear, activation: GatedActivation = silu_and_mul) -> None:
        self._linear, self._activation = linear, activation
        self.input_quantization = linear.input_quantization

    def __call__(self, x: Activations) -> Activations:
        return self._activation(self._linear(x))


class Float32Linear(Linear):
    """A linear layer that computes in float32, whatever the dtype of x; so is the result."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: Activations) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return self._linear(x.float())


class RowParallelLinear(Linear):
    """A linear layer whose inputs are divided among the ranks; the partial results are summed."""

    def __init__(self, linear: Linear, communicator: Communicator) -> None:
        self._linear, self._communicator = linear, communicator
        self.packed, self.input_quantization = linear.packed, linear.input_quantization

    def __call__(self, x: Activations) -> torch.Tensor:
        return self.sum_ranks(self._linear(x))

    def partial(self, x: Activations) -> torch.Tensor:
        return self._linear(x)

    def sum_ranks(self, x: torch.Tensor) -> torch.Tensor:
        return self._communicator.all_reduce(x)


class VocabParallelHead(Linear):
    """An output head whose tokens are divided among the ranks. All ranks get all logits.

    Args:
        vocab_size: number of tokens of all ranks. The last rank may have fewer than the others.
    """

    def __init__(self, linear: Linear, communicator: Communicator, vocab_size: int) -> None:
        self._linear, self._communicator = linear, communicator
        self._vocab_size = vocab_size
        self._width = -(-vocab_size // communicator.size)

    def __call__(self, x: Activations) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return self.logits(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        own = self._linear.logits(x)
        if own.shape[1] < self._width:
            own = F.pad(own, (0, self._width - own.shape[1]))
        return self._communicator.all_gather(own)[:, : self._vocab_size]
