"""Gemma 2 and Gemma 3 (text): norms before and after each block, GeGLU, local and global attention layers.

Differences from Llama's decoder: RMSNorm multiplies by 1 + weight, embeddings are multiplied by sqrt(hidden_size), and
scores are divided by sqrt(query_pre_attn_scalar). Gemma 3 uses different RoPE bases in local and global layers; Gemma 2
soft-caps logits.
"""

from __future__ import annotations

import torch

from argosy_engine.attention.backend import AttentionWeights
from argosy_engine.attention.layer import Attention
from argosy_engine.attention.metadata import AttentionMetadata, ModelInputs
from argosy_engine.attention.params import AttentionParams
from argosy_engine.attention.rotary import RotaryEmbedding
from argosy_engine.layers.layer_compiler import CompilablePart
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.mlp import GatedMLP
from argosy_engine.layers.norms import RMSNorm
from argosy_engine.model_configs.gemma_config import GemmaConfig


def gemma_rms_norm(factory: LayerFactory, name: str, size: int, eps: float) -> RMSNorm:
    """Make x / rms(x) * (1 + weight)."""
    return factory.rms_norm(name, size, eps, adds_one=True)


class GemmaLayer:
    def __init__(
        self,
        config: GemmaConfig,
        factory: LayerFactory,
        index: int,
        params: AttentionParams,
        rotary: RotaryEmbedding,
        previous_norm: RMSNorm | None,
    ) -> None:
        self.previous_norm = previous_norm
        """The last layer's `post_mlp_norm`."""
        prefix = f"model.layers.{index}."
        eps, hidden, head_dim = config.rms_norm_eps, config.hidden_size, params.head_dim
        self.post_attention_norm = gemma_rms_norm(factory, prefix + "post_attention_layernorm", hidden, eps)
        self.post_mlp_norm = gemma_rms_norm(factory, prefix + "post_feedforward_layernorm", hidden, eps)
        attention = prefix + "self_attn."
        self.qkv = factory.qkv_linear(
            [attention + name for name in ("q_proj", "k_proj", "v_proj")],
            params,
            hidden,
            bias=config.attention_bias,
        )
        self.input_norm = factory.input_norm(
            prefix + "input_layernorm", hidden, eps, feeds=self.qkv, adds_one=True
        )
        self.output = factory.row_linear(
            attention + "o_proj", params.num_heads * head_dim, hidden, bias=config.attention_bias
        )
        q_norm = k_norm = None
        if config.qk_norm:
            q_norm = gemma_rms_norm(factory, attention + "q_norm", head_dim, eps).weight
            k_norm = gemma_rms_norm(factory, attention + "k_norm", head_dim, eps).weight
        self.mlp = GatedMLP(
            factory, prefix + "mlp.", hidden, config.intermediate_size, activation="gelu_pytorch_tanh"
        )
        self.pre_mlp_norm = factory.input_norm(
            prefix + "pre_feedforward_layernorm", hidden, eps, feeds=self.mlp, adds_one=True
        )
        self.attention = factory.attention(
            params, AttentionWeights(rotary, q_norm, k_norm, eps), prefix=attention, feeds=self.output
        )
        self._project = factory.part(GemmaLayer.project)
        self._feed_forward = factory.part(GemmaLayer.feed_forward)
        self._hidden = hidden

    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """Run the layer; return what the next one gets as x. All tensors are [T, hidden_size].

        Args:
            x: the last layer's output, which has to be normed by its `post_mlp_norm` and added to the residual: that is
                left to this layer's norm, which reads both anyway. None in the first layer.
            residual: updated in place.
        """
        if x is None:
            qkv = self.qkv(self.input_norm(residual))
        else:
            qkv = self._project(self, x, residual)
        attended = self.output(self.attention(qkv, meta))
        return self.mlp.down.sum_ranks(self._feed_forward(self, attended, residual))

    def project(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add the norm of the last layer's output to the residual and return q, k and v of the norm of the sum."""
        return self.qkv(self.input_norm.after_adding(x, residual, self.previous_norm))

    def feed_forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add the norm of attention's output to the residual and return the MLP's partial output of the norm of the
        sum."""
        return self.mlp.partial(self.pre_mlp_norm.after_adding(x, residual, self.post_attention_norm))

    def parts_to_compile(self) -> list[CompilablePart]:
        widths = self._hidden, self._hidden
        parts = [CompilablePart(self._feed_forward, widths)]
        if self.previous_norm is not None:  # not in the first layer
            parts.insert(0, CompilablePart(self._project, widths))
        return parts


class Gemma:
    checkpoint_prefix = "model."
    ignored_tensors = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

    def __init__(self, config: GemmaConfig, factory: LayerFactory) -> None:
        self.config = config
        vocab_size, hidden = config.vocab_size, config.hidden_size
        before = factory.before_layers(is_tied=config.tie_word_embeddings)
        self.embedding = before.embedding("model.embed_tokens.weight", vocab_size, hidden)
        self.embedding_scale = torch.tensor(hidden**0.5, dtype=factory.dtype).item()
        rotary_global, rotary_local = (
            factory.rotary(rope, config.head_dim) for rope in (config.rope_global, config.rope_local)
        )
        self.layers: list[GemmaLayer] = []
        for index, params in factory.own_layers(config.attention_layers, AttentionParams):
            rotary = rotary_global if config.sliding_windows[index] is None else rotary_local
            previous_norm = self.layers[-1].post_mlp_norm if self.layers else None
            self.layers.append(GemmaLayer(config, factory, index, params, rotary, previous_norm))
        after = factory.after_layers()
        self.norm = gemma_rms_norm(after, "model.norm", hidden, config.rms_norm_eps)
        self.lm_head = after.output_head(self.embedding, vocab_size, is_tied=config.tie_word_embeddings)

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer.attention for layer in self.layers]

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        residual = inputs.hidden
        if residual is None:
            residual = self.embedding(inputs.token_ids) * self.embedding_scale
        x: torch.Tensor | None = None
        for layer in self.layers:
            x = layer(x, residual, inputs.meta)
        return residual if x is None else residual.add_(self.layers[-1].post_mlp_norm(x))

    def last_hidden_state(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head.logits(self.norm(hidden))
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap
