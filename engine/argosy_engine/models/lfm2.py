"""LFM2: short convolutions in most layers, Qwen3's attention in the others, MLPs or mixtures of experts in all.

A short convolution keeps its last inputs per request instead of keys and values.
"""

from __future__ import annotations

import torch

from argosy_engine.attention.backend import Attention, AttentionMetadata, StateLayer
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.mlp import decoder_mlp
from argosy_engine.model_configs.hybrid_config import Lfm2Config
from argosy_engine.models.decoder import Decoder, MixerLayer
from argosy_engine.models.llama import LlamaAttention
from argosy_engine.quantized_rows import Activations


class ConvMixer:
    """A short convolution with its projections."""

    def __init__(self, config: Lfm2Config, factory: LayerFactory, prefix: str) -> None:
        hidden, bias, name = config.hidden_size, config.conv_bias, prefix + "in_proj"
        own = factory.sharding.part(hidden)
        parts = [range(own.start + start, own.stop + start) for start in (0, hidden, 2 * hidden)]
        self.projection = factory.selected_linear({name: 3 * hidden}, {name: parts}, hidden, bias=bias)
        self.input_quantization = self.projection.input_quantization
        self.conv = factory.short_conv(prefix + "conv", config.short_conv, has_bias=bias)
        self.output = factory.row_linear(prefix + "out_proj", hidden, hidden, bias=bias)

    def __call__(self, x: Activations, meta: AttentionMetadata) -> torch.Tensor:
        """Apply the layer to x, [T, hidden_size]; the output has the same shape."""
        return self.output(self.conv(self.projection(x), meta))


class Lfm2(Decoder[MixerLayer[LlamaAttention | ConvMixer]]):
    """See `Decoder`."""

    def __init__(self, config: Lfm2Config, factory: LayerFactory) -> None:
        self.config = config
        super().__init__(config, factory, config.rms_norm_eps, final_norm="model.embedding_norm")

    def make_layers(self, factory: LayerFactory) -> list[MixerLayer[LlamaAttention | ConvMixer]]:
        config = self.config
        rotary = factory.rotary(config.rope, config.head_dim)
        attention = dict(zip(config.layers_with_attention, config.attention_layers, strict=True))
        layers = []
        for index in factory.own_indices(config.num_hidden_layers):
            kind = config.layer_types[index]
            prefix = f"model.layers.{index}."
            mixer: LlamaAttention | ConvMixer
            if kind == "full_attention":
                mixer = LlamaAttention(
                    config,
                    factory,
                    prefix + "self_attn.",
                    index,
                    attention[index],
                    rotary,
                    output="out_proj",
                    norms=("q_layernorm", "k_layernorm"),
                )
            else:
                mixer = ConvMixer(config, factory, prefix + "conv.")
            mlp = decoder_mlp(
                factory,
                prefix,
                index,
                config.hidden_size,
                config.intermediate_size,
                config.experts,
                bias=False,
                name="feed_forward.",
                names=("w1", "w3", "w2"),
            )
            norms = ("operator_norm", "ffn_norm")
            layers.append(MixerLayer(config, factory, prefix, config.rms_norm_eps, mixer, mlp, norms=norms))
        return layers

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer.mixer.attention for layer in self.layers if isinstance(layer.mixer, LlamaAttention)]

    @property
    def state_layers(self) -> list[StateLayer]:
        """The last inputs of each convolution."""
        return [layer.mixer.conv.state for layer in self.layers if isinstance(layer.mixer, ConvMixer)]
