"""GPT2Config (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners")."""

from __future__ import annotations

from typing import Any, Literal

from msgspec.structs import replace

from argosy_engine.attention.params import AttentionParams
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_config import ModelConfig, Positive, RawConfig, Size, layer_count


class GPT2Config(ModelConfig, frozen=True, kw_only=True):
    intermediate_size: Size
    activation: Literal["relu", "gelu", "gelu_new", "gelu_pytorch_tanh"]
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
