"""The MLPs of decoders: gated ones, those with squared ReLUs, and mixtures of experts, in which a router sends every
token to its k best experts, each an MLP (arXiv 1701.06538, 2101.03961)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from argosy_engine.layers.experts import ExpertsSpec
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.linear import Linear
from argosy_engine.model_configs.experts_config import ExpertsConfig
from argosy_engine.quantized_rows import Activations, RowQuantization


class GatedMLP:
    """down(activation(gate(x)) * up(x)) (arXiv 2002.05202).

    Args:
        bias: whether all three projections have one.
        activation: `silu` or `gelu_pytorch_tanh`.
        is_fused: whether the checkpoint has gate and up in one tensor.
        names: of this tensor or of both, and of down; None: the usual ones.
    """

    def __init__(
        self,
        factory: LayerFactory,
        prefix: str,
        hidden: int,
        inner: int,
        *,
        bias: bool = False,
        activation: str = "silu",
        is_fused: bool = False,
        names: Sequence[str] | None = None,
    ) -> None:
        usual = ("gate_up_proj", "down_proj") if is_fused else ("gate_proj", "up_proj", "down_proj")
        gate, *others, down = names or usual
        up = others[0] if others else None
        self.down = factory.row_linear(prefix + down, inner, hidden, bias=bias)
        self.gate_up = factory.gated_linear(
            prefix + gate,
            up and prefix + up,
            inner,
            hidden,
            bias=bias,
            feeds=self.down,
            activation=activation,
        )
        self.input_quantization = self.gate_up.input_quantization

    def __call__(self, x: Activations, slot_mapping: torch.Tensor) -> torch.Tensor:
        return self.down.sum_ranks(self.partial(x))

    def partial(self, x: Activations) -> torch.Tensor:
        """Return what `down.sum_ranks` makes the output of."""
        return self.down.partial(self.gate_up(x))


class SquaredReluMLP(GatedMLP):
    """down(relu(up(x)) ** 2), without a gate (arXiv 2109.08668).

    Args:
        bias: whether both projections have one.
    """

    def __init__(self, factory: LayerFactory, prefix: str, hidden: int, inner: int, *, bias: bool) -> None:
        self.down = factory.row_linear(prefix + "down_proj", inner, hidden, bias=bias)
        self.gate_up = factory.activated_linear(
            prefix + "up_proj", inner, hidden, bias=bias, feeds=self.down, activation="relu2"
        )
        self.input_quantization = self.gate_up.input_quantization


class LatentProjections(NamedTuple):
    """Two linear layers without biases between which the experts of a layer are, of which every rank has the whole."""

    inwards: Linear
    outwards: Linear


class SparseMLP:
    """A mixture of experts.

    Args:
        hidden: elements of x; None: as many as experts get.
        has_router_bias: whether the router's linear layer has a bias.
        has_float32_router: see `ExpertsConfig`.
        shared: an MLP that all tokens take besides.
        shared_gate: its output is multiplied by the sigmoid of this layer's, [T, 1]; None: by 1.
        latent: between which the experts are; None: they get x.
    """

    def __init__(
        self,
        factory: LayerFactory,
        spec: ExpertsSpec,
        *,
        hidden: int | None = None,
        has_router_bias: bool = False,
        has_float32_router: bool = False,
        shared: GatedMLP | None = None,
        shared_gate: Linear | None = None,
        latent: LatentProjections | None = None,
    ) -> None:
        hidden = hidden or spec.hidden
        self.input_quantization: RowQuantization | None = None  # a router's weights keep their precision
        self.router = factory.router(
            spec.prefix + spec.names.router,
            spec.num_experts,
            hidden,
            bias=has_router_bias,
            in_float32=has_float32_router,
        )
        self.experts = factory.experts(spec)
        self.shared, self.shared_gate, self.latent = shared, shared_gate, latent
        self.sum_ranks = factory.sum_ranks
        self.exchange = factory.exchange
        if self.exchange is not None:
            self.exchange.add_layer(self, hidden, factory.dtype, factory.device)

    def __call__(self, x: Activations, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Run the experts on x [T, hidden_size]; the output has the same shape. For slot_mapping see `Experts`."""
        assert isinstance(x, torch.Tensor)
        if self.exchange is None:
            mixed = self._mixed(x, slot_mapping)
        else:
            mixed = self.exchange.scatter(self._mixed(*self.exchange.gather(x, slot_mapping)))
        if self.shared is not None and len(x):  # none where the experts are lent
            shared = self.shared.partial(x)
            if self.shared_gate is not None:
                shared = shared * torch.sigmoid(self.shared_gate(x))
            mixed[: len(x)].add_(shared)
        return self.sum_ranks(mixed)[: len(x)]

    def _mixed(self, x: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Return what this rank's experts make of x. Ranks may be summed after `outwards`, which is linear."""
        logits = self.router(x)
        if self.latent is None:
            return self.experts(x, logits, slot_mapping)
        return self.latent.outwards(self.experts(self.latent.inwards(x), logits, slot_mapping))


def decoder_mlp(
    factory: LayerFactory,
    prefix: str,
    index: int,
    hidden: int,
    inner: int,
    experts: ExpertsConfig | None,
    *,
    bias: bool,
    is_fused: bool = False,
    name: str = "mlp.",
    names: Sequence[str] | None = None,
    shared: GatedMLP | None = None,
) -> GatedMLP | SparseMLP:
    """Make the MLP of a decoder's layer: a gated one, or a mixture of experts with what all tokens take besides.

    Args:
        prefix: of the layer's tensors.
        index: of the layer.
        inner: intermediate size of a gated MLP.
        experts: None: no layer has any.
        bias: whether the projections of gated MLPs have one.
        name: of a gated MLP, where no layer has experts.
        is_fused, names: see `GatedMLP`.
        shared: what all tokens take besides, if it is no part of the mixture's own tensors.
    """
    if experts is None or not experts.is_sparse[index]:
        name = name if experts is None else experts.mlp
        return GatedMLP(factory, prefix + name, hidden, inner, bias=bias, is_fused=is_fused, names=names)
    prefix += experts.mlp
    shared_gate, name = None, f"{prefix}{experts.shared}."
    if experts.shared_size:
        if experts.activation == "relu2":
            shared = SquaredReluMLP(factory, name, hidden, experts.shared_size, bias=bias)
        else:
            shared = GatedMLP(factory, name, hidden, experts.shared_size, bias=bias)
        if experts.has_shared_gate:
            shared_gate = factory.linear({f"{prefix}{experts.shared}_gate": 1}, hidden, keeps_precision=True)
    latent, width = None, experts.latent_size
    if width:
        latent = LatentProjections(
            factory.linear({prefix + "fc1_latent_proj": width}, hidden),
            factory.linear({prefix + "fc2_latent_proj": hidden}, width),
        )
    spec = ExpertsSpec(
        prefix=prefix,
        routing=experts.routing,
        hidden=width or hidden,
        inner=experts.inner,
        activation=experts.activation,
        names=experts.names,
    )
    return SparseMLP(
        factory,
        spec,
        hidden=hidden,
        has_router_bias=experts.has_router_bias,
        has_float32_router=experts.has_float32_router,
        shared=shared,
        shared_gate=shared_gate,
        latent=latent,
    )
