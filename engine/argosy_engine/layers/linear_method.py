"""LinearMethod: how a model's linear layers are loaded and computed.

A method decides which tensors of the checkpoint make up a layer, in which dtype they are read, how they are laid out,
and what multiplies by them. Models only describe their projections (`linear.LinearSpec`). Design: vLLM's
`LinearMethodBase`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from argosy_engine.checkpoint.weights import Weights
from argosy_engine.errors import ConfigError
from argosy_engine.layers.experts import ExpertsSpec, StackedExperts
from argosy_engine.layers.layer_kernels import GatedActivation
from argosy_engine.layers.linear import LinearSpec, ordered
from argosy_engine.layers.linear_kernels import (
    GatedLinearKernel,
    LinearKernel,
    gated_linear_kernel,
    linear_kernel,
)
from argosy_engine.model_configs.experts_config import ExpertLayer
from argosy_engine.model_configs.sharding import Shard


class LinearMethod(Protocol):
    """One way to store and multiply the weights of linear layers."""

    def load(self, weights: Weights, spec: LinearSpec) -> LinearKernel:
        """Take the layer's tensors, each exactly once."""
        ...

    def load_gated(
        self, weights: Weights, spec: LinearSpec, activation: GatedActivation
    ) -> GatedLinearKernel:
        """The same for two parts of equal size, the gate's first, followed by the activation."""
        ...

    def load_experts(self, weights: Weights, spec: ExpertsSpec) -> StackedExperts:
        """Take the tensors of the experts that this process holds, for kernels that compute them together."""
        ...

    def take_weight(self, weights: Weights, spec: LinearSpec) -> torch.Tensor:
        """Take the tensors of a layer without a bias and return its weight, [out, in] in the engine's dtype, for what
        multiplies by it in its own way."""
        ...

    def tie(self, embedding: torch.Tensor) -> LinearKernel:
        """Use an embedding [vocab_size, in] that was taken before as the weight of an output head."""
        ...


class UnquantizedLinearMethod:
    """Weights in the engine's dtype, whatever the checkpoint's.

    Args:
        is_traceable: see `linear_kernel`.
    """

    def __init__(self, *, is_traceable: bool = False) -> None:
        self._is_traceable = is_traceable

    def load(self, weights: Weights, spec: LinearSpec) -> LinearKernel:
        weight, bias = take_fused(weights, spec), take_bias(weights, spec)
        return linear_kernel(weight, bias, is_traceable=self._is_traceable)

    def load_gated(
        self, weights: Weights, spec: LinearSpec, activation: GatedActivation
    ) -> GatedLinearKernel:
        weight, bias = take_fused(weights, spec), take_bias(weights, spec)
        return gated_linear_kernel(weight, bias, activation, is_traceable=self._is_traceable)

    def load_experts(self, weights: Weights, spec: ExpertsSpec) -> StackedExperts:
        if spec.names.stacked is not None:
            return take_stacked(weights, spec)
        stacked = StackedExperts.empty(spec, weights.dtype, weights.device)
        # Each tensor goes to its place as it is read, so that no second copy of the experts is held.
        for place, index in enumerate(spec.held_experts):
            for name, part, _ in stacked.places(place):
                part.copy_(take_expert(weights, spec, index, name))
        return stacked

    def take_weight(self, weights: Weights, spec: LinearSpec) -> torch.Tensor:
        return take_fused(weights, spec)

    def tie(self, embedding: torch.Tensor) -> LinearKernel:
        return linear_kernel(embedding, is_traceable=self._is_traceable)


def unsupported_experts(spec: ExpertsSpec, stored: str) -> ConfigError:
    """Return the error for experts that a method cannot take as they are stored."""
    return ConfigError(
        f"the experts of {spec.prefix} are {stored}, which is not supported; take a checkpoint with unquantised experts"
    )


