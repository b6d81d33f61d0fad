"""Experts: the gated MLPs of a mixture of experts. How a router's logits become their weighted sum.

Their weights are stacked for kernels that compute all experts in one launch; elsewhere each expert is a pair of linear
layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from argosy_engine.layers.linear import GatedLinear, Linear
from argosy_engine.model_configs.sharding import Shard

ExpertLayer = Literal["gate", "up", "down"]
EXPERT_LAYERS: tuple[ExpertLayer, ...] = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """What a model asks for. A token takes the `experts_per_token` experts of the highest router logits."""

    prefix: str
    """Of the checkpoint's names, see `projection`."""
    num_experts: int
    hidden: int
    inner: int
    """Intermediate size of one expert."""
    experts_per_token: int
    normalises: bool
    """Whether a token's weights, by softmax over all experts, are scaled to sum to 1."""
    held: range | None = None
    """Experts that this process computes; None: all."""
    features: range | None = None
    """Intermediate features of each that this process computes; None: all."""

    @property
    def held_experts(self) -> range:
        return range(self.num_experts) if self.held is None else self.held

    @property
    def num_features(self) -> int:
        """Number of intermediate features that this process computes."""
        return self.inner if self.features is None else len(self.features)

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
        return f"{self.prefix}{index}.{name}_proj"


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


class SeparateExperts:
    """One pair of linear layers per expert: each active expert runs once, on its tokens.

    It reads on the host how many tokens each expert got, so on a GPU it waits for the device.
    """

    def __init__(self, spec: ExpertsSpec, experts: Mapping[int, tuple[GatedLinear, Linear]]) -> None:
        self._spec = spec
        self._experts = experts

    def __call__(
        self, x: torch.Tensor, router_logits: torch.Tensor, slot_mapping: torch.Tensor
    ) -> torch.Tensor:
        k = self._spec.experts_per_token
        chosen = torch.softmax(router_logits.float(), dim=-1).topk(k, dim=-1)
        weights, experts = chosen.values, chosen.indices
        if self._spec.normalises:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        # Sorting by expert makes each expert's tokens contiguous, so each active expert runs once.
        order = experts.flatten().argsort(stable=True)
        rows = order // k
        weights = weights.flatten()[order].to(x.dtype).unsqueeze(1)
        out = torch.zeros_like(x)
        start = 0
        counts = torch.bincount(experts.flatten(), minlength=self._spec.num_experts).tolist()
        for index, count in enumerate(counts):
            if count and index in self._experts:
                gate_up, down = self._experts[index]
                run = slice(start, start + count)
                out.index_add_(0, rows[run], down(gate_up(x[rows[run]])) * weights[run])
            start += count
        return out


class StackedExperts(NamedTuple):
    """The weights of the experts, or of the part that this process computes."""

    gate_up: torch.Tensor
    """[num_experts, 2 * inner, hidden], the gate's rows first."""
    down: torch.Tensor
    """[num_experts, hidden, inner]"""
    gate_up_scale: torch.Tensor | None = None
    """float32 [num_experts, 2 * inner], factors of FP8 weights; None: the weights have the activations' dtype."""
    down_scale: torch.Tensor | None = None
    """float32 [num_experts, hidden]"""

    @classmethod
    def empty(cls, spec: ExpertsSpec, dtype: torch.dtype, device: torch.device) -> StackedExperts:
        """Allocate the weights of the experts that this process holds, and scales if they are in FP8."""
        count, hidden, inner = len(spec.held_experts), spec.hidden, spec.num_features
        gate_up = torch.empty(count, 2 * inner, hidden, dtype=dtype, device=device)
        down = torch.empty(count, hidden, inner, dtype=dtype, device=device)
        if dtype is not torch.float8_e4m3fn:
            return cls(gate_up, down)
        scales = (
            torch.empty(count, size, dtype=torch.float32, device=device) for size in (2 * inner, hidden)
        )
        return cls(gate_up, down, *scales)

    def places(self, place: int) -> Iterator[tuple[ExpertLayer, torch.Tensor, torch.Tensor | None]]:
        """Yield where an expert's projections go: the weight and, in FP8, the scales of its channels.

        Args:
            place: index among the experts that this process computes.
        """
        inner = self.down.shape[2]
        halves: tuple[tuple[ExpertLayer, slice], ...] = (
            ("gate", slice(0, inner)),
            ("up", slice(inner, 2 * inner)),
        )
        for name, rows in halves:
            scale = None if self.gate_up_scale is None else self.gate_up_scale[place, rows]
            yield name, self.gate_up[place, rows], scale
        yield "down", self.down[place], None if self.down_scale is None else self.down_scale[place]


class TritonExperts:
    """All experts in five launches, without waiting for the device."""

    def __init__(self, spec: ExpertsSpec, weights: StackedExperts) -> None:
        from argosy_engine.triton_kernels.fused_moe import fused_moe

        self._spec, self._weights = spec, weights
        self._fused_moe = fused_moe

    def __call__(
        self, x: torch.Tensor, router_logits: torch.Tensor, slot_mapping: torch.Tensor
    ) -> torch.Tensor:
        return self._fused_moe(
            x,
            router_logits,
            self._weights.gate_up,
            self._weights.down,
            self._spec.experts_per_token,
            normalises=self._spec.normalises,
            w1_scale=self._weights.gate_up_scale,
            w2_scale=self._weights.down_scale,
            slot_mapping=slot_mapping,
            first_expert=self._spec.held_experts.start,
        )
