"""LlamaConfig: the config of Llama and of the decoders that differ from it by what their configs say
(`llama_families`). LayerNormConfig: of those with LayerNorms and what these come with: blocks side by side (Cohere,
StableLM), StarCoder 2's MLP without a gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from msgspec.structs import replace

from argosy_engine.attention.params import AttentionParams
from argosy_engine.model_configs.experts_config import ExpertsConfig
from argosy_engine.model_configs.llama_families import DIFFERENCES, KV_HEADS
from argosy_engine.model_configs.model_config import (
    ModelConfig,
    NotOurs,
    PlainActivation,
    Positive,
    RawConfig,
    Size,
    flag,
    layer_count,
    sliding_windows_of,
    times,
)
from argosy_engine.model_configs.rope_config import QueryTemperature, RopeParameters, shared_rope_fields


class LlamaConfig(ModelConfig, frozen=True, kw_only=True):
    """RMSNorm before each block, RoPE, grouped-query attention, gated SiLU MLP."""

    intermediate_size: Size
    rms_norm_eps: Positive
    rope: RopeParameters
    local_rope: RopeParameters | None = None
    """Of layers with a sliding window, if theirs is another."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers without RoPE (NoPE)."""
    qk_norm: Literal["head", "width", "unweighted", "heads"] | None
    """RMSNorm before RoPE, on each head of q and k (Qwen3) or over all of them at once (OLMo 2), or on each without
    a weight, where there is RoPE (Llama 4, after RoPE, which keeps a head's length). `heads`: a LayerNorm on each, with
    weights for each (Command R+)."""
    norms: Literal["inputs", "outputs", "both"] = "inputs"
    """Where attention and MLP have RMSNorms: on what they get, or on what they give before it is added."""
    attention_bias: bool
    """Bias on the q, k and v projections (Qwen2)."""
    output_bias: bool
    """Bias on the attention's output projection."""
    mlp_bias: bool
    has_fused_qkv: bool = False
    """Whether the checkpoint has q, k and v in one tensor (Phi-3)."""
    has_fused_mlp: bool = False
    """Whether it has gate and up in one."""
    has_sinks: bool = False
    """Whether each head has a score for no token (gpt-oss)."""
    temperature: QueryTemperature | None = None
    has_rotated_temperature: bool = True
    """Whether layers with RoPE have it as well."""
    chunk_size: Size | None = None
    chunked_layers: tuple[int, ...] = ()
    """Layers whose tokens attend to those of their chunk of `chunk_size` tokens."""
    attention_multiplier: Positive | None = None
    """Factor on the scores; None: 1 / sqrt(head_dim)."""
    embedding_multiplier: Positive = 1.0
    residual_multiplier: Positive = 1.0
    """Factor on what attention and MLP add to the residual."""
    logits_scaling: Positive = 1.0
    """Logits are divided by it."""
    experts: ExpertsConfig | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        config = super().of(fields)
        for rope in (config.rope, config.local_rope):
            if rope is not None:
                rope.rotary_dim(config.head_dim)
        return config

    def rotates(self, index: int) -> bool:
        return index not in self.unrotated_layers

    def temperature_of(self, index: int) -> QueryTemperature | None:
        """Return what the queries of a layer grow by."""
        return self.temperature if self.has_rotated_temperature or not self.rotates(index) else None

    @property
    def attention_layers(self) -> tuple[AttentionParams, ...]:
        scale, chunk = self.attention_multiplier or self.head_dim**-0.5, self.chunk_size
        if chunk is not None and chunk >= self.max_position_embeddings:
            chunk = None
        layers = super().attention_layers
        return tuple(
            replace(
                layers[index],
                scale=scale,
                has_sinks=self.has_sinks,
                chunk_size=chunk if index in self.chunked_layers else None,
            )
            for index in self.layers_with_attention
        )

    @property
    def num_routed_experts(self) -> int:
        return 0 if self.experts is None else self.experts.routing.num_experts

    def divided_sizes(self, *, has_whole_experts: bool) -> dict[str, int]:
        sizes = super().divided_sizes(has_whole_experts=has_whole_experts)
        return sizes if self.experts is None else self.experts.divided_sizes(sizes, has_whole_experts)

    @classmethod
    def num_layers(cls, raw: RawConfig) -> int:
        return layer_count(raw)

    @classmethod
    def check_activation(cls, raw: RawConfig) -> None:
        """
        Raises:
            NotOurs: MLPs have another activation than ours compute.
        """
        if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise NotOurs(f"activation {activation!r} is not supported, only silu")

    @classmethod
    def differences(cls, raw: RawConfig) -> dict[str, Any]:
        """Return what is not as in Llama, as `DIFFERENCES` says it."""
        return DIFFERENCES[raw["architectures"][0]](raw)

    @classmethod
    def fields_of(cls, raw: RawConfig) -> dict[str, Any]:
        architecture = raw["architectures"][0]
        cls.check_activation(raw)
        heads = raw.get("num_attention_heads")
        fields = {
            "vocab_size": raw.get("vocab_size"),
            "hidden_size": raw.get("hidden_size"),
            "intermediate_size": raw.get("intermediate_size"),
            "num_hidden_layers": cls.num_layers(raw),
            "num_attention_heads": heads,
            "num_key_value_heads": raw.get("num_key_value_heads", KV_HEADS.get(architecture)) or heads,
            "head_dim": raw.get("head_dim") or (raw["hidden_size"] // heads if heads else None),
            "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
            "tie_word_embeddings": raw.get("tie_word_embeddings", False),
            "qk_norm": None,
            "attention_bias": flag(raw, "attention_bias"),
            "mlp_bias": flag(raw, "mlp_bias"),
            "sliding_windows": (None,) * cls.num_layers(raw),
        }
        fields |= cls.differences(raw)
        fields.setdefault("output_bias", fields["attention_bias"])
        positions = fields.pop("positions", None) or raw.get("max_position_embeddings", 2048)
        if "rope" not in fields:
            default = fields.pop("rope_theta", 10000.0)
            part = fields.pop("partial_rotary_factor", None)
            rope = shared_rope_fields(
                raw, max_position_embeddings=positions, theta=default, is_partial=part is not None
            )
            if part is not None:
                rope.setdefault("partial_rotary_factor", part)
            fields["rope"] = {**rope, "is_interleaved": fields.pop("is_interleaved", False)}
        fields["max_position_embeddings"] = scaled_positions(fields["rope"], positions)
        return fields


def scaled_positions(rope: dict[str, Any], positions: Any) -> Any:
    """Return the context length. Linear and YaRN scaling extend the config's value; Llama 3's already includes it."""
    if rope["kind"] == "linear":
        return int(times(positions, rope["factor"]))
    if rope["kind"] == "yarn":
        return max(positions, int(times(rope["original_max_position_embeddings"], rope["factor"])))
    return positions


_PLAIN: tuple[PlainActivation, ...] = ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh")


class LayerNormConfig(LlamaConfig, frozen=True, kw_only=True):
    """`rms_norm_eps` is that of the LayerNorms."""

    has_norm_bias: bool
    is_parallel: bool
    """Whether attention and MLP get the same, and there is one norm before both (Cohere, some of StableLM)."""
    activation: PlainActivation | None = None
    """Of MLPs without a gate; None: they have one, with SiLU."""

    @classmethod
    def check_activation(cls, raw: RawConfig) -> None:
        if raw["architectures"][0] != "Starcoder2ForCausalLM":
            super().check_activation(raw)
        elif (activation := raw.get("hidden_act", "gelu_pytorch_tanh")) not in _PLAIN:
            raise NotOurs(f"activation {activation!r} is not supported, only {', '.join(_PLAIN)}")

    @classmethod
    def differences(cls, raw: RawConfig) -> dict[str, Any]:
        return {
            "CohereForCausalLM": _cohere,
            "Cohere2ForCausalLM": _cohere2,
            "StableLmForCausalLM": _stablelm,
            "Starcoder2ForCausalLM": _starcoder2,
        }[raw["architectures"][0]](raw)


def _cohere(raw: RawConfig) -> dict[str, Any]:
    scale = raw.get("logit_scale", 0.0625)
    if scale is None or scale <= 0:
        raise NotOurs(f"logit_scale {scale} is not positive")
    return {
        "rms_norm_eps": raw.get("layer_norm_eps", 1e-5),
        "has_norm_bias": False,
        "is_parallel": True,
        "tie_word_embeddings": raw.get("tie_word_embeddings", True),
        "mlp_bias": False,
        "logits_scaling": 1.0 / scale,
        "qk_norm": "heads" if raw.get("use_qk_norm", False) else None,
        "rope_theta": 5e5,
        "is_interleaved": True,
        "positions": raw.get("max_position_embeddings", 8192),
    }


def _cohere2(raw: RawConfig) -> dict[str, Any]:
    every = raw.get("sliding_window_pattern", 4)
    windows = sliding_windows_of(raw, raw.get("sliding_window", 4096), lambda index: (index + 1) % every)
    return {
        **_cohere(raw),
        "qk_norm": None,
        "rope_theta": 1e4,
        "sliding_windows": windows,
        "unrotated_layers": tuple(index for index, each in enumerate(windows) if each is None),
    }


def _stablelm(raw: RawConfig) -> dict[str, Any]:
    if flag(raw, "qk_layernorm"):
        raise NotOurs("qk_layernorm, a LayerNorm for each head, is not supported")
    return {
        "rms_norm_eps": raw.get("layer_norm_eps", 1e-5),
        "has_norm_bias": True,
        "is_parallel": flag(raw, "use_parallel_residual"),
        "attention_bias": flag(raw, "use_qkv_bias"),
        "output_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 0.25,
        "positions": raw.get("max_position_embeddings", 4096),
    }


def _starcoder2(raw: RawConfig) -> dict[str, Any]:
    has_bias = bool(raw.get("use_bias", True))
    return {
        "rms_norm_eps": raw.get("norm_epsilon", 1e-5),
        "has_norm_bias": True,
        "is_parallel": False,
        "activation": raw.get("hidden_act", "gelu_pytorch_tanh"),
        "tie_word_embeddings": raw.get("tie_word_embeddings", True),
        "attention_bias": has_bias,
        "mlp_bias": has_bias,
        "positions": raw.get("max_position_embeddings", 4096),
        "sliding_windows": (raw.get("sliding_window"),) * layer_count(raw),
    }
