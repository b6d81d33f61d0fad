"""The decoder of Llama's shape: Qwen3, Qwen2 and Llama differ only by what their config says.

Input is a step's flattened batch of T tokens; the KV cache is written and read through the attention backend.
Projections are fused (q, k, v; gate, up), so a layer costs four matrix products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.torch_native import TorchAttention
from argosy_engine.models.config import ModelConfig
from argosy_engine.models.layers import Linear, RMSNorm, RotaryEmbedding
from argosy_engine.models.weights import WeightReader


class DecoderLayer:
    def __init__(self, config: ModelConfig, weights: WeightReader, index: int) -> None:
        self.config = config
        prefix = f"model.layers.{index}."
        eps = config.rms_norm_eps
        self.input_norm = RMSNorm(weights.take(prefix + "input_layernorm.weight"), eps)
        self.post_norm = RMSNorm(weights.take(prefix + "post_attention_layernorm.weight"), eps)
        attention = prefix + "self_attn."
        self.qkv = weights.linear([attention + f"{name}_proj" for name in "qkv"], bias=config.attention_bias)
        self.output = weights.linear([attention + "o_proj"], bias=config.output_bias)
        self.q_norm = RMSNorm(weights.take(attention + "q_norm.weight"), eps) if config.qk_norm else None
        self.k_norm = RMSNorm(weights.take(attention + "k_norm.weight"), eps) if config.qk_norm else None
        mlp = prefix + "mlp."
        self.gate_up = weights.linear([mlp + "gate_proj", mlp + "up_proj"], bias=config.mlp_bias)
        self.down = weights.linear([mlp + "down_proj"], bias=config.mlp_bias)
        self.attention = TorchAttention(
            config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )
        self._split = [
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        ]

    def __call__(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """hidden [T, hidden_size] -> the same shape."""
        hidden = hidden + self._attend(self.input_norm(hidden), rotary, kv_cache, meta)
        gate, up = self.gate_up(self.post_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(F.silu(gate) * up)

    def _attend(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        head_dim = self.config.head_dim
        q, k, v = self.qkv(x).split(self._split, dim=-1)
        q = q.view(-1, self.config.num_attention_heads, head_dim)
        k = k.view(-1, self.config.num_key_value_heads, head_dim)
        v = v.view(-1, self.config.num_key_value_heads, head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = RotaryEmbedding.apply(q, *rotary), RotaryEmbedding.apply(k, *rotary)
        self.attention.write(kv_cache, k, v, meta)
        return self.output(self.attention(q, kv_cache, meta).reshape(x.shape[0], -1))


class Decoder:
    """
    Args:
        weights: positioned at the checkpoint; every tensor is taken exactly once.
        max_positions: length of the rotary tables.
    """

    def __init__(self, config: ModelConfig, weights: WeightReader, max_positions: int) -> None:
        self.config = config
        self.embedding = weights.take("model.embed_tokens.weight")
        self.layers = [DecoderLayer(config, weights, i) for i in range(config.num_hidden_layers)]
        self.norm = RMSNorm(weights.take("model.norm.weight"), config.rms_norm_eps)
        if config.tie_word_embeddings:
            self.lm_head = Linear(self.embedding)
        else:
            self.lm_head = weights.linear(["lm_head"], bias=False)
        self.rotary = RotaryEmbedding(
            config.head_dim, config.rope_theta, max_positions, self.embedding.dtype, self.embedding.device
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """Hidden states [T, hidden_size] of token_ids [T] at positions [T].

        kv_cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim].
        """
        hidden = F.embedding(token_ids, self.embedding)
        rotary = self.rotary.select(positions)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotary, kv_cache[index], meta)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab_size] of the rows that are sampled; call it with those rows only."""
        return self.lm_head(self.norm(hidden))
