"""Linear layers: what a model asks for. How they are stored, loaded and computed: `linear_method`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from argosy_engine.distributed.communicator import Communicator
from argosy_engine.layers.linear_kernels import (
    GatedLinearKernel,
    LinearKernel,
    input_quantization,
    multiply,
)
from argosy_engine.model_configs.sharding import Shard
from argosy_engine.native.library import PackedLinear
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

    @property
    def out_features(self) -> int:
        """Number of output features that this process computes."""
        return sum(self.num_outputs(name) for name in self.parts)

    def num_outputs(self, name: str) -> int:
        """Return the number of output features of a part that this process computes."""
        if self.outputs is None:
            return self.parts[name]
        return sum(len(each) for each in self.outputs[name])

    def weight_shard(self, name: str) -> Shard | None:
        """Return what this process takes of a part's weight as it is stored. Divided along one dimension at most."""
        if self.inputs is not None:
            return Shard(0 if self.is_transposed else 1, (self.inputs,))
        if self.outputs is not None:
            return Shard(1 if self.is_transposed else 0, self.outputs[name])
        return None

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


class Linear:
    """y = x W^T + b for x [T, in] with W [out, in]."""

    def __init__(self, kernel: LinearKernel) -> None:
        self._kernel = kernel

    @property
    def packed(self) -> PackedLinear | None:
        """The weight in the layout of the CPU kernels, if they compute this layer."""
        return self._kernel.packed

    @property
    def input_quantization(self) -> RowQuantization | None:
        """See `TakesRows`."""
        return input_quantization(self._kernel)

    def __call__(self, x: Activations) -> torch.Tensor:
        return multiply(self._kernel, x)

    def partial(self, x: Activations) -> torch.Tensor:
        """Return what `sum_ranks` makes the layer's output of. Exchanges nothing between ranks."""
        return multiply(self._kernel, x)

    def sum_ranks(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer as an output head. The CPU kernels return their float32 sums; others return x's dtype."""
        return self._kernel.logits(x)


class Float32Linear(Linear):
    """A linear layer that computes in float32, whatever the dtype of x; so is the result."""

    def __call__(self, x: Activations) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return super().__call__(x.float())


class RowParallelLinear(Linear):
    """A linear layer whose inputs are divided among the ranks; the partial results are summed."""

    def __init__(self, kernel: LinearKernel, communicator: Communicator) -> None:
        super().__init__(kernel)
        self._communicator = communicator

    def __call__(self, x: Activations) -> torch.Tensor:
        return self.sum_ranks(self.partial(x))

    def sum_ranks(self, x: torch.Tensor) -> torch.Tensor:
        return self._communicator.all_reduce(x)


class VocabParallelHead(Linear):
    """An output head whose tokens are divided among the ranks. All ranks get all logits.

    Args:
        vocab_size: number of tokens of all ranks. The last rank may have fewer than the others.
    """

    def __init__(self, kernel: LinearKernel, communicator: Communicator, vocab_size: int) -> None:
        super().__init__(kernel)
        self._communicator = communicator
        self._vocab_size = vocab_size
        self._width = -(-vocab_size // communicator.size)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        own = self._kernel.logits(x)
        if own.shape[1] < self._width:
            own = F.pad(own, (0, self._width - own.shape[1]))
        return self._communicator.all_gather(own)[:, : self._vocab_size]


class GatedLinear:
    """activation(gate) * up for x [T, in], where x W^T + b = [gate, up] with W [2 * inner, in]; returns [T, inner].
    Without a gate W is [inner, in], and the result activation(x W^T + b)."""

    def __init__(self, kernel: GatedLinearKernel) -> None:
        self._kernel = kernel

    @property
    def packed(self) -> PackedLinear | None:
        """The weight in the layout of the CPU kernels, if they compute this layer."""
        return self._kernel.packed

    @property
    def input_quantization(self) -> RowQuantization | None:
        """See `TakesRows`."""
        return self._kernel.input_quantization

    def __call__(self, x: Activations) -> Activations:
        return self._kernel(x)
