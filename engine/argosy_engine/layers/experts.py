"""Experts: the MLPs of a mixture of experts. How a router's logits become their weighted sum, and how the tokens of
several engine cores reach the experts that the cores divide among them.

Their weights are stacked for kernels that compute all experts in one launch; elsewhere each expert is a pair of linear
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from argosy_engine.distributed.parallel_state import Communicator
from argosy_engine.layers.linear import GatedLinear, Linear
from argosy_engine.model_configs.experts_config import (
    EXPERT_LAYERS,
    ExpertActivation,
    ExpertLayer,
    ExpertNames,
    RoutingSpec,
)
from argosy_engine.model_configs.sharding import Shard

_PADDING_SLOT = -1


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """What a model asks for."""

    prefix: str
    """Of the checkpoint's names: of the MLP."""
    routing: RoutingSpec
    hidden: int
    """Elements of what an expert gets and gives."""
    inner: int
    """Intermediate size of one expert."""
    activation: ExpertActivation = "silu"
    names: ExpertNames = ExpertNames()  # noqa: RUF009 (immutable)
    held: range | None = None
    """Experts that this process computes; None: all."""
    features: range | None = None
    """Intermediate features of each that this process computes; None: all."""

    @property
    def num_experts(self) -> int:
        return self.routing.num_experts

    @property
    def layers(self) -> tuple[ExpertLayer, ...]:
        """The projections of an expert, `down` the last."""
        return EXPERT_LAYERS[1:] if self.activation == "relu2" else EXPERT_LAYERS

    @property
    def held_experts(self) -> range:
        return range(self.num_experts) if self.held is None else self.held

    @property
    def num_features(self) -> int:
        """Number of intermediate features that this process computes."""
        return self.inner if self.features is None else len(self.features)

    @property
    def has_down_bias(self) -> bool:
        """Whether this process adds the biases of down projections, which the sum over ranks contains once."""
        return self.names.biases is not None and (self.features is None or self.features.start == 0)

    def weight_shape(self, name: ExpertLayer) -> tuple[int, int]:
        """Return the shape of a projection's weight, [out, in]."""
        return (self.hidden, self.inner) if name == "down" else (self.inner, self.hidden)

    def weight_shard(self, name: ExpertLayer) -> Shard | None:
        """Return what this process takes of a projection's weight."""
        return None if self.features is None else Shard(1 if name == "down" else 0, (self.features,))

    def output_shard(self, name: ExpertLayer) -> Shard | None:
        """Return what it takes of a tensor with one element per output feature of a projection."""
        return None if name == "down" else self.weight_shard(name)

    def projection(self, index: int, name: ExpertLayer) -> str:
        """Return the checkpoint's name of an expert's projection `gate`, `up` or `down`, without `.weight`."""
        return f"{self.prefix}{self.names.experts}{index}.{self.names.of(name)}"

    def stacked(self, name: str) -> str:
        """Return the checkpoint's name of a tensor of all experts."""
        return f"{self.prefix}{self.names.experts}{name}"


class Experts(Protocol):
    """Runs tokens through their experts."""

    def __call__(
        self, x: torch.Tensor, router_logits: torch.Tensor, slot_mapping: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, [T, hidden], as far as this process computes them.

        Args:
            x: [T, hidden].
            router_logits: [T, num_experts].
            slot_mapping: int64 [T]; tokens with -1 are padding, whose results do not matter.
        """
        ...


def choose_experts(
    routing: RoutingSpec,
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights, float32 [T, k], and the indices, int64 [T, k], of each token's experts.

    Args:
        logits: the router's, [T, num_experts].
        correction: float32 [num_experts].
        scales: float32 [num_experts].
    """
    logits = logits.float()
    scores = torch.sigmoid(logits) if routing.scores == "sigmoid" else torch.softmax(logits, dim=-1)
    if correction is not None:
        wanted = scores + correction
    else:  # large logits have one sigmoid
        wanted = scores if routing.has_groups else logits
    if routing.has_groups:
        grouped = wanted.view(len(wanted), routing.num_groups, -1)
        best = grouped.topk(2 if routing.group_score == "best_two" else 1, dim=-1).values.sum(dim=-1)
        chosen = best.topk(routing.groups_per_token, dim=-1).indices
        is_ruled_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
        wanted = grouped.masked_fill(is_ruled_out.unsqueeze(-1), float("-inf")).flatten(1)
    experts = wanted.topk(routing.experts_per_token, dim=-1).indices
    weights = scores.gather(1, experts)
    if routing.normalises:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + routing.epsilon)
    if scales is not None:
        weights = weights * scales[experts]
    return weights if routing.scaling == 1.0 else weights * routing.scaling, experts


