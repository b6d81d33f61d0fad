"""DeepSeek V2 and V3 (arXiv 2405.04434, 2412.19437), and decoders of their form: multi-head latent attention, dense
MLPs in the first layers and experts in the others."""

from __future__ import annotations

import torch

from argosy_engine.attention.layer import LatentAttention
from argosy_engine.attention.metadata import AttentionMetadata, ModelInputs
from argosy_engine.attention.params import LatentAttentionParams
from argosy_engine.attention.rotary import RotaryEmbedding
from argosy_engine.layers.layer_compiler import CompilablePart
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.linear import Linear
from argosy_engine.layers.mlp import GatedMLP, sparse_mlp
from argosy_engine.layers.norms import InputNorm
from argosy_engine.model_configs.deepseek_config import DeepseekConfig
from argosy_engine.models.llama import MLP
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


class DeepseekLayer:
    """Latent attention and an MLP, dense or of experts, each after an RMSNorm."""

    def __init__(
        self,
        config: DeepseekConfig,
        factory: LayerFactory,
        index: int,
        params: LatentAttentionParams,
        rotary: RotaryEmbedding,
    ) -> None:
        prefix = f"model.layers.{index}."
        eps, hidden = config.rms_norm_eps, config.hidden_size
        self.self_attention = LatentSelfAttention(config, factory, prefix + "self_attn.", params, rotary)
        self.input_norm = factory.input_norm(
            prefix + "input_layernorm", hidden, eps, feeds=self.self_attention
        )
        self.mlp = _make_mlp(config, factory, prefix, index)
        self.post_norm = factory.input_norm(prefix + "post_attention_layernorm", hidden, eps, feeds=self.mlp)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, meta: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer on x + residual, both [T, hidden_size]; return the output as such a pair.

        The sum is left to the next norm, which reads both anyway. The residual is updated in place.
        """
        if residual is None:
            residual, normed = x, self.input_norm(x)
        else:
            normed = self.input_norm.after_adding(x, residual)
        attended = self.self_attention(normed, meta)
        normed = self.post_norm.after_adding(attended, residual)
        return self.mlp(normed, meta.slot_mapping), residual

    def parts_to_compile(self) -> list[CompilablePart]:
        return []


def _make_mlp(config: DeepseekConfig, factory: LayerFactory, prefix: str, index: int) -> MLP:
    hidden, experts = config.hidden_size, config.experts
    if experts is None or not experts.is_sparse[index]:
        return GatedMLP(factory, prefix + "mlp.", hidden, config.intermediate_size, bias=config.mlp_bias)
    return sparse_mlp(factory, prefix, hidden, experts, bias=config.mlp_bias)


class Deepseek:
    """Embedding, decoder layers, final norm and output head."""

    checkpoint_prefix = "model."
    ignored_tensors = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

    def __init__(self, config: DeepseekConfig, factory: LayerFactory) -> None:
        vocab_size, hidden = config.vocab_size, config.hidden_size
        before = factory.before_layers(is_tied=config.tie_word_embeddings)
        self.embedding = before.embedding("model.embed_tokens.weight", vocab_size, hidden)
        rotary = factory.rotary(config.rope, config.qk_rope_head_dim)
        self.layers = [
            DeepseekLayer(config, factory, index, params, rotary)
            for index, params in factory.own_layers(config.attention_layers, LatentAttentionParams)
        ]
        after = factory.after_layers()
        self.norm = after.rms_norm("model.norm", hidden, config.rms_norm_eps)
        self.lm_head = after.output_head(self.embedding, vocab_size, is_tied=config.tie_word_embeddings)

    @property
    def attention_layers(self) -> list[LatentAttention]:
        return [layer.self_attention.attention for layer in self.layers]

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Compute hidden states [T, hidden_size]; see `CausalLM.forward`."""
        x = self.embedding(inputs.token_ids) if inputs.hidden is None else inputs.hidden
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
