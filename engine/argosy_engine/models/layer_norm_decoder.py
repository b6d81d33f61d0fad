"""Decoders with LayerNorms and rotary positions: Cohere's Command R and Command R7B, StarCoder 2 (arXiv 2402.19173).

Attention is Llama's.
"""

from __future__ import annotations

import torch

from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.params import AttentionParams
from argosy_engine.attention.rotary import RotaryEmbedding
from argosy_engine.layers.layer_compiler import CompilablePart
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.mlp import GatedMLP
from argosy_engine.model_configs.layer_norm_config import LayerNormConfig
from argosy_engine.models.gpt2_layers import ACTIVATIONS, LayerNorm
from argosy_engine.models.llama import Llama, LlamaAttention, LlamaLayer


class PlainMLP:
    """down(activation(up(x)))."""

    def __init__(self, config: LayerNormConfig, factory: LayerFactory, prefix: str) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        assert config.activation is not None
        self.up = factory.column_linear({prefix + "c_fc": inner}, hidden, bias=bias)
        self.down = factory.row_linear(prefix + "c_proj", inner, hidden, bias=bias)
        self.activation = ACTIVATIONS[config.activation]

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """Return what `down.sum_ranks` makes the output of, [T, hidden_size]."""
        return self.down.partial(self.activation(self.up(x)))


class LayerNormLayer:
    """Attention and MLP, each after a LayerNorm or, if `config.is_parallel`, both after the same.

    Ranks add what attention and MLP make of the same norm in one sum.
    """

    def __init__(
        self,
        config: LayerNormConfig,
        factory: LayerFactory,
        index: int,
        params: AttentionParams,
        rotary: RotaryEmbedding | None,
    ) -> None:
        prefix = f"model.layers.{index}."
        hidden = config.hidden_size
        self.block = LlamaAttention(config, factory, prefix + "self_attn.", index, params, rotary)
        self.attention = self.block.attention
        self.mlp: GatedMLP | PlainMLP
        if config.activation is None:
            self.mlp = GatedMLP(
                factory, prefix + "mlp.", hidden, config.intermediate_size, bias=config.mlp_bias
            )
        else:
            self.mlp = PlainMLP(config, factory, prefix + "mlp.")
        self.input_norm = make_norm(config, factory, prefix + "input_layernorm")
        self.post_norm = None
        if not config.is_parallel:
            self.post_norm = make_norm(config, factory, prefix + "post_attention_layernorm")

    def parts(self) -> None:
        return None

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, meta: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `decoder.Layer`."""
        residual = x if residual is None else residual.add_(x)
        normed = self.input_norm(residual)
        attended = self.block.attend_partial(self.block.qkv(normed), meta)
        if self.post_norm is None:
            out = attended.add_(self.mlp.partial(normed))
        else:
            normed = self.post_norm(residual.add_(self.block.output.sum_ranks(attended)))
            out = self.mlp.partial(normed)
        return self.mlp.down.sum_ranks(out), residual

    def parts_to_compile(self) -> list[CompilablePart]:
        return []


def make_norm(config: LayerNormConfig, factory: LayerFactory, name: str) -> LayerNorm:
    """Make a LayerNorm over the hidden size."""
    return LayerNorm(factory, name, config.hidden_size, config.rms_norm_eps, has_bias=config.has_norm_bias)


class LayerNormDecoder(Llama):
    """See `Decoder`."""

    config: LayerNormConfig

    def make_layer(
        self, factory: LayerFactory, index: int, params: AttentionParams, rotary: RotaryEmbedding | None
    ) -> LlamaLayer:
        return LayerNormLayer(self.config, factory, index, params, rotary)

    def make_norm(self, factory: LayerFactory) -> LayerNorm:
        return make_norm(self.config, factory, "model.norm")
