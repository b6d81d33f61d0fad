"""LlamaConfig: the config of Llama, Mistral, Qwen2 and Qwen3, which share one decoder."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_config import (
    ModelConfig,
    Positive,
    RawConfig,
    Size,
    layer_count,
    sliding_windows_of,
)
from argosy_engine.model_configs.rope_config import RopeParameters, shared_rope_fields


class LlamaConfig(ModelConfig, frozen=True, kw_only=True):
    """RMSNorm before each block, RoPE, grouped-query attention, gated SiLU MLP."""

    intermediate_size: Size
    rms_norm_eps: Positive
    rope: RopeParameters
    qk_norm: bool
    """RMSNorm on each head of q and k before RoPE (Qwen3)."""
    attention_bias: bool
    """Bias on the q, k and v projections (Qwen2)."""
    output_bias: bool
    """Bias on the attention's output projection."""
    mlp_bias: bool

    @classmethod
    def fields_of(cls, raw: RawConfig) -> dict[str, Any]:
        if raw.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"activation {raw['hidden_act']!r} is not supported, only silu")
        architecture = raw["architectures"][0]
        heads = raw.get("num_attention_heads")
        has_bias = bool(raw.get("attention_bias", architecture == "Qwen2ForCausalLM"))
        positions = raw.get("max_position_embeddings", 2048)
        rope = shared_rope_fields(raw, max_position_embeddings=positions)
        return {
            "vocab_size": raw.get("vocab_size"),
            "hidden_size": raw.get("hidden_size"),
            "intermediate_size": raw.get("intermediate_size"),
            "num_hidden_layers": raw.get("num_hidden_layers"),
            "num_attention_heads": heads,
            "num_key_value_heads": raw.get("num_key_value_heads") or heads,
            "head_dim": raw.get("head_dim") or (raw["hidden_size"] // heads if heads else None),
            "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
            "rope": rope,
            "max_position_embeddings": scaled_positions(rope, positions),
            "tie_word_embeddings": raw.get("tie_word_embeddings", False),
            "qk_norm": architecture.startswith("Qwen3"),
            "attention_bias": has_bias,
            "output_bias": has_bias and architecture != "Qwen2ForCausalLM",
            "mlp_bias": bool(raw.get("mlp_bias", False)),
            "sliding_windows": _sliding_windows(architecture, raw),
        }


def scaled_positions(rope: dict[str, Any], positions: Any) -> Any:
    """Return the context length. Linear and YaRN scaling extend the config's value; Llama 3's already includes it."""
    if rope["kind"] == "linear":
        return int(positions * rope["factor"])
    if rope["kind"] == "yarn":
        return max(positions, int(rope["original_max_position_embeddings"] * rope["factor"]))
    return positions


def _sliding_windows(architecture: str, raw: RawConfig) -> tuple[Any, ...]:
    layers = layer_count(raw)
    window = raw.get("sliding_window", 4096)
    if architecture == "LlamaForCausalLM":
        return (None,) * layers
    if architecture == "MistralForCausalLM":
        return (window,) * layers
    if not raw.get("use_sliding_window"):
        return (None,) * layers
    if architecture == "Qwen3MoeForCausalLM":
        return (window,) * layers
    first = raw.get("max_window_layers", 28)
    kinds = ["sliding_attention" if index >= first else "full_attention" for index in range(layers)]
    return sliding_windows_of(raw, window, kinds)


class Qwen3MoeConfig(LlamaConfig, frozen=True, kw_only=True):
    """Qwen3 with a sparse MLP in every decoder_sparse_step-th layer, except those in mlp_only_layers."""

    num_experts: Annotated[int, Meta(ge=1, le=4096)]
    num_experts_per_tok: Annotated[int, Meta(ge=1, le=4096)]
    moe_intermediate_size: Size
    norm_topk_prob: bool
    decoder_sparse_step: Annotated[int, Meta(ge=1, le=4096)]
    mlp_only_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds num_experts {self.num_experts}"
            )

    @property
    def num_routed_experts(self) -> int:
        return self.num_experts

    def divided_sizes(self, *, has_whole_experts: bool) -> dict[str, int]:
        sizes = super().divided_sizes(has_whole_experts=has_whole_experts)
        if not has_whole_experts:
            sizes["moe_intermediate_size"] = self.moe_intermediate_size
        if all(self.is_sparse(index) for index in range(self.num_hidden_layers)):
            del sizes["intermediate_size"]  # of dense layers
        return sizes

    def is_sparse(self, index: int) -> bool:
        return index not in self.mlp_only_layers and (index + 1) % self.decoder_sparse_step == 0

    @classmethod
    def fields_of(cls, raw: RawConfig) -> dict[str, Any]:
        return {
            **super().fields_of(raw),
            "num_experts": raw.get("num_experts") or raw.get("num_local_experts"),
            "num_experts_per_tok": raw.get("num_experts_per_tok"),
            "moe_intermediate_size": raw.get("moe_intermediate_size"),
            "norm_topk_prob": raw.get("norm_topk_prob", False),
            "decoder_sparse_step": raw.get("decoder_sparse_step", 1),
            "mlp_only_layers": raw.get("mlp_only_layers") or (),
        }
