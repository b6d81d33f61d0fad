"""Decoders with Mamba-2 layers (arXiv 2405.21060) and attention: Granite 4, Bamba and Falcon-H1, Nemotron-H (arXiv
2504.03624) and Nemotron 3 (2512.20848).

A Mamba layer keeps a state per request instead of keys and values. Attention and MLPs are Llama's, or Granite's
mixtures of experts with an MLP that all tokens take besides. In Falcon-H1 each layer has both side by side, with
factors on what they get and give. In Nemotron-H a layer is one block after an RMSNorm: a Mamba-2 layer, attention
without positions, an MLP with squared ReLUs, or a mixture of such MLPs.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F

from argosy_engine.attention.backend import Attention, AttentionMetadata, StateLayer
from argosy_engine.layers.layer_compiler import CompilablePart
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.mlp import GatedMLP, SquaredReluMLP, decoder_mlp
from argosy_engine.model_configs.hybrid_config import HybridMultipliers, MambaHybridConfig
from argosy_engine.models.decoder import MLP, Decoder, MixerLayer
from argosy_engine.models.llama import LlamaAttention
from argosy_engine.quantized_rows import Activations, RowQuantization

PartT = TypeVar("PartT", LlamaAttention, "MambaMixer")


class MambaMixer:
    """A Mamba-2 layer with its projections."""

    def __init__(self, config: MambaHybridConfig, factory: LayerFactory, prefix: str) -> None:
        params, hidden = config.mamba, config.hidden_size
        values, states = factory.sharding.mamba(params)
        size = params.num_groups * params.state_size
        starts = (0, params.num_values, 2 * params.num_values, 2 * params.num_values + size)
        parts = [
            range(each.start + start, each.stop + start)
            for each, start in zip((values, values, states, states), starts, strict=True)
        ]
        heads, first = factory.sharding.part(params.num_heads), params.num_inputs - params.num_heads
        parts.append(range(heads.start + first, heads.stop + first))
        name = prefix + "in_proj"
        self.projection = factory.selected_linear(
            {name: params.num_inputs}, {name: parts}, hidden, bias=config.mamba_bias
        )
        self.input_quantization = self.projection.input_quantization
        self.factors: torch.Tensor | None = None
        if set(config.multipliers.mamba_projected) != {1.0}:
            factors = [
                torch.full((len(part),), factor, dtype=factory.dtype)
                for part, factor in zip(parts, config.multipliers.mamba_projected, strict=True)
            ]
            self.factors = torch.cat(factors).to(factory.device)
        self.mamba = factory.mamba(prefix, params, config.rms_norm_eps, has_conv_bias=config.mamba_conv_bias)
        self.output = factory.row_linear(
            prefix + "out_proj", params.num_values, hidden, bias=config.mamba_output_bias
        )

    def __call__(self, x: Activations, meta: AttentionMetadata) -> torch.Tensor:
        """Apply the layer to x, [T, hidden_size]; the output has the same shape."""
        projected = self.projection(x)
        if self.factors is not None:
            projected *= self.factors
        return self.output(self.mamba(projected, meta))


class ParallelMixer:
    """The sum of a Mamba-2 layer and attention, which get the same input (Falcon-H1)."""

    input_quantization: RowQuantization | None = None
    """Two products read the input, each times its own factor."""

    def __init__(self, multipliers: HybridMultipliers, mamba: MambaMixer, attention: LlamaAttention) -> None:
        self.mamba, self.attention = mamba, attention
        self.multipliers = multipliers

    def __call__(self, x: Activations, meta: AttentionMetadata) -> torch.Tensor:
        """Apply both to x, [T, hidden_size]; the output has the same shape."""
        assert isinstance(x, torch.Tensor)
        by = self.multipliers
        mixed = _scaled(self.mamba(_scaled(x, by.mamba_input), meta), by.mamba_output)
        return mixed + _scaled(self.attention(_scaled(x, by.attention_input), meta), by.attention_output)


class ScaledMLP:
    """A gated MLP with factors on its gate and its output (Falcon-H1)."""

    def __init__(self, config: MambaHybridConfig, factory: LayerFactory, prefix: str) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        names = prefix + "gate_proj", prefix + "up_proj"
        self.gate_up = factory.column_linear(dict.fromkeys(names, inner), hidden, bias=bias)
        self.input_quantization = self.gate_up.input_quantization
        self.down = factory.row_linear(prefix + "down_proj", inner, hidden, bias=bias)
        self.multipliers = config.multipliers

    def __call__(self, x: Activations, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Map x [T, hidden_size] to its shape."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        activated = F.silu(_scaled(gate, self.multipliers.gate)).mul_(up)
        return _scaled(self.down(activated), self.multipliers.mlp_output)


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1.0 else x * factor


HybridMixer = LlamaAttention | MambaMixer | ParallelMixer


class MambaHybrid(Decoder[MixerLayer[HybridMixer]]):
    """See `Decoder`."""

    def __init__(self, config: MambaHybridConfig, factory: LayerFactory) -> None:
        self.config = config
        self._is_granite = config.architecture == "GraniteMoeHybridForCausalLM"
        super().__init__(
            config,
            factory,
            config.rms_norm_eps,
            final_norm="model.norm" if self._is_granite else "model.final_layernorm",
            embedding_multiplier=config.embedding_multiplier,
            logits_scaling=config.logits_scaling,
        )

    def make_layers(self, factory: LayerFactory) -> list[MixerLayer[HybridMixer]]:
        config = self.config
        rotary = factory.rotary(config.rope, config.head_dim)
        attention = dict(zip(config.layers_with_attention, config.attention_layers, strict=True))
        layers = []
        for index in factory.own_indices(config.num_hidden_layers):
            kind = config.layer_types[index]
            prefix = f"model.layers.{index}."
            mixers: list[LlamaAttention | MambaMixer] = []
            if kind != "full_attention":
                mixers.append(MambaMixer(config, factory, prefix + "mamba."))
            if kind != "linear_attention":
                used = rotary if config.rotates(index) else None
                mixers.append(
                    LlamaAttention(config, factory, prefix + "self_attn.", index, attention[index], used)
                )
            mixer: HybridMixer = mixers[0]
            if kind == "hybrid":
                mamba, attended = mixers
                assert isinstance(mamba, MambaMixer)
                assert isinstance(attended, LlamaAttention)
                mixer = ParallelMixer(config.multipliers, mamba, attended)
            layers.append(
                MixerLayer(
                    config,
                    factory,
                    prefix,
                    config.rms_norm_eps,
                    mixer,
                    self._mlp(factory, prefix, index),
                    norms=(
                        "input_layernorm",
                        "post_attention_layernorm" if self._is_granite else "pre_ff_layernorm",
                    ),
                    multiplier=config.residual_multiplier,
                )
            )
        return layers

    def _mlp(self, factory: LayerFactory, prefix: str, index: int) -> MLP:
        config, hidden, inner = self.config, self.config.hidden_size, self.config.intermediate_size
        if config.multipliers.gate != 1.0 or config.multipliers.mlp_output != 1.0:
            return ScaledMLP(config, factory, prefix + "feed_forward.")
        if not self._is_granite:
            return GatedMLP(factory, prefix + "feed_forward.", hidden, inner, bias=config.mlp_bias)
        names = ("input_linear", "output_linear")
        shared = GatedMLP(factory, prefix + "shared_mlp.", hidden, inner, names=names)
        if config.experts is None:
            return shared
        return decoder_mlp(factory, prefix, index, hidden, inner, config.experts, bias=False, shared=shared)

    @property
    def attention_layers(self) -> list[Attention]:
        mixers = (_part(layer.mixer, LlamaAttention) for layer in self.layers)
        return [each.attention for each in mixers if each is not None]

    @property
    def state_layers(self) -> list[StateLayer]:
        """The states of each Mamba layer."""
        mixers = (_part(layer.mixer, MambaMixer) for layer in self.layers)
        return [each.mamba.state for each in mixers if each is not None]


def _part(mixer: HybridMixer, kind: type[PartT]) -> PartT | None:
    """Return what is of this kind in a mixer."""
    parts = (mixer.mamba, mixer.attention) if isinstance(mixer, ParallelMixer) else (mixer,)
    return next((each for each in parts if isinstance(each, kind)), None)


class NemotronHLayer:
    """One block after an RMSNorm.

    Args:
        prefix: of the layer's tensors.
    """

    def __init__(
        self,
        config: MambaHybridConfig,
        factory: LayerFactory,
        prefix: str,
        block: LlamaAttention | MambaMixer | MLP,
    ) -> None:
        self.block = block
        self.norm = factory.input_norm(prefix + "norm", config.hidden_size, config.rms_norm_eps, feeds=block)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, meta: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `decoder.Layer`."""
        if residual is None:
            residual, normed = x, self.norm(x)
        else:
            normed = self.norm.after_adding(x, residual)
        if isinstance(self.block, (LlamaAttention, MambaMixer)):
            return self.block(normed, meta), residual
        return self.block(normed, meta.slot_mapping), residual

    def parts_to_compile(self) -> list[CompilablePart]:
        return []