def take_expert(
    weights: Weights,
    spec: ExpertsSpec,
    index: int,
    name: ExpertLayer,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Take this process's part of a projection's weight.

    Args:
        dtype: see `Weights.take`.
    """
    shape, shard = spec.weight_shape(name), spec.weight_shard(name)
    return weights.take(spec.projection(index, name) + ".weight", *shape, dtype=dtype, shard=shard)


TakeRows = Callable[[Weights, str, tuple[int, int, int], Shard | None], torch.Tensor]
"""Takes this process's part of a tensor of all experts, [experts, rows, columns], given its name and whole shape."""


def take_stacked(weights: Weights, spec: ExpertsSpec, take_rows: TakeRows | None = None) -> StackedExperts:
    """Take this process's part of experts that the checkpoint stores in two tensors, in the engine's dtype.

    Args:
        take_rows: None: weights are stored as `spec.names` says, unquantised.
    """
    names = spec.names
    assert names.stacked is not None
    count, hidden, inner = spec.num_experts, spec.hidden, spec.inner
    held = None if spec.held is None or len(spec.held) == count else Shard(0, (spec.held,))
    both: tuple[range, ...] | None = None
    """The part of [gate, up] that goes with `features`."""
    if (own := spec.features) is not None:
        if names.is_interleaved:
            both = (range(2 * own.start, 2 * own.stop),)
        else:
            both = (own, range(inner + own.start, inner + own.stop))

    def take(name: str, rows: int, columns: int, shard: Shard | None) -> torch.Tensor:
        """Return [experts, rows, columns] of this process."""
        if take_rows is not None:
            return take_rows(weights, name, (count, rows, columns), shard)
        if not names.is_transposed:
            return weights.take(name, count, rows, columns, shard=shard)
        if shard is not None and shard.dim:
            shard = Shard(3 - shard.dim, shard.ranges)
        return weights.take(name, count, columns, rows, shard=shard).transpose(1, 2)

    def joined(gate_up: torch.Tensor) -> torch.Tensor:
        """Put the gates before the ups, along dimension 1."""
        if gate_up.is_meta:  # where indexing would import torch's compiler
            return gate_up
        if not names.is_interleaved:
            return gate_up.contiguous()
        whole = gate_up.new_empty(gate_up.shape)
        half = gate_up.shape[1] // 2
        whole[:, :half], whole[:, half:] = gate_up[:, 0::2], gate_up[:, 1::2]
        return whole

    gate_up_name, down_name = map(spec.stacked, names.stacked)
    gate_up = take(gate_up_name, 2 * inner, hidden, Shard(1, both) if both else held)
    down = take(down_name, hidden, inner, held if own is None else Shard(2, (own,)))
    gate_up_bias = down_bias = None
    if names.biases is not None:
        bias_names = [spec.stacked(name) for name in names.biases]
        gate_up_bias = joined(
            weights.take(bias_names[0], count, 2 * inner, shard=Shard(1, both) if both else held)
        )
        down_bias = weights.take(bias_names[1], count, hidden, shard=held)
        if not spec.has_down_bias:
            down_bias = None
    return StackedExperts(
        joined(gate_up),
        down if down.is_meta else down.contiguous(),
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )


def take_fused(weights: Weights, spec: LinearSpec, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Take this process's part of the weight, [out, in], of all projections.

    Args:
        dtype: see `Weights.take`.
    """

    def take_weight(name: str) -> torch.Tensor:
        out_features, shard = spec.parts[name], spec.weight_shard(name)
        if spec.is_transposed:
            return weights.take(
                name + ".weight", spec.in_features, out_features, dtype=dtype, shard=shard
            ).t()
        return weights.take(name + ".weight", out_features, spec.in_features, dtype=dtype, shard=shard)

    return ordered(spec, fuse(spec, take_weight))


def take_bias(weights: Weights, spec: LinearSpec) -> torch.Tensor | None:
    """Take this process's part of the bias, [out], of all projections, if they have one."""
    if not spec.has_bias:
        return None
    bias = fuse(
        spec, lambda name: weights.take(name + ".bias", spec.parts[name], shard=spec.output_shard(name))
    )
    return ordered(spec, bias)


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
