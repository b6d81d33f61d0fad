"""Llama: the decoder shared by Llama, Mistral, Qwen2 and Qwen3, which differ only in their configs.

The input is a step's flattened batch of T tokens; the attention backend writes and reads the KV cache. Projections are
fused (q, k, v; gate, up), so a layer takes four matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from argosy_engine.attention.cpu_attn import CpuAttention
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.torch_attn import TorchAttention
from argosy_engine.models.layers import Linear, RMSNorm, RotaryEmbedding
from argosy_engine.models.llama_config import LlamaConfig
from argosy_engine.models.native_decoder import NativeDecoder, NativeLayer
from argosy_engine.models.rope import inverse_frequencies
from argosy_engine.models.weights import Weights

MLP = Callable[[torch.Tensor], torch.Tensor]
"""Maps [T, hidden_size] to the same shape."""
MakeMLP = Callable[[Weights, str, int], MLP]
Rotary = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of a step's positions, each [T, 1, head_dim]."""


class GatedMLP:
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, weights: Weights, prefix: str, hidden: int, inner: int, *, bias: bool) -> None:
        self.gate_up = weights.gated_linear(
            prefix + "gate_proj", prefix + "up_proj", inner, hidden, bias=bias
        )
        self.down = weights.linear({prefix + "down_proj": hidden}, inner, bias=bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate_up(x))


class DecoderLayer:
    """Attention and MLP, each after an RMSNorm.

    Args:
        make_mlp: makes the MLP from (weights, prefix, layer index).
    """

    def __init__(
        self, config: LlamaConfig, weights: Weights, index: int, rotary: RotaryEmbedding, make_mlp: MakeMLP
    ) -> None:
        self.config = config
        prefix = f"model.layers.{index}."
        eps, hidden, head_dim = config.rms_norm_eps, config.hidden_size, config.head_dim
        self.input_norm = RMSNorm(weights.take(prefix + "input_layernorm.weight", hidden), eps)
        self.post_norm = RMSNorm(weights.take(prefix + "post_attention_layernorm.weight", hidden), eps)
        attention = prefix + "self_attn."
        q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        self._split = [q, kv, kv]
        self.qkv = weights.linear(
            {attention + "q_proj": q, attention + "k_proj": kv, attention + "v_proj": kv},
            hidden,
            bias=config.attention_bias,
        )
        self.output = weights.linear({attention + "o_proj": hidden}, q, bias=config.output_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(weights.take(attention + "q_norm.weight", head_dim), eps)
            self.k_norm = RMSNorm(weights.take(attention + "k_norm.weight", head_dim), eps)
        self.mlp = make_mlp(weights, prefix + "mlp.", index)
        window = config.sliding_windows[index]
        shape = config.num_attention_heads, config.num_key_value_heads, head_dim
        self.attention = TorchAttention(*shape, sliding_window=window)
        self.native = CpuAttention.create(
            *shape,
            dtype=weights.dtype,
            device=weights.device,
            cosines=rotary.cosines,
            sines=rotary.sines,
            q_norm=self.q_norm.weight if self.q_norm else None,
            k_norm=self.k_norm.weight if self.k_norm else None,
            eps=eps,
            sliding_window=window,
        )

    def native_layer(self) -> NativeLayer | None:
        """Return the layer for `NativeDecoder`; None if some part of it has no kernel."""
        if self.native is None or not isinstance(self.mlp, GatedMLP):
            return None
        layer = NativeLayer(
            self.input_norm,
            self.qkv,
            self.native,
            self.output,
            self.post_norm,
            self.mlp.gate_up,
            self.mlp.down,
        )
        return layer if layer.is_complete else None

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotary: Rotary | None,
        kv_cache: torch.Tensor,
        meta: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer on x + residual, both [T, hidden_size]; return the output as such a pair.

        The sum is left to the next norm, which reads both anyway. The residual is updated in place. If `rotary` is
        None, the CPU kernels do the rotation and the attention.
        """
        if residual is None:
            residual, x = x, self.input_norm(x)
        else:
            x = self.input_norm.after_adding(x, residual)
        x = self.post_norm.after_adding(self._attend(x, rotary, kv_cache, meta), residual)
        return self.mlp(x), residual

    def _attend(
        self, x: torch.Tensor, rotary: Rotary | None, kv_cache: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        qkv = self.qkv(x)
        if rotary is None:
            assert self.native is not None
            return self.output(self.native(qkv, kv_cache, meta))
        head_dim = self.config.head_dim
        q, k, v = qkv.split(self._split, dim=-1)
        q = q.view(-1, self.config.num_attention_heads, head_dim)
        k = k.view(-1, self.config.num_key_value_heads, head_dim)
        v = v.view(-1, self.config.num_key_value_heads, head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = RotaryEmbedding.apply(q, *rotary), RotaryEmbedding.apply(k, *rotary)
        self.attention.write(kv_cache, k, v, meta)
        return self.output(self.attention(q, kv_cache, meta).reshape(x.shape[0], -1))


class Llama:
    """Embedding, decoder layers, final norm and output head.

    Args:
        weights: the constructor takes every tensor exactly once.
        max_positions: length of the rotary tables.
    """

    checkpoint_prefix = "model."
    ignored_tensors = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

    def __init__(self, config: LlamaConfig, weights: Weights, max_positions: int) -> None:
        self.config = config
        self.embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(
            inverse_frequencies(config.rope, config.head_dim),
            max_positions,
            weights.dtype,
            weights.device,
            config.rope.attention_scaling,
        )
        self.layers = [
            DecoderLayer(config, weights, index, self.rotary, self.make_mlp)
            for index in range(config.num_hidden_layers)
        ]
        native_layers = [native for layer in self.layers if (native := layer.native_layer())]
        self.native = NativeDecoder(native_layers) if len(native_layers) == len(self.layers) else None
        self.norm = RMSNorm(weights.take("model.norm.weight", config.hidden_size), config.rms_norm_eps)
        if config.tie_word_embeddings:
            self.lm_head = Linear(self.embedding)
        else:
            self.lm_head = weights.linear({"lm_head": config.vocab_size}, config.hidden_size)

    def make_mlp(self, weights: Weights, prefix: str, index: int) -> MLP:
        config = self.config
        return GatedMLP(weights, prefix, config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: Sequence[torch.Tensor],
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """Compute hidden states [T, hidden_size] of token_ids [T] at positions [T], before the final norm.

        kv_cache: one tensor per layer, [2, num_blocks, block_size, num_kv_heads, head_dim].
        """
        x = F.embedding(token_ids, self.embedding)
        native = self.layers[0].native
        is_native = native is not None and native.serves(kv_cache[0])
        if is_native and self.native is not None:
            return self.native(x, kv_cache, meta)
        residual: torch.Tensor | None = None
        rotary = None if is_native else self.rotary.select(positions)
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, rotary, kv_cache[index], meta.of_layer(index))
        return x if residual is None else residual.add_(x)

    def last_hidden_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to hidden [R, hidden_size]."""
        return self.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits [R, vocab_size] of hidden [R, hidden_size]. Pass only the rows to sample."""
        return self.lm_head.logits(self.norm(hidden))
