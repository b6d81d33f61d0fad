"""GemmaConfig: Gemma 2 (arXiv 2408.00118) and the text part of Gemma 3 (arXiv 2503.19786)."""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec.structs import replace

from argosy_engine.attention.params import AttentionParams
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_config import (
    ModelConfig,
    Positive,
    RawConfig,
    Size,
    layer_count,
    sliding_windows_of,
)
from argosy_engine.model_configs.rope_config import RopeParameters, rope_fields, shared_rope_fields


class GemmaConfig(ModelConfig, frozen=True, kw_only=True):
    """A decoder whose layers alternate between local attention (a sliding window) and global attention."""

    refused_dtypes: ClassVar = {"float16": "its activations exceed float16's range"}

    intermediate_size: Size
    rms_norm_eps: Positive
    rope_global: RopeParameters
    rope_local: RopeParameters
    qk_norm: bool
    """RMSNorm on each head of q and k before RoPE (Gemma 3)."""
    attention_bias: bool
    query_pre_attn_scalar: Positive
    """Scores are divided by its square root."""
    attn_logit_softcapping: Positive | None
    final_logit_softcapping: Positive | None

    @property
    def attention_layers(self) -> tuple[AttentionParams, ...]:
        scale, cap = self.query_pre_attn_scalar**-0.5, self.attn_logit_softcapping
        return tuple(replace(layer, scale=scale, logit_softcap=cap) for layer in super().attention_layers)

    @classmethod
    def fields_of(cls, raw: RawConfig) -> dict[str, Any]:
        is_gemma3 = raw["architectures"][0] == "Gemma3ForCausalLM"
        activation = raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"
        if activation != "gelu_pytorch_tanh":
            raise ConfigError(f"activation {activation!r} is not supported, only gelu_pytorch_tanh")
        if raw.get("use_bidirectional_attention"):
            raise ConfigError("bidirectional attention is not supported")
        layers = layer_count(raw)
        # Every sixth layer of Gemma 3 is global, and every second one of Gemma 2.
        period = raw.get("sliding_window_pattern", 6) if is_gemma3 else 2
        positions = raw.get("max_position_embeddings", 8192)
        rope_global, rope_local = _rope(raw, is_gemma3, positions)
        return {
            "vocab_size": raw.get("vocab_size"),
            "hidden_size": raw.get("hidden_size"),
            "intermediate_size": raw.get("intermediate_size"),
            "num_hidden_layers": layers,
            "num_attention_heads": raw.get("num_attention_heads"),
            "num_key_value_heads": raw.get("num_key_value_heads"),
            "head_dim": raw.get("head_dim", 256),
            "max_position_embeddings": positions,
            "tie_word_embeddings": raw.get("tie_word_embeddings", True),
            "sliding_windows": sliding_windows_of(
                raw, raw.get("sliding_window", 4096), lambda index: index % period != period - 1
            ),
            "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
            "rope_global": rope_global,
            "rope_local": rope_local,
            "qk_norm": is_gemma3,
            "attention_bias": raw.get("attention_bias", False),
            "query_pre_attn_scalar": raw.get("query_pre_attn_scalar", 256),
            "attn_logit_softcapping": None if is_gemma3 else raw.get("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": raw.get("final_logit_softcapping", None if is_gemma3 else 30.0),
        }


def _rope(raw: RawConfig, is_gemma3: bool, positions: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the RoPE fields of global and of local layers.

    Newer Gemma 3 configs have one entry per layer type, older ones two bases. Gemma 2 uses the same RoPE in all layers.
    """
    if not is_gemma3:
        both = shared_rope_fields(raw, max_position_embeddings=positions)
        return both, both
    entries = raw.get("rope_parameters") or {}
    if not entries.keys() <= {"full_attention", "sliding_attention"}:
        raise ConfigError(
            "rope_parameters must have RoPE by layer type: full_attention and sliding_attention"
        )
    scaled = {**(entries.get("full_attention") or {}), **(raw.get("rope_scaling") or {})}
    local = entries.get("sliding_attention") or {}
    return (
        rope_fields(scaled, theta=raw.get("rope_theta") or 1e6, max_position_embeddings=positions),
        rope_fields(
            local, theta=raw.get("rope_local_base_freq") or 10000.0, max_position_embeddings=positions
        ),
    )
