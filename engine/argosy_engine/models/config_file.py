"""Reads a checkpoint's config.json into its family's config class, or checks one before the checkpoint is fetched.

What describes the quantisation of the weights is read beside it. A config is data: configs that name code to run
(`auto_map`) are always rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from argosy_engine.errors import OTHER_ENGINES, ConfigError
from argosy_engine.model_configs.encoder_config import EncoderConfig
from argosy_engine.model_configs.model_config import ModelConfig, NotOurs, RawConfig, read_json
from argosy_engine.model_configs.model_use import AS_IT_IS, ModelImpl, ModelUse
from argosy_engine.model_configs.quantization_config import parse_quantization
from argosy_engine.model_configs.rope_config import without_overridden_rope
from argosy_engine.model_configs.transformers_config import TransformersConfig, read_hf_config
from argosy_engine.model_configs.wrapper_config import (
    NATIVE_WRAPPERS,
    READ_OF_WRAPPERS,
    is_wrapper,
    native_text_part,
    text_quantization,
    with_outer_fields,
)
from argosy_engine.models import registry
from argosy_engine.models.pooling_file import pooling_spec

SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")


def load_model_config(path: Path, use: ModelUse | None = AS_IT_IS) -> ModelConfig:
    """Read config.json, generation_config.json for the EOS ids, and what says how the model pools.

    Args:
        use: whether it generates or pools. None: how it pools is not asked.

    Raises:
        ConfigError: the architecture, dtype, quantisation or an option is not supported, or values are malformed.
    """
    file = path / "config.json"
    overrides = {} if use is None else use.hf_overrides.of_config()
    raw = _overridden(read_json(file), overrides)
    generation, quantization = (
        read_json(path / name) if (path / name).is_file() else {}
        for name in ("generation_config.json", "hf_quant_config.json")
    )
    try:
        config = parse_config(
            raw, generation, quantization, AS_IT_IS.model_impl if use is None else use.model_impl
        )
    except ConfigError as error:
        raise ConfigError(f"{file}{' with --hf-overrides' if overrides else ''}: {error}") from None
    if use is None:
        return config
    is_wrapped = isinstance(config, TransformersConfig) and config.wrapper is not None
    head = config.head_pooling if isinstance(config, EncoderConfig) else None
    spec = pooling_spec(path, raw, use, is_wrapped=is_wrapped, encoder_head=head)
    config = msgspec.structs.replace(config, pooling=spec)
    if unread := overrides.keys() - raw.read:
        raise ConfigError(
            f"--hf-overrides: {', '.join(sorted(unread))}: what this engine reads of the config of a "
            f"{config.architecture} has no such field, so it would change nothing; leave it out"
        )
    return config


def parse_config(
    raw: RawConfig,
    generation: Mapping[str, Any],
    hf_quant_config: Mapping[str, Any],
    model_impl: ModelImpl = "auto",
) -> ModelConfig:
    """Parse the contents of config.json, generation_config.json and hf_quant_config.json; the last two may be empty.

    Args:
        model_impl: `--model-impl`.

    Raises:
        ConfigError: as `load_model_config`.
    """
    if not isinstance(raw, _WatchedConfig):
        raw = _WatchedConfig(raw)
    _refuse_code(raw)
    architecture = _architecture(raw)
    wrapper: str | None = None
    whole = raw
    if is_wrapper(raw, architecture):
        wrapper = architecture
        raw, architecture = _text_part(raw, architecture, model_impl)
    if raw.get("is_causal", True) is not True:
        raise ConfigError(
            "is_causal: tokens that attend to those after them are not supported; if the model is a causal decoder, "
            f"remove the field from config.json, otherwise serve another model, {OTHER_ENGINES}"
        )
    quantization = parse_quantization(raw, hf_quant_config)
    common = {
        "wrapper": wrapper,
        "architecture": architecture,
        "dtype": _dtype(raw),
        "eos_token_ids": _eos_token_ids(raw, generation),
        "is_matryoshka": raw.get("is_matryoshka") or False,
        "matryoshka_dimensions": raw.get("matryoshka_dimensions") or (),
        "quantization": quantization if wrapper is None else text_quantization(quantization),
    }
    try:
        return _config(raw, architecture, model_impl, common)
    except NotOurs as reason:
        if not registry.falls_back(architecture, model_impl):
            raise
        try:
            if wrapper is not None:  # transformers' model has the wrapper's config
                return parse_config(whole, generation, hf_quant_config, "transformers")
            return _config(raw, architecture, "transformers", common)
        except ConfigError as error:
            raise ConfigError(f"{reason}, and by transformers' code: {error}") from None


def _config(
    raw: _WatchedConfig, architecture: str, model_impl: ModelImpl, common: Mapping[str, Any]
) -> ModelConfig:
    """Read the fields of a family, and add those that all have."""
    config_class = registry.config_class(architecture, model_impl)
    try:
        fields = config_class.fields_of(raw.with_architecture(registry.decoder_of(architecture, model_impl)))
    except (TypeError, ValueError, ArithmeticError, AttributeError, KeyError) as error:
        raise ConfigError(f"malformed: {type(error).__name__}: {error}") from None
    return config_class.of({**fields, **common})


def _text_part(raw: _WatchedConfig, wrapper: str, model_impl: ModelImpl) -> tuple[_WatchedConfig, str]:
    """Return the config from which a wrapper is served, and its architecture: of the text part if it is one of ours."""
    raw.read |= READ_OF_WRAPPERS if "text_config" in raw else raw.keys()
    fields = None
    if wrapper in NATIVE_WRAPPERS and model_impl != "transformers":
        fields = native_text_part(raw, read_hf_config(raw))
    if fields is None:
        if model_impl == "argosy":
            raise ConfigError(
                f"the text part of this {wrapper} is not one of our architectures; leave out --model-impl argosy"
            )
        fields = with_outer_fields(raw)
    text = _WatchedConfig(fields)
    return text, _architecture(text)


def check_config(raw: RawConfig) -> ModelConfig:
    """Check that a model with this config.json can be served, before anything else of it is fetched.

    Returns:
        the config, as far as config.json alone tells it.

    Raises:
        ConfigError: as `load_model_config`.
    """
    return parse_config(raw, {}, {})


def _architecture(raw: RawConfig) -> str:
    architectures = raw.get("architectures") or ["(none)"]
    return str(architectures[0] if isinstance(architectures, list) else architectures)


class _WatchedConfig(dict[str, Any]):
    """A config that remembers which of its fields were asked for."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def with_architecture(self, name: str) -> _WatchedConfig:
        """Return a copy that remembers in the same set."""
        copy = _WatchedConfig({**self, "architectures": [name]})
        copy.read = self.read
        return copy