class SeparateExperts:
    """One pair of linear layers per expert: each active expert runs once, on its tokens.

    It reads on the host how many tokens each expert got, so on a GPU it waits for the device.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        experts: Mapping[int, tuple[GatedLinear, Linear]],
        correction: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> None:
        self._spec = spec
        self._experts = experts
        self._correction, self._scales = correction, scales

    def __call__(
        self, x: torch.Tensor, router_logits: torch.Tensor, slot_mapping: torch.Tensor
    ) -> torch.Tensor:
        routing = self._spec.routing
        weights, experts = choose_experts(routing, router_logits, self._correction, self._scales)
        # Sorting by expert makes each expert's tokens contiguous, so each active expert runs once.
        order = experts.flatten().argsort(stable=True)
        rows = order // routing.experts_per_token
        weights = weights.flatten()[order].to(x.dtype).unsqueeze(1)
        out = torch.zeros_like(x)
        start = 0
        counts = torch.bincount(experts.flatten(), minlength=routing.num_experts).tolist()
        for index, count in enumerate(counts):
            if count and index in self._experts:
                gate_up, down = self._experts[index]
                run = slice(start, start + count)
                if routing.scales_inputs:
                    mixed = down(gate_up(x[rows[run]] * weights[run]))
                else:
                    mixed = down(gate_up(x[rows[run]])) * weights[run]
                out.index_add_(0, rows[run], mixed)
            start += count
        return out


class StackedExperts(NamedTuple):
    """The weights of the experts, or of the part that this process computes."""

    gate_up: torch.Tensor
    """[num_experts, 2 * inner, hidden], the gate's rows first; [num_experts, inner, hidden] if there is no gate. In
    MXFP4 uint8, with two columns in a byte."""
    down: torch.Tensor
    """[num_experts, hidden, inner]"""
    gate_up_scale: torch.Tensor | None = None
    """float32, a factor for each row of FP8 weights, [num_experts, rows], or for each 128 inputs of a row,
    [num_experts, blocks, rows]; of MXFP4 uint8 [num_experts, rows, hidden / 32]. None: the weights have the dtype of
    the activations."""
    down_scale: torch.Tensor | None = None
    """float32 [num_experts, hidden] or [num_experts, blocks, hidden]; uint8 [num_experts, hidden, inner / 32]"""
    gate_up_bias: torch.Tensor | None = None
    """[num_experts, 2 * inner], in the activations' dtype"""
    down_bias: torch.Tensor | None = None
    """[num_experts, hidden]"""

    @classmethod
    def empty(
        cls, spec: ExpertsSpec, dtype: torch.dtype, device: torch.device, block: int | None = None
    ) -> StackedExperts:
        """Allocate the weights of the experts that this process holds, and scales if they are in FP8 or (uint8) MXFP4.

        Args:
            block: inputs of a row that share a scale; None: all.
        """
        count, hidden, inner = len(spec.held_experts), spec.hidden, spec.num_features
        rows = (len(spec.layers) - 1) * inner
        if dtype is torch.uint8:
            sizes = ((rows, hidden // 2), (hidden, inner // 2), (rows, hidden // 32), (hidden, inner // 32))
            return cls(*(torch.empty(count, *size, dtype=dtype, device=device) for size in sizes))
        gate_up = torch.empty(count, rows, hidden, dtype=dtype, device=device)
        down = torch.empty(count, hidden, inner, dtype=dtype, device=device)
        if dtype is not torch.float8_e4m3fn:
            return cls(gate_up, down)
        scales = (
            torch.empty(
                (count, size) if block is None else (count, -(-inputs // block), size),
                dtype=torch.float32,
                device=device,
            )
            for size, inputs in ((rows, hidden), (hidden, inner))
        )
        return cls(gate_up, down, *scales)

    def places(self, place: int) -> Iterator[tuple[ExpertLayer, torch.Tensor, torch.Tensor | None]]:
        """Yield where an expert's projections go: the weight and, in FP8, the scales of its rows or of their blocks.

        Args:
            place: index among the experts that this process computes.
        """
        inner, has_gate = self.down.shape[2], self.gate_up.shape[1] > self.down.shape[2]
        parts: tuple[ExpertLayer, ...] = ("gate", "up") if has_gate else ("up",)
        for index, name in enumerate(parts):
            rows = slice(index * inner, (index + 1) * inner)
            scale = None if self.gate_up_scale is None else self.gate_up_scale[place, ..., rows]
            yield name, self.gate_up[place, rows], scale
        yield "down", self.down[place], None if self.down_scale is None else self.down_scale[place]


class TritonExperts:
    """All experts in five launches, without waiting for the device."""

    def __init__(
        self,
        spec: ExpertsSpec,
        weights: StackedExperts,
        correction: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> None:
        from argosy_engine.triton_kernels.fused_moe import fused_moe

        self._spec, self._weights = spec, weights
        self._correction, self._scales = correction, scales
        self._activation = "gelu" if spec.activation == "gelu_pytorch_tanh" else spec.activation
        self._fused_moe = fused_moe

    def __call__(
        self, x: torch.Tensor, router_logits: torch.Tensor, slot_mapping: torch.Tensor
    ) -> torch.Tensor:
        weights, routing = self._weights, self._spec.routing
        return self._fused_moe(
            x,
            router_logits,
            weights.gate_up,
            weights.down,
            routing.experts_per_token,
            normalises=routing.normalises,
            is_sigmoid=routing.scores == "sigmoid",
            correction=self._correction,
            expert_scales=self._scales,
            num_groups=routing.num_groups,
            groups_per_token=routing.groups_per_token,
            adds_two=routing.group_score == "best_two",
            scaling=routing.scaling,
            epsilon=routing.epsilon,
            scales_inputs=routing.scales_inputs,
            activation=self._activation,
            w1_scale=weights.gate_up_scale,
            w2_scale=weights.down_scale,
            w1_bias=weights.gate_up_bias,
            w2_bias=weights.down_bias,
            slot_mapping=slot_mapping,
            first_expert=self._spec.held_experts.start,
        )


class TokenExchange:
    """Gathers the tokens of all engine cores for a layer's experts, and returns each core's results to it. The sparse
    layers of a worker's model share it.

    Every rank gives the same number of rows, so tokens are padded to the largest count of any core, on which the cores
    have agreed before the step (`distributed.lockstep`). The sums of the ranks are exchanged by one reduce-scatter.
    Design: vLLM's naive all-to-all. An exchange that sends a token only to the ranks of its experts saves traffic
    between nodes.

    Args:
        communicator: of the ranks of all cores that hold the same part of the layers, and other experts.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._group = communicator
        self._num_rows: int | None = None
        self._slots: torch.Tensor | None = None
        self._layers: list[tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], torch.Tensor]] = []

    def add_layer(
        self,
        layer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Add a layer that exchanges tokens, in the order in which the model runs them.

        Args:
            layer: maps x [T, hidden_size] and slot_mapping [T] to x's shape.
        """
        nothing = torch.empty(0, hidden_size, dtype=dtype, device=device)
        self._layers.append((layer, nothing))

    def begin(self, num_rows: int | None = None) -> None:
        """Begin a forward pass.

        Args:
            num_rows: to which every rank pads its tokens. None: all have the same number of tokens.
        """
        self._num_rows, self._slots = num_rows, None

    def lend_experts(self, num_rows: int) -> None:
        """Run the layers of a forward pass in which this rank has no tokens of its own."""
        self.begin(num_rows)
        for layer, nothing in self._layers:
            layer(nothing, nothing.new_empty(0, dtype=torch.int64))

    def gather(self, x: torch.Tensor, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of all ranks, [size * rows, hidden_size], and their slot_mapping, -1 for padding.

        Args:
            x: [T, hidden_size].
            slot_mapping: int64 [T], the same padding in all layers of a forward pass.
        """
        if self._slots is None:
            self._slots = self._group.all_gather(self._padded(slot_mapping, _PADDING_SLOT), dim=0)
        return self._group.all_gather(self._padded(x, 0), dim=0), self._slots

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Add the ranks' results for all tokens [size * rows, hidden_size]; return this rank's [rows, hidden_size]."""
        return self._group.reduce_scatter(x, dim=0)

    def _padded(self, x: torch.Tensor, value: int) -> torch.Tensor:
        padding = 0 if self._num_rows is None else self._num_rows - len(x)
        if not padding:
            return x
        return torch.cat([x, x.new_full((padding, *x.shape[1:]), value)])
