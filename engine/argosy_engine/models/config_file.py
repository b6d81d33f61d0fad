"""Reads a checkpoint's config.json into its family's config class, and refuses a model that the engine does not serve,
or not in the layout that is asked for, before its weights are fetched or a replica is started.

What describes the quantisation of the weights is read beside it. A config is data: code that it names (`auto_map`) is
never run. It is ignored where it bears the names of a decoder that we or transformers have; else the config is refused.
Must not know torch: the command line checks models with it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from argosy_engine.checkpoint.model_folder import check_folder, resolve_model
from argosy_engine.errors import OTHER_ENGINES, ConfigError
from argosy_engine.model_configs.experts_config import ExpertsConfig
from argosy_engine.model_configs.model_config import (
    ModelConfig,
    NotOurs,
    RawConfig,
    check_pipeline_parallel,
    check_tensor_parallel,
    read_json,
)
from argosy_engine.model_configs.model_use import AS_IT_IS, ModelImpl, ModelUse
from argosy_engine.model_configs.quantization_formats import parse_quantization
from argosy_engine.model_configs.rope_config import without_overridden_rope
from argosy_engine.model_configs.transformers_config import (
    EncoderConfig,
    TransformersConfig,
    config_class_name,
    read_hf_config,
    without_quantization,
)
from argosy_engine.model_configs.vision_config import (
    SEEING_BY_TRANSFORMERS,
    SEEING_WRAPPERS,
    VisionSpec,
    vision_spec,
)
from argosy_engine.model_configs.weight_schemes import BlockFp8Scheme
from argosy_engine.model_configs.wrapper_config import (
    NATIVE_WRAPPERS,
    READ_OF_WRAPPERS,
    WRAPPER,
    is_wrapper,
    native_text_part,
    text_quantization,
    with_outer_fields,
)
from argosy_engine.models import registry
from argosy_engine.models.pooling_file import pooling_spec
from argosy_fetcher.errors import UnsupportedModel

logger = logging.getLogger("argosy.models")

SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")
REPLACED_CODE = (
    "config.json names code of its own (auto_map), which is never run: argosy or transformers has this architecture, "
    "and its code runs instead"
)
"""What the log says about a config whose code is ignored."""
_OF_POOLING = "that of models that pool often lets tokens attend to later ones"


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
    if spec is not None and config.replaced_code:
        raise ConfigError(f"{file}: {_code_refusal(raw['auto_map'], _OF_POOLING)}")
    config = msgspec.structs.replace(config, pooling=spec)
    if unread := overrides.keys() - raw.read:
        raise ConfigError(
            f"--hf-overrides: {', '.join(sorted(unread))}: what this engine reads of the config of a "
            f"{config.architecture} has no such field, so it would change nothing; leave it out"
        )
    return config


def why_not_ours(path: Path, use: ModelUse) -> str:
    """Return why transformers' code runs a checkpoint, and not ours.

    Args:
        use: as it was loaded.
    """
    raw = _overridden(read_json(path / "config.json"), use.hf_overrides.of_config())
    try:
        parse_config(raw, {}, {}, "argosy")
    except ConfigError as error:
        return error.reason if isinstance(error, NotOurs) else str(error)
    return "--model-impl transformers asks for it"


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
    architecture = _architecture(raw)
    raw, replaced_code = _without_code(raw, architecture)
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
        "replaced_code": replaced_code,
    }
    seeing = SEEING_WRAPPERS if registry.is_native(architecture, model_impl) else SEEING_BY_TRANSFORMERS
    if wrapper in seeing:
        common["vision"] = _vision(whole)
    try:
        return _config(raw, architecture, model_impl, common)
    except NotOurs as reason:
        if not registry.falls_back(architecture, model_impl):
            raise NotOurs(reason.reason, reason.remedy or registry.remedy_of(architecture)) from None
        try:
            if wrapper is not None:  # transformers' model has the wrapper's config
                return parse_config(whole, generation, hf_quant_config, "transformers")
            return _config(raw, architecture, "transformers", common)
        except ConfigError as error:
            raise ConfigError(f"{reason}, and by transformers' code: {error}") from None


def _vision(raw: _WatchedConfig) -> VisionSpec | None:
    """Return how a wrapper sees images; None: its config does not tell, so that texts alone are served."""
    fields = without_quantization(raw)
    try:
        return vision_spec(fields, read_hf_config(fields))
    except ConfigError as error:
        logger.warning("texts alone are served, and no images: %s", error)
        return None


def _config(
    raw: _WatchedConfig, architecture: str, model_impl: ModelImpl, common: Mapping[str, Any]
) -> ModelConfig:
    """Read the fields of a family, and add those that all have."""
    config_class = registry.config_class(architecture, model_impl)
    try:
        fields = config_class.fields_of(raw.with_architecture(registry.decoder_of(architecture, model_impl)))
    except (TypeError, ValueError, ArithmeticError, AttributeError, KeyError) as error:
        raise ConfigError(f"malformed: {type(error).__name__}: {error}") from None
    config = config_class.of({**fields, **common})
    _check_quantised_experts(config)
    return config


def _check_quantised_experts(config: ModelConfig) -> None:
    """
    Raises:
        ConfigError: experts are quantised in a form that no code reads.
    """
    quantization = config.quantization
    if quantization is None:
        return
    if quantization.method == "mxfp4":
        if not config.architecture.startswith("GptOss"):
            raise ConfigError(
                f"the checkpoint is quantised in MXFP4, whose layout is known of gpt-oss, not of "
                f"{config.architecture}; take the unquantised checkpoint or one in FP8, {OTHER_ENGINES}"
            )
        return
    experts: ExpertsConfig | None = getattr(config, "experts", None)  # not every family has them
    if experts is None or experts.names.stacked is None:
        return
    for index, is_sparse in enumerate(experts.is_sparse):
        prefix = f"model.layers.{index}.{experts.mlp}{experts.names.experts}"
        is_quantised = isinstance(quantization.default, BlockFp8Scheme) or any(
            quantization.quantises(prefix + name) for name in experts.names.stacked
        )
        if is_sparse and is_quantised:
            raise ConfigError(
                f"the experts of {config.architecture} are stored stacked, which is not supported in FP8; take a "
                f"checkpoint with unquantised experts, {OTHER_ENGINES}"
            )


def _text_part(raw: _WatchedConfig, wrapper: str, model_impl: ModelImpl) -> tuple[_WatchedConfig, str]:
    """Return the config from which a wrapper is served, and its architecture: of the text part if it is one of ours."""
    raw.read |= READ_OF_WRAPPERS if "text_config" in raw else raw.keys()
    fields = None
    if wrapper in NATIVE_WRAPPERS and model_impl != "transformers":
        fields = native_text_part(raw, read_hf_config(raw))
    if fields is None:
        if model_impl == "argosy":
            raise NotOurs(
                f"the text part of this {wrapper} is not an architecture of argosy's own",
                "leave out --model-impl argosy",
            )
        fields = with_outer_fields(raw)
    text = _WatchedConfig(fields)
    return text, _architecture(text)


def check_config(raw: RawConfig, use: ModelUse = AS_IT_IS) -> ModelConfig:
    """Check that a model with this config.json can be served, before anything else of it is fetched.

    Args:
        use: of it the overrides and whose code runs the model.

    Returns:
        the config, as far as config.json alone tells it.

    Raises:
        ConfigError: as `load_model_config`.
    """
    return parse_config(_overridden(raw, use.hf_overrides.of_config()), {}, {}, use.model_impl)


def check_fetched_config(
    source: str,
    config: dict[str, Any],
    *,
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    expert: bool = False,
    use: ModelUse = AS_IT_IS,
) -> None:
    """Check the content of a config.json, and that the model can be divided among the devices.

    Args:
        source: the model's name, for the message.
        tensor: `--tensor-parallel-size`; the others are those of `--pipeline-parallel-size`, `--data-parallel-size`
            and `--enable-expert-parallel`.
        use: see `check_config`.

    Raises:
        UnsupportedModel: the engine does not serve such a model.
    """
    try:
        model = check_config(config, use)
        check_tensor_parallel(model, tensor, expert, data)
        check_pipeline_parallel(model, pipeline)
    except ConfigError as error:
        raise UnsupportedModel(f"{source}: config.json: {error}") from None


def check_local_model(
    source: str, *, tensor: int = 1, pipeline: int = 1, data: int = 1, expert: bool = False
) -> None:
    """Check a model that is on this machine: its config.json, that it can be divided among the devices, and that
    tokenizer and weights are there and whole.

    Args:
        source: `file://PATH`, a path or `builtin://NAME`.
        tensor, pipeline, data, expert: see `check_fetched_config`.

    Raises:
        UnsupportedModel: the engine could not load it.
    """
    try:
        path = resolve_model(source)
        config = load_model_config(path, None)  # flags, which are not known here, may say how it pools
        check_tensor_parallel(config, tensor, expert, data)
        check_pipeline_parallel(config, pipeline)
        check_folder(path)
    except ConfigError as error:
        raise UnsupportedModel(str(error)) from None


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

    def without(self, name: str) -> _WatchedConfig:
        """As `with_architecture`, without a field."""
        copy = _WatchedConfig({key: value for key, value in self.items() if key != name})
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


def _without_code(raw: _WatchedConfig, architecture: str) -> tuple[_WatchedConfig, bool]:
    """Return the config without the code that it names, and whether it names any.

    Raises:
        ConfigError: nothing tells that our code, or transformers', computes the same.
    """
    auto_map = raw.get("auto_map")
    if not auto_map:
        return raw, False
    if not _is_known_code(auto_map, architecture, raw.get("model_type")):
        reason = f"it is not called like code of argosy or transformers for {architecture}"
        if registry.pooling_task(architecture) is not None:
            reason = _OF_POOLING
        elif architecture.endswith(WRAPPER):
            reason = "that of models for images often computes something else under the same names"
        raise _code_refusal(auto_map, reason)
    return raw.without("auto_map"), True


def _code_refusal(auto_map: Any, reason: str) -> ConfigError:
    classes = sorted(auto_map) if isinstance(auto_map, dict) else auto_map
    return ConfigError(
        f"auto_map asks to run Python code that comes with the checkpoint ({classes}); that is never done, and "
        f"{reason}. If argosy's or transformers' own code is known to compute the same, add "
        "--hf-overrides '{\"auto_map\": null}'"
    )


def _is_known_code(auto_map: Any, architecture: str, model_type: Any) -> bool:
    """Whether a decoder that we or transformers have was published with code of its own before: `model_type` is one
    that belongs to the architecture, and the classes for config and generation are called as in transformers.

    Other heads do not count beside the one that generates. Nor does code for tokenizers and processors: these
    are data (`tokenizer_files`).
    """
    is_known = (
        isinstance(auto_map, Mapping) and isinstance(model_type, str) and registry.generates(architecture)
    )
    if not is_known:
        return False
    config = registry.config_name(architecture)
    if registry.is_native(architecture):
        is_of_type = registry.is_of_type(architecture, model_type)
    else:
        is_of_type = config_class_name(model_type) == config
    classes = {key: str(value).rpartition(".")[2] for key, value in auto_map.items()}
    generating = classes.get("AutoModelForCausalLM")
    if generating is None and any(str(key).startswith("AutoModel") for key in classes):
        return False
    return is_of_type and classes.get("AutoConfig", config) == config and generating in (None, architecture)


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
