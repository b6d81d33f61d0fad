"""Llama: the decoder shared by Llama, Mistral, Qwen2 and Qwen3, which differ only in their configs.

The input is a step's flattened batch of T tokens; the attention backend writes and reads the KV cache. Projections are
fused (q, k, v; gate, up), so a layer takes four matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from argosy_engine.attention.backend import AttentionWeights, DecoderParts
from argosy_engine.attention.layer import Attention
from argosy_engine.attention.metadata import AttentionMetadata, ModelInputs
from argosy_engine.attention.params import AttentionParams
from argosy_engine.attention.rotary import RotaryEmbedding
from argosy_engine.layers.layer_compiler import CompilablePart
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.model_configs.llama_config import LlamaConfig
from argosy_engine.quantized_rows import Activations, RowQuantization, TakesRows


class MLP(TakesRows, Protocol):
    """An MLP of any kind."""

    def __call__(self, x: Activations, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Map x [T, hidden_size] to its shape. slot_mapping [T] tells padding."""
        ...


MakeMLP = Callable[[LayerFactory, str, int], MLP]


class GatedMLP:
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, factory: LayerFactory, prefix: str, hidden: int, inner: int, *, bias: bool) -> None:
        self.down = factory.row_linear(prefix + "down_proj", inner, hidden, bias=bias)
        self.gate_up = factory.gated_linear(
            prefix + "gate_proj", prefix + "up_proj", inner, hidden, bias=bias, feeds=self.down
        )

    @property
    def input_quantization(self) -> RowQuantization | None:
        return self.gate_up.input_quantization

    def __call__(self, x: Activations, slot_mapping: torch.Tensor) -> torch.Tensor:
        return self.down.sum_ranks(self.partial(x))

    def partial(self, x: Activations) -> torch.Tensor:
        """Return what `down.sum_ranks` makes the output of."""
        return self.down.partial(self.gate_up(x))


class DecoderLayer:
    """Attention and MLP, each after an RMSNorm.

    Args:
        make_mlp: makes the MLP from (factory, prefix, layer index).
    """

    def __init__(
        self,
        config: LlamaConfig,
        factory: LayerFactory,
        index: int,
        params: AttentionParams,
        rotary: RotaryEmbedding,
        make_mlp: MakeMLP,
    ) -> None:
        prefix = f"model.layers.{index}."
        eps, hidden, head_dim = config.rms_norm_eps, config.hidden_size, params.head_dim
        attention = prefix + "self_attn."
        self.qkv = factory.qkv_linear(
            [attention + name for name in ("q_proj", "k_proj", "v_proj")],
            params,
            hidden,
            bias=config.attention_bias,
        )
        self.input_norm = factory.input_norm(prefix + "input_layernorm", hidden, eps, feeds=self.qkv)
        self.output = factory.row_linear(
            attention + "o_proj", params.num_heads * head_dim, hidden, bias=config.output_bias
        )
        q_norm = k_norm = None
        if config.qk_norm:
            q_norm = factory.take(attention + "q_norm.weight", head_dim)
            k_norm = factory.take(attention + "k_norm.weight", head_dim)
        self.mlp = make_mlp(factory, prefix + "mlp.", index)
        self.post_norm = factory.input_norm(prefix + "post_attention_layernorm", hidden, eps, feeds=self.mlp)
        self.attention = factory.attention(
            params,
            AttentionWeights(rotary, q_norm, k_norm, eps),
            prefix=attention,
            feeds=self.output,
        )
        self._project = factory.part(DecoderLayer.project)
        self._feed_forward = factory.part(DecoderLayer.feed_forward)
        self._hidden = hidden

    def parts(self) -> DecoderParts | None:
        """Return the layer's parts for `LayerFactory.fuse_decoder`; None if its MLP is not a gated one."""
        if not isinstance(self.mlp, GatedMLP):
            return None
        return DecoderParts(
            self.input_norm,
            self.qkv,
            self.attention,
            self.output,
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
        """Run the layer on x + residual, both [T, hidden_size]; return the output as such a pair.

        The sum is left to the next norm, which reads both anyway. The residual is updated in place.
        """
        if residual is None:
            residual, qkv = x, self.qkv(self.input_norm(x))
        else:
            qkv = self._project(self, x, residual)
        attended = self.output(self.attention(qkv, meta))
        if isinstance(self.mlp, GatedMLP):
            return self.mlp.down.sum_ranks(self._feed_forward(self, attended, residual)), residual
        return self.mlp(self.post_norm.after_adding(attended, residual), meta.slot_mapping), residual

    def project(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add x to the residual and return q, k and v of the norm of the sum."""
        return self.qkv(self.input_norm.after_adding(x, residual))

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


class Llama:
    """Embedding, decoder layers, final norm and output head."""

    checkpoint_prefix = "model."
    ignored_tensors = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

    def __init__(self, config: LlamaConfig, factory: LayerFactory) -> None:
        self.config = config
        vocab_size, hidden = config.vocab_size, config.hidden_size
        before = factory.before_layers(is_tied=config.tie_word_embeddings)
        self.embedding = before.embedding("model.embed_tokens.weight", vocab_size, hidden)
        rotary = factory.rotary(config.rope, config.head_dim)
        self.layers = [
            DecoderLayer(config, factory, index, params, rotary, self.make_mlp)
            for index, params in factory.own_layers(config.attention_layers, AttentionParams)
        ]
        parts = [each for layer in self.layers if (each := layer.parts())]
        self.fused = factory.fuse_decoder(parts) if len(parts) == len(self.layers) else None
        """Runs all layers at once, if the attention backend can."""
        after = factory.after_layers()
        self.norm = after.rms_norm("model.norm", hidden, config.rms_norm_eps)
        self.lm_head = after.output_head(self.embedding, vocab_size, is_tied=config.tie_word_embeddings)

    def make_mlp(self, factory: LayerFactory, prefix: str, index: int) -> MLP:
        config = self.config
        return GatedMLP(factory, prefix, config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer.attention for layer in self.layers]

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Compute hidden states [T, hidden_size]; see `CausalLM.forward`."""
        x = self.embedding(inputs.token_ids) if inputs.hidden is None else inputs.hidden
        if self.fused is not None:
            return self.fused(x, inputs.meta)
        residual: torch.Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, inputs.meta)
        return x if residual is None else residual.add_(x)

    def last_hidden_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to hidden [R, hidden_size]."""
        return self.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits [R, vocab_size] of hidden [R, hidden_size]. Pass only the rows to sample."""
        return self.lm_head.logits(self.norm(hidden))
