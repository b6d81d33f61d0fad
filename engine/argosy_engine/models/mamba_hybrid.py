"""Decoders with Mamba-2 layers (arXiv 2405.21060) and attention: Granite 4 and Bamba.

A Mamba layer keeps a state per request instead of keys and values. Attention and MLPs are Llama's, or Granite's
mixtures of experts with an MLP that all tokens take besides.
"""

from __future__ import annotations

import torch

from argosy_engine.attention.layer import Attention, StateLayer
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.mlp import GatedMLP, decoder_mlp
from argosy_engine.model_configs.mamba_config import MambaHybridConfig
from argosy_engine.models.decoder import MLP, Decoder, MixerLayer
from argosy_engine.models.llama import LlamaAttention
from argosy_engine.quantized_rows import Activations, RowQuantization


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
        self.mamba = factory.mamba(prefix, params, config.rms_norm_eps, has_conv_bias=config.mamba_conv_bias)
        self.output = factory.row_linear(
            prefix + "out_proj", params.num_values, hidden, bias=config.mamba_bias
        )

    @property
    def input_quantization(self) -> RowQuantization | None:
        return self.projection.input_quantization

    def __call__(self, x: Activations, meta: AttentionMetadata) -> torch.Tensor:
        """Apply the layer to x, [T, hidden_size]; the output has the same shape."""
        return self.output(self.mamba(self.projection(x), meta))


class MambaHybrid(Decoder[MixerLayer[LlamaAttention | MambaMixer]]):
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

    def make_layers(self, factory: LayerFactory) -> list[MixerLayer[LlamaAttention | MambaMixer]]:
        config = self.config
        rotary = factory.rotary(config.rope, config.head_dim)
        attention = iter(config.attention_layers)
        layers = []
        for index, kind in enumerate(config.layer_types):
            prefix = f"model.layers.{index}."
            mixer: LlamaAttention | MambaMixer
            if kind == "full_attention":
                used = rotary if config.rotates(index) else None
                mixer = LlamaAttention(config, factory, prefix + "self_attn.", next(attention), used)
            else:
                mixer = MambaMixer(config, factory, prefix + "mamba.")
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
        if not self._is_granite:
            return GatedMLP(factory, prefix + "feed_forward.", hidden, inner, bias=config.mlp_bias)
        names = ("input_linear", "output_linear")
        shared = GatedMLP(factory, prefix + "shared_mlp.", hidden, inner, names=names)
        if config.experts is None:
            return shared
        return decoder_mlp(factory, prefix, index, hidden, inner, config.experts, bias=False, shared=shared)

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer.mixer.attention for layer in self.layers if isinstance(layer.mixer, LlamaAttention)]

    @property
    def state_layers(self) -> list[StateLayer]:
        """The states of each Mamba layer."""
        return [layer.mixer.mamba.state for layer in self.layers if isinstance(layer.mixer, MambaMixer)]
