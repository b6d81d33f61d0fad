"""ModelConfig: what a checkpoint's config.json says about the computation. No torch, no transformers.

`ModelConfig` holds what every part of the worker reads, whatever the family; a family's own config adds what only its
model reads. `config_file` reads it from a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec import Meta, Struct

from argosy_engine.errors import ConfigError

MAX_CONFIG_BYTES = 16 << 20

Size = Annotated[int, Meta(ge=1, le=1 << 24)]
"""A dimension. The bound is far above any model and keeps products of two of them within 64 bits."""
LayerCount = Annotated[int, Meta(ge=1, le=4096)]
Positive = Annotated[float, Meta(gt=0.0, le=1e12)]
RawConfig = Mapping[str, Any]


class ModelConfig(Struct, frozen=True, kw_only=True):
    """A decoder-only transformer, seen from the worker."""

    refused_dtypes: ClassVar[Mapping[str, str]] = {}
    """dtype -> why the family cannot run in it"""

    architecture: str
    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: LayerCount
    num_attention_heads: Annotated[int, Meta(ge=1, le=4096)]
    num_key_value_heads: Annotated[int, Meta(ge=1, le=4096)]
    head_dim: Annotated[int, Meta(ge=1, le=4096)]
    max_position_embeddings: Size
    """tokens of the longest sequence, RoPE scaling included"""
    tie_word_embeddings: bool
    dtype: Literal["float32", "bfloat16", "float16"]
    """of the checkpoint"""
    eos_token_ids: tuple[int, ...]
    sliding_windows: tuple[Size | None, ...]
    """per layer: a token attends to that many tokens, itself included; None: to all before it"""
    is_matryoshka: bool = False
    """Whether leading elements of its vectors are vectors, too (Matryoshka, arXiv 2205.13147). vLLM's
    name; Hugging Face has none."""
    matryoshka_dimensions: Annotated[tuple[Size, ...], Meta(max_length=256)] = ()
    """How many elements it was trained to keep; empty: any number, if `is_matryoshka`."""

    @property
    def pooled_size(self) -> int:
        """Elements of the model's last hidden state."""
        return self.hidden_size

    @classmethod
    def fields_of(cls, raw: RawConfig) -> dict[str, Any]:
        """The family's reading of config.json: every field but `architecture`, `dtype` and `eos_token_ids`.

        Values are checked against the fields' types and bounds afterwards.

        Raises:
            ConfigError: the config asks for something the model does not compute.
        """
        raise NotImplementedError

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """
        Raises:
            ConfigError: a field is missing, of another type or out of bounds, or fields contradict each other.
        """
        try:
            config = msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(str(error)) from None
        if config.num_attention_heads % config.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {config.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{config.num_key_value_heads}"
            )
        if len(config.sliding_windows) != config.num_hidden_layers:
            raise ConfigError(
                f"{len(config.sliding_windows)} layer_types for {config.num_hidden_layers} layers"
            )
        return config


def read_json(path: Path) -> dict[str, Any]:
    """Reads a small JSON object.

    Raises:
        ConfigError: missing, too large, or not a JSON object.
    """
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value


def layer_count(raw: RawConfig, name: str = "num_hidden_layers") -> int:
    """The number of layers, checked before anything per layer is made.

    Raises:
        ConfigError: missing, not an integer, or out of bounds.
    """
    try:
        return msgspec.convert(raw.get(name), LayerCount)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}") from None


def sliding_windows_of(raw: RawConfig, window: Any, default: list[str]) -> tuple[Any, ...]:
    """Per layer the window, from `layer_types` or, where a config has none, from the family's `default`.

    Raises:
        ConfigError: a layer type other than full or sliding attention, or sliding without a window.
    """
    windows = []
    for kind in raw.get("layer_types") or default:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(
                f"layer type {kind!r} is not supported, only full_attention and sliding_attention"
            )
        if kind == "sliding_attention" and window is None:
            raise ConfigError("layer_types has sliding_attention, but sliding_window is not set")
        windows.append(window if kind == "sliding_attention" else None)
    return tuple(windows)
