"""Llama, and the decoders that differ from it by their configs (`llama_families` lists them); those with LayerNorms:
Cohere's Command R and Command R7B, StableLM 2 (arXiv 2402.17834), StarCoder 2 (arXiv 2402.19173).

The input is a step's flattened batch of T tokens; the attention backend writes and reads the KV cache. Projections are
fused (q, k, v; gate, up), so a layer takes four matrix products.
"""

from __future__ import annotations

from typing import Protocol

import torch

from argosy_engine.attention.backend import (
    Attention,
    AttentionMetadata,
    AttentionWeights,
    DecoderParts,
    ModelInputs,
    RotaryEmbedding,
)
from argosy_engine.attention.params import AttentionParams
from argosy_engine.layers.embedding import query_scales
from argosy_engine.layers.layer_compiler import CompilablePart
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.mlp import GatedMLP, decoder_mlp
from argosy_engine.layers.norms import ACTIVATIONS, HeadsNorm, LayerNorm, WidthNorm
from argosy_engine.model_configs.llama_config import LayerNormConfig, LlamaConfig
from argosy_engine.models.decoder import MLP, Decoder, Layer
from argosy_engine.quantized_rows import Activations


class LlamaAttention:
    """Attention with its projections, from normed hidden states to what is added to the residual.

    Args:
        output, norms: names of the output projection, and of the norms of q and k.
    """

    def __init__(
        self,
        config: LlamaConfig,
        factory: LayerFactory,
        prefix: str,
        index: int,
        params: AttentionParams,
        rotary: RotaryEmbedding | None,
        *,
        output: str = "o_proj",
        norms: tuple[str, str] = ("q_norm", "k_norm"),
    ) -> None:
        hidden, dim, eps = config.hidden_size, params.head_dim, config.rms_norm_eps
        rope = config.rope if rotary is not None else None
        names = ("qkv_proj",) if config.has_fused_qkv else ("q_proj", "k_proj", "v_proj")
        self.qkv = factory.qkv_linear(
            [prefix + name for name in names], params, hidden, bias=config.attention_bias, rope=rope
        )
        self.input_quantization = self.qkv.input_quantization
        self.output = factory.row_linear(
            prefix + output, params.num_heads * dim, hidden, bias=config.output_bias
        )
        q_norm = k_norm = None
        self.heads_norm: WidthNorm | HeadsNorm | None = None
        if config.qk_norm == "head":
            q_norm, k_norm = (factory.head_weight(f"{prefix}{name}.weight", dim, rope) for name in norms)
        elif config.qk_norm == "width":
            self.heads_norm = factory.width_norm(prefix + norms[0], prefix + norms[1], params, eps, rope)
        elif config.qk_norm == "heads":
            self.heads_norm = factory.heads_norm(prefix + norms[0], prefix + norms[1], params, eps, rope)
        elif config.qk_norm == "unweighted" and rope is not None:
            q_norm = k_norm = torch.ones(dim, dtype=factory.dtype, device=factory.device)
        sinks = factory.sinks(prefix + "sinks", params) if params.has_sinks else None
        self.temperature = config.temperature_of(index)
        self.attention = factory.attention(
            params,
            AttentionWeights(rotary, q_norm, k_norm, eps, sinks=sinks),
            prefix=prefix,
            feeds=self.output,
        )
        self._q_size = self.attention.params.num_heads * dim

    def __call__(self, x: Activations, meta: AttentionMetadata) -> torch.Tensor:
        """Attend from x, [T, hidden_size]; the output has the same shape."""
        return self.attend(self.qkv(x), meta)

    @property
    def is_plain(self) -> bool:
        """Whether nothing comes between the projections and `attention`."""
        return self.heads_norm is None and self.temperature is None

    def attend(self, qkv: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Return what `output` makes of attention over q, k and v, [T, hidden_size]. qkv may be changed in place."""
        return self.output.sum_ranks(self.attend_partial(qkv, meta))

    def attend_partial(self, qkv: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Return what `output.sum_ranks` makes that of."""
        if self.heads_norm is not None:
            qkv = self.heads_norm(qkv)
        if self.temperature is not None:
            scales = meta.shared.get(self.temperature)
            if scales is None:
                scales = query_scales(self.temperature, meta.positions, qkv.dtype)
                meta.shared[self.temperature] = scales
            qkv[:, : self._q_size].mul_(scales)
        return self.output.partial(self.attention(qkv, meta))


class LlamaLayer(Layer, Protocol):
    """A layer with attention of `LlamaAttention`."""

    attention: Attention

    def parts(self) -> DecoderParts | None:
        """Return the layer's parts for `LayerFactory.fuse_decoder`; None if it has others than Llama's."""
        ...


class DecoderLayer:
    """Attention and MLP, each after an RMSNorm."""

    def __init__(
        self,
        config: LlamaConfig,
        factory: LayerFactory,
        index: int,
        params: AttentionParams,
        rotary: RotaryEmbedding | None,
        mlp: MLP,
    ) -> None:
        prefix = f"model.layers.{index}."
        eps, hidden = config.rms_norm_eps, config.hidden_size
        self.mlp = mlp
        self.block = LlamaAttention(config, factory, prefix + "self_attn.", index, params, rotary)
        self.input_norm = factory.input_norm(prefix + "input_layernorm", hidden, eps, feeds=self.block.qkv)
        self.post_norm = factory.input_norm(prefix + "post_attention_layernorm", hidden, eps, feeds=mlp)
        self.attention = self.block.attention
        self.multiplier = config.residual_multiplier
        self._project = factory.part(DecoderLayer.project)
        self._feed_forward = factory.part(DecoderLayer.feed_forward)
        self._hidden = hidden

    def parts(self) -> DecoderParts | None:
        if not isinstance(self.mlp, GatedMLP) or not self.block.is_plain or self.multiplier != 1.0:
            return None
        return DecoderParts(
            self.input_norm,
            self.block.qkv,
            self.attention,
            self.block.output,
            self.post_norm,
            self.mlp.gate_up,
            self.mlp.down,
        )

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        meta: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `decoder.Layer`."""
        if residual is None:
            residual, qkv = x, self.block.qkv(self.input_norm(x))
        else:
            qkv = self._project(self, x, residual)
        attended = self._scaled(self.block.attend(qkv, meta))
        if isinstance(self.mlp, GatedMLP):
            out = self.mlp.down.sum_ranks(self._feed_forward(self, attended, residual))
        else:
            out = self.mlp(self.post_norm.after_adding(attended, residual), meta.slot_mapping)
        return self._scaled(out), residual

    def project(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add x to the residual and return q, k and v of the norm of the sum."""
        return self.block.qkv(self.input_norm.after_adding(x, residual))

    def feed_forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add x to the residual and return the gated MLP's partial output of the norm of the sum."""
        assert isinstance(self.mlp, GatedMLP)
        return self.mlp.partial(self.post_norm.after_adding(x, residual))

    def parts_to_compile(self) -> list[CompilablePart]:
        widths = self._hidden, self._hidden
        parts = [CompilablePart(self._project, widths)]
        if isinstance(self.mlp, GatedMLP):
            parts.append(CompilablePart(self._feed_forward, widths))
        return parts

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.multiplier == 1.0 else x * self.multiplier


class OutputNormLayer:
    """Attention and MLP with an RMSNorm on the output of each (OLMo 2) and, if `config.norms` is `both`, one on the
    input of each as well (GLM-4)."""

    def __init__(
        self,
        config: LlamaConfig,
        factory: LayerFactory,
        index: int,
        params: AttentionParams,
        rotary: RotaryEmbedding | None,
        mlp: MLP,
    ) -> None:
        prefix = f"model.layers.{index}."
        eps, hidden = config.rms_norm_eps, config.hidden_size
        self.mlp = mlp
        self.block = LlamaAttention(config, factory, prefix + "self_attn.", index, params, rotary)
        self.attention = self.block.attention
        self.input_norm = self.mlp_norm = None
        if config.norms == "both":
            self.input_norm = factory.input_norm(
                prefix + "input_layernorm", hidden, eps, feeds=self.block.qkv
            )
            self.mlp_norm = factory.input_norm(prefix + "post_attention_layernorm", hidden, eps, feeds=mlp)
            names = "post_self_attn_layernorm", "post_mlp_layernorm"
        else:
            names = "post_attention_layernorm", "post_feedforward_layernorm"
        self.attended_norm, self.output_norm = (
            factory.rms_norm(prefix + name, hidden, eps) for name in names
        )

    def parts(self) -> None:
        return None

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, meta: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `decoder.Layer`."""
        normed: Activations
        if residual is None:
            residual, normed = x, x if self.input_norm is None else self.input_norm(x)
        elif self.input_norm is None:
            normed = residual.add_(x)
        else:
            normed = self.input_norm.after_adding(x, residual)
        attended = self.block.attend(self.block.qkv(normed), meta)
        if self.mlp_norm is None:
            normed = residual.add_(self.attended_norm(attended))
        else:
            normed = self.mlp_norm.after_adding(attended, residual, self.attended_norm)
        return self.output_norm(self.mlp(normed, meta.slot_mapping)), residual

    def parts_to_compile(self) -> list[CompilablePart]:
        return []


def make_mlp(config: LlamaConfig, factory: LayerFactory, prefix: str, index: int) -> MLP:
    """Make the MLP of a layer.

    Args:
        prefix: of the layer's tensors.
    """
    return decoder_mlp(
        factory,
        prefix,
        index,
        config.hidden_size,
        config.intermediate_size,
        config.experts,
        bias=config.mlp_bias,
        is_fused=config.has_fused_mlp,
    )


class Llama(Decoder[LlamaLayer]):
    """See `Decoder`."""

    def __init__(self, config: LlamaConfig, factory: LayerFactory) -> None:
        self.config = config
        super().__init__(
            config,
            factory,
            config.rms_norm_eps,
            embedding_multiplier=config.embedding_multiplier,
            logits_scaling=config.logits_scaling,
        )
        parts = [each for layer in self.layers if (each := layer.parts())]
        self.fused = factory.fuse_decoder(parts) if len(parts) == len(self.layers) else None
        """Runs all layers at once, if the attention backend can."""

    def make_layers(self, factory: LayerFactory) -> list[LlamaLayer]:
        config = self.config
        rotary = factory.rotary(config.rope, config.head_dim)
        local = config.local_rope
        local_rotary = rotary if local is None else factory.rotary(local, config.head_dim)
        layers = []
        for index, params in factory.own_layers(config.attention_layers, AttentionParams):
            used = rotary if config.sliding_windows[index] is None else local_rotary
            layers.append(self.make_layer(factory, index, params, used if config.rotates(index) else None))
        return layers

    def make_layer(
        self, factory: LayerFactory, index: int, params: AttentionParams, rotary: RotaryEmbedding | None
    ) -> LlamaLayer:
        """Make one layer.

        Args:
            rotary: None: queries and keys are not rotated.
        """
        config = self.config
        mlp = make_mlp(config, factory, f"model.layers.{index}.", index)
        layer_class = DecoderLayer if config.norms == "inputs" else OutputNormLayer
        return layer_class(config, factory, index, params, rotary, mlp)

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer.attention for layer in self.layers]

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        if self.fused is not None and inputs.deepstack is None:
            return self.fused(self.embed(inputs), inputs.meta)
        return super().forward(inputs)


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
        self.input_norm = _layer_norm(config, factory, prefix + "input_layernorm")
        self.post_norm = None
        if not config.is_parallel:
            self.post_norm = _layer_norm(config, factory, prefix + "post_attention_layernorm")

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


def _layer_norm(config: LayerNormConfig, factory: LayerFactory, name: str) -> LayerNorm:
    return factory.layer_norm(name, config.hidden_size, config.rms_norm_eps, has_bias=config.has_norm_bias)


class LayerNormDecoder(Llama):
    """See `Decoder`."""

    config: LayerNormConfig

    def make_layer(
        self, factory: LayerFactory, index: int, params: AttentionParams, rotary: RotaryEmbedding | None
    ) -> LlamaLayer:
        return LayerNormLayer(self.config, factory, index, params, rotary)

    def make_norm(self, factory: LayerFactory) -> LayerNorm:
        return _layer_norm(self.config, factory, "model.norm")
