"""ModelConfig: the part of a checkpoint's config.json that shapes the computation. No torch, no transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from argosy_engine.errors import ConfigError

MAX_CONFIG_BYTES = 16 << 20


class ModelConfig(Struct, frozen=True, kw_only=True):
    """Decoder-only transformer with RMSNorm, RoPE, GQA and a gated SiLU MLP (Llama's shape and its kin)."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool
    """Qwen3: RMSNorm on each head of q and k before RoPE"""
    attention_bias: bool
    """bias on the q, k and v projections (Qwen2)"""
    output_bias: bool
    """bias on the attention's output projection"""
    mlp_bias: bool
    dtype: str
    eos_token_ids: tuple[int, ...]


SUPPORTED = {
    "Qwen3ForCausalLM": {"qk_norm": True, "attention_bias": False},
    "Qwen2ForCausalLM": {"qk_norm": False, "attention_bias": True},
    "LlamaForCausalLM": {"qk_norm": False, "attention_bias": False},
}
"""Architectures and the defaults that their configs leave unsaid."""


def read_json(path: Path) -> dict[str, Any]:
    """Reads a small JSON object.

    Raises:
        ConfigError: missing, too large, or not a JSON object.
    """
    try:
        data = path.read_bytes()
        if len(data) > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
        value = json.loads(data)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value


def load_model_config(path: Path) -> ModelConfig:
    """Reads config.json and generation_config.json (for the EOS ids).

    Raises:
        ConfigError: unsupported architecture, activation, RoPE scaling or quantisation; malformed values.
    """
    raw = read_json(path / "config.json")
    architectures = raw.get("architectures") or ["(none)"]
    architecture = architectures[0]
    if architecture not in SUPPORTED:
        raise ConfigError(
            f"architecture {architecture} is not supported; there is: {', '.join(sorted(SUPPORTED))}"
        )
    if raw.get("quantization_config"):
        raise ConfigError(f"{path}: quantised checkpoints are not supported; use the unquantised one")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{path}: activation {raw['hidden_act']!r} is not supported, only silu")
    if raw.get("use_sliding_window"):
        raise ConfigError(f"{path}: sliding-window attention is not supported")
    rope = _rope_parameters(raw, path)
    traits = SUPPORTED[architecture]
    heads = raw.get("num_attention_heads")
    bias = bool(raw.get("attention_bias", traits["attention_bias"]))
    fields = {
        "architecture": architecture,
        "vocab_size": raw.get("vocab_size"),
        "hidden_size": raw.get("hidden_size"),
        "intermediate_size": raw.get("intermediate_size"),
        "num_hidden_layers": raw.get("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or (raw["hidden_size"] // heads if heads else None),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "rope_theta": rope,
        "max_position_embeddings": raw.get("max_position_embeddings", 2048),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "qk_norm": traits["qk_norm"],
        "attention_bias": bias,
        "output_bias": bias and architecture != "Qwen2ForCausalLM",
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "dtype": str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        "eos_token_ids": _eos_token_ids(raw, path),
    }
    try:
        return msgspec.convert(fields, ModelConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path / 'config.json'}: {error}") from None


def _rope_parameters(raw: dict[str, Any], path: Path) -> float:
    """RoPE's base; transformers 5 nests it in `rope_parameters`."""
    nested = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or nested
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise ConfigError(f"{path}: RoPE scaling {kind!r} is not supported")
    return float(nested.get("rope_theta") or raw.get("rope_theta") or 10000.0)


def _eos_token_ids(raw: dict[str, Any], path: Path) -> tuple[int, ...]:
    """End tokens of generation_config.json and config.json together."""
    generation = path / "generation_config.json"
    values = [raw.get("eos_token_id")]
    if generation.is_file():
        values.append(read_json(generation).get("eos_token_id"))
    ids: dict[int, None] = {}
    for value in values:
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int):
                ids[token_id] = None
    return tuple(ids)
