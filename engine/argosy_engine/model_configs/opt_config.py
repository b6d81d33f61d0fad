"""OPTConfig (arXiv 2205.01068)."""

from __future__ import annotations

from typing import Any, Literal

from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_config import ModelConfig, RawConfig, Size, layer_count


class OPTConfig(ModelConfig, frozen=True, kw_only=True):
    intermediate_size: Size
    activation: Literal["relu", "gelu", "gelu_new", "gelu_pytorch_tanh"]
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