class NemotronH(Decoder[NemotronHLayer]):
    """See `Decoder`."""

    checkpoint_prefix: ClassVar[str] = "backbone."

    def __init__(self, config: MambaHybridConfig, factory: LayerFactory) -> None:
        self.config = config
        super().__init__(
            config,
            factory,
            config.rms_norm_eps,
            embedding="backbone.embeddings",
            final_norm="backbone.norm_f",
        )

    def make_layers(self, factory: LayerFactory) -> list[NemotronHLayer]:
        config = self.config
        attention = dict(zip(config.layers_with_attention, config.attention_layers, strict=True))
        layers = []
        for index in factory.own_indices(config.num_hidden_layers):
            kind = config.layer_types[index]
            prefix = f"backbone.layers.{index}."
            block: LlamaAttention | MambaMixer | MLP
            if kind == "linear_attention":
                block = MambaMixer(config, factory, prefix + "mixer.")
            elif kind == "full_attention":
                block = LlamaAttention(config, factory, prefix + "mixer.", index, attention[index], None)
            else:
                block = self._mlp(factory, prefix, index)
            layers.append(NemotronHLayer(config, factory, prefix, block))
        return layers

    def _mlp(self, factory: LayerFactory, prefix: str, index: int) -> MLP:
        config, hidden, inner = self.config, self.config.hidden_size, self.config.intermediate_size
        if config.layer_types[index] == "mlp":
            return SquaredReluMLP(factory, prefix + "mixer.", hidden, inner, bias=config.mlp_bias)
        return decoder_mlp(factory, prefix, index, hidden, inner, config.experts, bias=config.mlp_bias)

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer.block.attention for layer in self.layers if isinstance(layer.block, LlamaAttention)]

    @property
    def state_layers(self) -> list[StateLayer]:
        """The states of each Mamba layer."""
        return [layer.block.mamba.state for layer in self.layers if isinstance(layer.block, MambaMixer)]
