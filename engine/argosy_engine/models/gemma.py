"""Gemma 2 and Gemma 3 (text): norms before and after each block, GeGLU, local and global attention layers.

Differences from Llama's decoder: RMSNorm multiplies by 1 + weight, embeddings are multiplied by sqrt(hidden_size), and
scores are divided by sqrt(query_pre_attn_scalar). Gemma 3 uses different RoPE bases in local and global layers; Gemma 2
soft-caps logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from argosy_engine.attention.backend import AttentionWeights
from argosy_engine.attention.layer import Attention
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.params import AttentionParams
from argosy_engine.attention.rotary import RotaryEmbedding
from argosy_engine.attention.torch_rms_norm import rms_norm
from argosy_engine.models.gemma_config import GemmaConfig
from argosy_engine.models.layer_factory import LayerFactory


class GemmaRMSNorm:
    """x / rms(x) * (1 + weight) over the last dimension, computed in float32."""

    def __init__(self, factory: LayerFactory, name: str, size: int, eps: float) -> None:
        self.weight = factory.take(name + ".weight", size).to(torch.float32, copy=True).add_(1.0)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class GeGLU:
    """down(gelu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, factory: LayerFactory, prefix: str, hidden: int, inner: int) -> None:
        self.gate_up = factory.linear({prefix + "gate_proj": inner, prefix + "up_proj": inner}, hidden)
        self.down = factory.linear({prefix + "down_proj": hidden}, inner)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.gelu(gate, approximate="tanh") * up)


class GemmaLayer:
    def __init__(
        self,
        config: GemmaConfig,
        factory: LayerFactory,
        index: int,
        params: AttentionParams,
        rotary: RotaryEmbedding,
    ) -> None:
        prefix = f"model.layers.{index}."
        eps, hidden, head_dim = config.rms_norm_eps, config.hidden_size, params.head_dim
        self.input_norm = GemmaRMSNorm(factory, prefix + "input_layernorm", hidden, eps)
        self.post_attention_norm = GemmaRMSNorm(factory, prefix + "post_attention_layernorm", hidden, eps)
        self.pre_mlp_norm = GemmaRMSNorm(factory, prefix + "pre_feedforward_layernorm", hidden, eps)
        self.post_mlp_norm = GemmaRMSNorm(factory, prefix + "post_feedforward_layernorm", hidden, eps)
        attention = prefix + "self_attn."
        q, kv = params.num_heads * head_dim, params.num_kv_heads * head_dim
        self.qkv = factory.linear(
            {attention + "q_proj": q, attention + "k_proj": kv, attention + "v_proj": kv},
            hidden,
            bias=config.attention_bias,
        )
        self.output = factory.linear({attention + "o_proj": hidden}, q, bias=config.attention_bias)
        q_norm = k_norm = None
        if config.qk_norm:
            q_norm = GemmaRMSNorm(factory, attention + "q_norm", head_dim, eps).weight
            k_norm = GemmaRMSNorm(factory, attention + "k_norm", head_dim, eps).weight
        self.mlp = GeGLU(factory, prefix + "mlp.", hidden, config.intermediate_size)
        self.attention = factory.attention(params, AttentionWeights(rotary, q_norm, k_norm, eps))

    def __call__(self, hidden: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Run the layer on hidden [T, hidden_size]; the output has the same shape."""
        attended = self.output(self.attention(self.qkv(self.input_norm(hidden)), kv_cache, meta))
        hidden = hidden + self.post_attention_norm(attended)
        return hidden + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(hidden)))


class Gemma:
    checkpoint_prefix = "model."
    ignored_tensors = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

    def __init__(self, config: GemmaConfig, factory: LayerFactory) -> None:
        self.config = config
        self.embedding = factory.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=factory.dtype).item()
        rotary_global, rotary_local = (
            factory.rotary(rope, config.head_dim) for rope in (config.rope_global, config.rope_local)
        )
        self.layers = [
            GemmaLayer(config, factory, index, params, rotary_global if window is None else rotary_local)
            for index, (params, window) in enumerate(
                zip(config.attention_layers, config.sliding_windows, strict=True)
            )
        ]
        self.norm = GemmaRMSNorm(factory, "model.norm", config.hidden_size, config.rms_norm_eps)
        self.lm_head = factory.output_head(self.embedding, is_tied=config.tie_word_embeddings)

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer.attention for layer in self.layers]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: Sequence[torch.Tensor],
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        hidden = F.embedding(token_ids, self.embedding) * self.embedding_scale
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, kv_cache[index], meta.of_layer(index))
        return hidden

    def last_hidden_state(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head.logits(self.norm(hidden))
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap
