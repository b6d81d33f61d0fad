"""vLLM's flags whose setting has another place here: `--cudagraph-capture-sizes` is part of `--compilation-config`.

Owns: what the values of these flags become. Must not know: flags without a setting, and how flags are parsed
(`vllm_flags`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from argosy_engine.config import (
    MAX_CAPTURE_SIZES,
    MAX_DEFAULT_SIZE,
    CaptureSize,
    CompilationConfig,
    EngineArgs,
    capture_sizes,
)
from argosy_engine.errors import ConfigError
from argosy_engine.vllm_flags import (
    ANY_WHITESPACE,
    ENGINE_REFUSED,
    ENGINE_WITHOUT_EFFECT,
    LOCAL_SIZE,
    NO_PLUGIN_OF_REASONING,
    ONE_BACKEND,
    VllmFlag,
)

logger = logging.getLogger("argosy.frontend")

_CONFIG, _SIZES, _MAX_SIZE = (
    "structured-outputs-config",
    "cudagraph-capture-sizes",
    "max-cudagraph-capture-size",
)
SETTINGS = (
    VllmFlag(
        _CONFIG, "JSON object; reasoning_parser: as --reasoning-parser; backend: there is one, xgrammar"
    ),
    VllmFlag(_SIZES, "as cudagraph_capture_sizes of --compilation-config", is_list=True),
    VllmFlag(_MAX_SIZE, "the largest of the sizes that are captured by default"),
)
_BACKENDS = ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer")
_REFUSED_KEYS = {
    "disable_any_whitespace": ANY_WHITESPACE,
    "enable_in_reasoning": "a grammar applies to what follows the reasoning; turn reasoning off, such as with "
    "--default-chat-template-kwargs '{\"enable_thinking\": false}'",
    "disable_additional_properties": "it is of vLLM's backend guidance, and there is one backend, xgrammar",
    "reasoning_parser_plugin": NO_PLUGIN_OF_REASONING,
}
_KEYS = ("backend", "reasoning_parser", *_REFUSED_KEYS, "disable_fallback")

_FLAGS_OF_SETTINGS = frozenset(flag.name for flag in SETTINGS)

_Sizes = Annotated[tuple[CaptureSize, ...], Meta(min_length=1, max_length=MAX_CAPTURE_SIZES)]


def engine_args_of(**fields: Any) -> EngineArgs:
    """Build the engine's arguments from a Python caller's, as `EngineArgs.of` does, but with all of vLLM's names.

    Arguments without a setting here are treated as the flags of a command line; notices are logged as warnings.

    Raises:
        ConfigError: an argument is unknown, invalid, or asks for what the engine does not do.
    """
    refused = {flag.name: flag for flag in ENGINE_REFUSED}
    without_effect = {flag.name: flag for flag in ENGINE_WITHOUT_EFFECT}
    own, settings, notices = {}, {}, []
    for field, value in fields.items():
        name = field.replace("_", "-")
        if field in EngineArgs.__struct_fields__:
            own[field] = value
        elif name in _FLAGS_OF_SETTINGS:
            settings[name] = value
        elif (flag := refused.get(name)) is not None:
            neutral: tuple[object, ...] = flag.neutral
            if name == LOCAL_SIZE:
                neutral = (str(fields.get("data_parallel_size", 1)),)
            if value and str(value) not in neutral:
                raise ConfigError(f"{field} is not supported: {flag.reason}")
        elif (flag := without_effect.get(name)) is not None:
            if value:
                notices.append(f"{field} has no effect: {flag.reason}")
        else:
            own[field] = value  # which says that it is unknown
    args, told = with_vllm_settings(EngineArgs.of(**own), settings)
    args.check()
    for notice in (*notices, *told):
        logger.warning("%s", notice)
    return args


def with_vllm_settings(args: EngineArgs, given: Mapping[str, Any]) -> tuple[EngineArgs, list[str]]:
    """Return the engine's arguments with vLLM's settings, and what to tell about values without effect.

    Args:
        given: values by name of the flag, without dashes, as texts of a command line or as a Python caller has them;
            None: not given.

    Raises:
        ConfigError: a value is malformed, or asks for what the engine does not do.
    """
    notices: list[str] = []
    if given.get(_CONFIG) is not None:
        args = _with_structured_outputs(args, given[_CONFIG], notices)
    sizes, largest = given.get(_SIZES), given.get(_MAX_SIZE)
    if sizes is not None:
        sizes = _converted(_SIZES, sizes, _Sizes, "1 to 256 whole numbers from 1 to 16384")
    if largest is not None:
        largest = _converted(_MAX_SIZE, largest, CaptureSize, "a whole number from 1 to 16384")
    if sizes is not None or largest is not None:
        args = replace(args, compilation_config=_with_sizes(args, sizes, largest))
    return args, notices


def _with_structured_outputs(args: EngineArgs, value: Any, notices: list[str]) -> EngineArgs:
    try:
        config = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, Mapping):
        raise ConfigError(f"--{_CONFIG} is not a JSON object: {str(value)[:64]!r}")
    for key, each in config.items():
        if key not in _KEYS:
            raise ConfigError(f"--{_CONFIG}: there is no {key}, but {', '.join(_KEYS)}")
        if each and key in _REFUSED_KEYS:
            raise ConfigError(f"--{_CONFIG}: {key} is not supported: {_REFUSED_KEYS[key]}")
    backend, parser = config.get("backend", "auto"), config.get("reasoning_parser") or None
    if backend not in _BACKENDS:
        raise ConfigError(f"--{_CONFIG}: backend must be one of {', '.join(_BACKENDS)}")
    if backend not in ("auto", "xgrammar"):
        notices.append(f"--{_CONFIG}: backend has no effect: {ONE_BACKEND}")
    if parser is None or args.reasoning_parser is not None:
        return args
    if not isinstance(parser, str):
        raise ConfigError(f"--{_CONFIG}: reasoning_parser must be a name, as --reasoning-parser takes it")
    return replace(args, reasoning_parser=parser)


def _converted(name: str, value: Any, kind: Any, told: str) -> Any:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        raise ConfigError(f"--{name}: must be {told}") from None


def _with_sizes(args: EngineArgs, sizes: Sequence[int] | None, largest: int | None) -> CompilationConfig:
    config = args.compilation_config
    if sizes is None:
        sizes = config.cudagraph_capture_sizes
    elif config.cudagraph_capture_sizes:
        raise ConfigError(
            f"--{_SIZES} and cudagraph_capture_sizes of --compilation-config are the same: give one"
        )
    if largest is None:
        return replace(config, cudagraph_capture_sizes=tuple(sizes))
    if sizes:
        if largest != max(sizes):
            raise ConfigError(
                f"--{_MAX_SIZE} {largest} is not the largest of the sizes to capture, {max(sizes)}: leave it out"
            )
        return replace(config, cudagraph_capture_sizes=tuple(sizes))
    has_mixed = config.cudagraph_mode not in ("NONE", "FULL_DECODE_ONLY")
    if not has_mixed and min(largest, MAX_DEFAULT_SIZE) >= args.max_num_seqs:
        return config
    # Mixed steps have more tokens than there are requests.
    sizes = capture_sizes(largest if has_mixed else args.max_num_seqs, largest=largest)
    if len(sizes) > MAX_CAPTURE_SIZES:
        raise ConfigError(f"--{_MAX_SIZE}: {len(sizes)} sizes are too many; give them, by --{_SIZES}")
    return replace(config, cudagraph_capture_sizes=tuple(sizes))
