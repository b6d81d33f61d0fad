"""The configs of GPT-2 and OPT."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from argosy_engine.attention.params import AttentionParams
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_config import (
    ModelConfig,
    PlainActivation,
    Positive,
    RawConfig,
    Size,
    layer_count,
)


class GPT2Config(ModelConfig, frozen=True, kw_only=True):
    """Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"."""

    """Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"."""

    intermediate_size: Size
    activation: PlainActivation
    layer_norm_eps: Positive
    scales_attention: bool
    """Whether scores are divided by sqrt(head_dim)."""
    scales_attention_by_layer: bool
    """Whether scores are also divided by the layer's number, counted from 1."""

    @property
    def attention_layers(self) -> tuple[AttentionParams, ...]:
        scale = self.head_dim**-0.5 if self.scales_attention else 1.0
        return tuple(
            replace(layer, scale=scale / (index + 1) if self.scales_attention_by_layer else scale)
            for index, layer in enumerate(super().attention_layers)
        )

    @classmethod
    def fields_of(cls, raw: RawConfig) -> dict[str, Any]:
        if raw.get("add_cross_attention"):
            raise ConfigError("cross-attention is not supported")
        layers, hidden, heads = layer_count(raw, "n_layer"), raw["n_embd"], raw["n_head"]
        return {
            "vocab_size": raw.get("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": raw.get("n_inner") or 4 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": hidden // heads,
            "max_position_embeddings": raw.get("n_positions", 1024),
            "tie_word_embeddings": raw.get("tie_word_embeddings", True),
            "sliding_windows": (None,) * layers,
            "activation": raw.get("activation_function", "gelu_new"),
            "layer_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
            "scales_attention": raw.get("scale_attn_weights", True),
            "scales_attention_by_layer": raw.get("scale_attn_by_inverse_layer_idx", False),
        }


class OPTConfig(ModelConfig, frozen=True, kw_only=True):
    """arXiv 2205.01068."""

    """arXiv 2205.01068."""

    intermediate_size: Size
    activation: PlainActivation
    embedding_size: Size
    """Width of the token embedding. Where it differs from hidden_size (OPT-350m), it is projected there and back."""
    norm_before: bool
    """Whether LayerNorm comes before each block, rather than after it (OPT-350m)."""
    has_final_norm: bool
    has_bias: bool

    @property
    def pooled_size(self) -> int:
        return self.embedding_size

    @classmethod
    def fields_of(cls, raw: RawConfig) -> dict[str, Any]:
        if not raw.get("layer_norm_elementwise_affine", True):
            raise ConfigError("layer norms without weights are not supported")
        layers, hidden, heads = layer_count(raw), raw["hidden_size"], raw["num_attention_heads"]
        norm_before = raw.get("do_layer_norm_before", True)
        return {
            "vocab_size": raw.get("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": raw.get("ffn_dim"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": hidden // heads,
            "max_position_embeddings": raw.get("max_position_embeddings", 2048),
            "tie_word_embeddings": raw.get("tie_word_embeddings", True),
            "sliding_windows": (None,) * layers,
            "activation": raw.get("activation_function", "relu"),
            "embedding_size": raw.get("word_embed_proj_dim") or hidden,
            "norm_before": norm_before,
            "has_final_norm": norm_before and not raw.get("_remove_final_layer_norm", False),
            "has_bias": raw.get("enable_bias", True),
        }
