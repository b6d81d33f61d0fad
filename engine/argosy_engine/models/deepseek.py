"""DeepSeek V2 and V3 (arXiv 2405.04434, 2412.19437), and decoders of their form: multi-head latent attention, dense
MLPs in the first layers and experts in the others."""

from __future__ import annotations

import torch

from argosy_engine.attention.backend import AttentionMetadata, LatentAttention, RotaryEmbedding
from argosy_engine.attention.params import LatentAttentionParams
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.linear import Linear
from argosy_engine.layers.mlp import decoder_mlp
from argosy_engine.layers.norms import InputNorm
from argosy_engine.model_configs.deepseek_config import DeepseekConfig
from argosy_engine.models.decoder import Decoder, MixerLayer
from argosy_engine.quantized_rows import Activations, RowQuantization

_LATENT_EPS = 1e-6
"""Of the norms of what queries, keys and values are compressed to, whatever the config's `rms_norm_eps`."""


class LatentSelfAttention:
    """Multi-head latent attention with its projections.

    `kv_a_proj_with_mqa` makes a token's latent and its rotated key, which every rank computes as a whole; queries are
    compressed and normed as well if there is a `q_lora_rank`. A rank computes its heads of the rest.
    """

    def __init__(
        self,
        config: DeepseekConfig,
        factory: LayerFactory,
        prefix: str,
        params: LatentAttentionParams,
        rotary: RotaryEmbedding,
    ) -> None:
        hidden, bias = config.hidden_size, config.attention_bias
        width = params.num_heads * params.qk_head_dim
        compressed = (config.q_lora_rank or 0) + params.kv_lora_rank
        head_order = _rotated_at(params.qk_nope_head_dim, config)
        compressing = {prefix + "kv_a_proj_with_mqa": params.cached_dim}
        self._widths = [config.q_lora_rank or 0, params.cached_dim]
        self.q_norm: InputNorm | None = None
        """Of compressed queries."""
        self.q: Linear
        """From those, or from the hidden states."""
        if config.q_lora_rank is None:
            self.q = factory.column_linear({prefix + "q_proj": width}, hidden, head_order=head_order)
        else:
            compressing = {prefix + "q_a_proj": config.q_lora_rank, **compressing}
            self.q = factory.column_linear(
                {prefix + "q_b_proj": width}, config.q_lora_rank, head_order=head_order
            )
            self.q_norm = factory.input_norm(
                prefix + "q_a_layernorm", config.q_lora_rank, _LATENT_EPS, feeds=self.q
            )
        self.compress = factory.linear(compressing, hidden, bias=bias, order=_rotated_at(compressed, config))
        self.attention = factory.latent_attention(params, rotary, _LATENT_EPS, prefix=prefix)
        self.output = factory.row_linear(
            prefix + "o_proj", params.num_heads * params.v_head_dim, hidden, bias=bias
        )

    @property
    def input_quantization(self) -> RowQuantization | None:
        """See `TakesRows`. Two products that get the same rows may want them differently."""
        return None if self.q_norm is None else self.compress.input_quantization

    def __call__(self, x: Activations, meta: AttentionMetadata) -> torch.Tensor:
        """Map x [T, hidden_size] to its shape."""
        compressed_q, compressed = self.compress(x).split(self._widths, dim=1)
        q = self.q(x if self.q_norm is None else self.q_norm(compressed_q))
        return self.output(self.attention(q, compressed, meta))


def _rotated_at(start: int, config: DeepseekConfig) -> tuple[int, ...] | None:
    """Return the order of features of which those from `start` on are rotated, in halves; None: as they are."""
    order = config.rope.head_order(config.qk_rope_head_dim)
    return None if order is None else (*range(start), *(start + index for index in order))


class Deepseek(Decoder[MixerLayer[LatentSelfAttention]]):
    """See `Decoder`."""

    def __init__(self, config: DeepseekConfig, factory: LayerFactory) -> None:
        self._config = config
        super().__init__(config, factory, config.rms_norm_eps)

    def make_layers(self, factory: LayerFactory) -> list[MixerLayer[LatentSelfAttention]]:
        config = self._config
        rotary = factory.rotary(config.rope, config.qk_rope_head_dim)
        layers = []
        for index, params in factory.own_layers(config.attention_layers, LatentAttentionParams):
            prefix = f"model.layers.{index}."
            mixer = LatentSelfAttention(config, factory, prefix + "self_attn.", params, rotary)
            mlp = decoder_mlp(
                factory,
                prefix,
                index,
                config.hidden_size,
                config.intermediate_size,
                config.experts,
                bias=config.mlp_bias,
            )
            layers.append(MixerLayer(config, factory, prefix, config.rms_norm_eps, mixer, mlp))
        return layers

    @property
    def attention_layers(self) -> list[LatentAttention]:
        return [layer.mixer.attention for layer in self.layers]