def _overridden(raw: RawConfig, overrides: Mapping[str, Any]) -> _WatchedConfig:
    """Return config.json with the fields of `--hf-overrides`, of which `architectures` may only choose another head.

    As with vLLM, an object replaces the config's own, but a nested config (`text_config`) is merged with it.

    Raises:
        ConfigError: it chooses another decoder, or a frequency base for a config with several.
    """
    own = {**raw, "architectures": [_architecture(raw)]}
    changed = {**without_overridden_rope(own, overrides), **overrides}
    for name, value in overrides.items():
        is_nested = name.endswith("_config") and name != "quantization_config"
        if is_nested and isinstance(value, dict) and isinstance(own.get(name), dict):
            changed[name] = {**without_overridden_rope(own[name], value), **value}
    before, after = _architecture(own), _architecture(changed)
    if before != after and not registry.is_same_decoder(before, after):
        raise ConfigError(f"--hf-overrides: {after} is not a {before} with another head")
    return _WatchedConfig(changed)


def _refuse_code(raw: RawConfig) -> None:
    if auto_map := raw.get("auto_map"):
        classes = sorted(auto_map) if isinstance(auto_map, dict) else auto_map
        raise ConfigError(
            f"auto_map asks to run Python code that comes with the checkpoint ({classes}); that is never done. If "
            "the architecture is one that is served without it, add --hf-overrides '{\"auto_map\": null}'"
        )


def _dtype(raw: RawConfig) -> str:
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in SUPPORTED_DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported; there is: {', '.join(SUPPORTED_DTYPES)}")
    return dtype


def _eos_token_ids(raw: RawConfig, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the EOS ids of config.json and generation_config.json, in this order and without duplicates."""
    ids: dict[int, None] = {}
    for value in (raw.get("eos_token_id"), generation.get("eos_token_id")):
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int) and not isinstance(token_id, bool):
                ids[token_id] = None
    return tuple(ids)
