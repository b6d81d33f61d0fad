"""Gemma 2 and Gemma 3 (text): norms before and after each block, GeGLU, local and global attention layers.

Differences from Llama's decoder: RMSNorm multiplies by 1 + weight, embeddings are multiplied by sqrt(hidden_size), and
scores are divided by sqrt(query_pre_attn_scalar). Gemma 3 uses different RoPE bases in local and global layers; Gemma 2
soft-caps logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from argosy_engine.attention.cpu_attn import CpuAttention
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.torch_attn import TorchAttention
from argosy_engine.models.gemma_config import GemmaConfig
from argosy_engine.models.layers import Linear, RotaryEmbedding
from argosy_engine.models.rope import inverse_frequencies
from argosy_engine.models.weights import Weights

Rotary = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of a step's positions, each [T, 1, head_dim]."""


class GemmaRMSNorm:
    """x / rms(x) * (1 + weight) over the last dimension, computed in float32."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self.weight = weights.take(name + ".weight", size).to(torch.float32, copy=True).add_(1.0)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class GeGLU:
    """down(gelu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, weights: Weights, prefix: str, hidden: int, inner: int) -> None:
        self.gate_up = weights.linear({prefix + "gate_proj": inner, prefix + "up_proj": inner}, hidden)
        self.down = weights.linear({prefix + "down_proj": hidden}, inner)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.gelu(gate, approximate="tanh") * up)


class GemmaLayer:
    def __init__(self, config: GemmaConfig, weights: Weights, index: int, rotary: RotaryEmbedding) -> None:
        prefix = f"model.layers.{index}."
        eps, hidden, head_dim = config.rms_norm_eps, config.hidden_size, config.head_dim
        self.rotary = rotary
        self.input_norm = GemmaRMSNorm(weights, prefix + "input_layernorm", hidden, eps)
        self.post_attention_norm = GemmaRMSNorm(weights, prefix + "post_attention_layernorm", hidden, eps)
        self.pre_mlp_norm = GemmaRMSNorm(weights, prefix + "pre_feedforward_layernorm", hidden, eps)
        self.post_mlp_norm = GemmaRMSNorm(weights, prefix + "post_feedforward_layernorm", hidden, eps)
        attention = prefix + "self_attn."
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = head_dim
        q, kv = self.heads * head_dim, self.kv_heads * head_dim
        self._split = [self.heads, self.kv_heads, self.kv_heads]
        self.qkv = weights.linear(
            {attention + "q_proj": q, attention + "k_proj": kv, attention + "v_proj": kv},
            hidden,
            bias=config.attention_bias,
        )
        self.output = weights.linear({attention + "o_proj": hidden}, q, bias=config.attention_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = GemmaRMSNorm(weights, attention + "q_norm", head_dim, eps)
            self.k_norm = GemmaRMSNorm(weights, attention + "k_norm", head_dim, eps)
        self.mlp = GeGLU(weights, prefix + "mlp.", hidden, config.intermediate_size)
        options: dict[str, Any] = {
            "scale": config.query_pre_attn_scalar**-0.5,
            "sliding_window": config.sliding_windows[index],
            "logit_softcap": config.attn_logit_softcapping,
        }
        self.attention = TorchAttention(self.heads, self.kv_heads, head_dim, **options)
        self.native = CpuAttention.create(
            self.heads,
            self.kv_heads,
            head_dim,
            dtype=weights.dtype,
            device=weights.device,
            cosines=rotary.cosines,
            sines=rotary.sines,
            **options,
        )

    def __call__(
        self, hidden: torch.Tensor, rotary: Rotary | None, kv_cache: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        """Run the layer on hidden [T, hidden_size]; the output has the same shape.

        If `rotary` is None, the CPU kernels do the rotation and the attention.
        """
        attended = self._attend(self.input_norm(hidden), rotary, kv_cache, meta)
        hidden = hidden + self.post_attention_norm(attended)
        return hidden + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(hidden)))

    def _attend(
        self, x: torch.Tensor, rotary: Rotary | None, kv_cache: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        qkv = self.qkv(x)
        q, k, v = qkv.view(-1, self.heads + 2 * self.kv_heads, self.head_dim).split(self._split, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q.copy_(self.q_norm(q))
            k.copy_(self.k_norm(k))
        if rotary is None:
            assert self.native is not None
            return self.output(self.native(qkv, kv_cache, meta))
        q, k = RotaryEmbedding.apply(q, *rotary), RotaryEmbedding.apply(k, *rotary)
        self.attention.write(kv_cache, k, v, meta)
        return self.output(self.attention(q, kv_cache, meta).reshape(x.shape[0], -1))


class Gemma:
    checkpoint_prefix = "model."
    ignored_tensors = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

    def __init__(self, config: GemmaConfig, weights: Weights, max_positions: int) -> None:
        self.config = config
        self.embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=weights.dtype).item()
        self.rotary_global, self.rotary_local = (
            RotaryEmbedding(
                inverse_frequencies(rope, config.head_dim),
                max_positions,
                weights.dtype,
                weights.device,
                rope.attention_scaling,
            )
            for rope in (config.rope_global, config.rope_local)
        )
        self.layers = [
            GemmaLayer(config, weights, index, self.rotary_global if window is None else self.rotary_local)
            for index, window in enumerate(config.sliding_windows)
        ]
        self.norm = GemmaRMSNorm(weights, "model.norm", config.hidden_size, config.rms_norm_eps)
        if config.tie_word_embeddings:
            self.lm_head = Linear(self.embedding)
        else:
            self.lm_head = weights.linear({"lm_head": config.vocab_size}, config.hidden_size)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: Sequence[torch.Tensor],
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        hidden = F.embedding(token_ids, self.embedding) * self.embedding_scale
        native = self.layers[0].native
        is_native = native is not None and native.serves(kv_cache[0])
        rotary = {
            table: None if is_native else table.select(positions)
            for table in (self.rotary_global, self.rotary_local)
        }
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotary[layer.rotary], kv_cache[index], meta.of_layer(index))
        return hidden

    def last_hidden_state(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head.logits(self.norm(hidden))
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap
