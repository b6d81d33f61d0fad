"""LayerNormConfig: the config of decoders that are Llama but for LayerNorms and what these come with: Cohere's blocks
side by side, StarCoder 2's MLP without a gate."""

from __future__ import annotations

from typing import Any, Literal

from argosy_engine.model_configs.llama_config import LlamaConfig
from argosy_engine.model_configs.model_config import NotOurs, RawConfig, layer_count, sliding_windows_of

PlainActivation = Literal["relu", "gelu", "gelu_new", "gelu_pytorch_tanh"]
_PLAIN: tuple[PlainActivation, ...] = ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh")


class LayerNormConfig(LlamaConfig, frozen=True, kw_only=True):
    """`rms_norm_eps` is that of the LayerNorms."""

    has_norm_bias: bool
    is_parallel: bool
    """Whether attention and MLP get the same, and there is one norm before both (Cohere)."""
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
