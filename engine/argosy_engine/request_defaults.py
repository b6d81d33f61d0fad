"""RequestDefaults: what flags put in place of the model folder's own chat template and sampling parameters.

Owns: the flags' values once files are read, and their bounds. Must not know: how a template is rendered.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_config import read_json
from argosy_protocol.program.flags import InvalidValue, convert

MAX_TEMPLATE_BYTES = 1 << 20
_LITERAL_SIGNS = frozenset("{}\n")
"""Characters of templates that no file name has; vLLM tells them apart in the same way."""
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_NAMES = ("temperature", "top_p", "top_k", "min_p", *_PENALTIES)


class GenerationConfig(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters of `--override-generation-config` and generation_config.json; names are transformers'."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] | None = None


class RequestDefaults(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What requests get that do not say otherwise."""

    chat_template: str | None = None
    """Source of the template; None: the model folder's."""
    chat_template_kwargs: dict[str, Any] | None = None
    trust_request_chat_template: bool = False
    """Whether a request may bring a template of its own."""
    generation_config: str = "auto"
    """`auto`: the model folder's; `vllm`: none; else a directory with a generation_config.json."""
    override_generation_config: GenerationConfig = GenerationConfig()

    def check(self) -> None:
        """
        Raises:
            ConfigError: the directory of the generation config has none.
        """
        if self.generation_config not in ("auto", "vllm"):
            read_json(Path(self.generation_config) / "generation_config.json")

    def setting(self) -> str:
        """Return what of it determines outputs, for the model's fingerprint; empty if nothing is set."""
        fixed = msgspec.structs.replace(self, trust_request_chat_template=False)
        return (
            "" if fixed == RequestDefaults() else msgspec.json.encode(fixed, order="deterministic").decode()
        )


class SamplingDefaults(Struct, frozen=True, kw_only=True):
    """Sampling parameters of requests that give none."""

    values: dict[str, float] = {}
    max_tokens: int | None = None
    """`max_tokens` of chats that give none."""
    max_tokens_limit: int | None = None
    """Upper bound for every request, as vLLM has it for a `max_new_tokens` that does not come from the model."""


def chat_template_source(argument: str) -> str:
    """Return the template that `--chat-template` names or is.

    Raises:
        ConfigError: it is neither a readable file nor a template.
    """
    file = Path(argument)
    try:
        if _LITERAL_SIGNS.isdisjoint(argument):
            with file.open("rb") as opened:
                data = opened.read(MAX_TEMPLATE_BYTES + 1)
            if len(data) > MAX_TEMPLATE_BYTES:
                raise ConfigError(f"--chat-template {argument} is larger than {MAX_TEMPLATE_BYTES} bytes")
            return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {argument} cannot be read ({error}); give a file, or a template in one line"
        ) from None
    return argument


def sampling_defaults(model_path: Path, defaults: RequestDefaults) -> SamplingDefaults:
    """Return the sampling parameters of the generation config, and over them those of the flags.

    A generation config that disables sampling means greedy decoding, to which its penalties still apply.

    Raises:
        ConfigError: the generation config cannot be read, or has a value out of bounds that no flag replaces.
    """
    override = {
        name: value
        for name, value in msgspec.to_builtins(defaults.override_generation_config).items()
        if value is not None
    }
    is_of_model = defaults.generation_config == "auto"
    config = (
        {}
        if defaults.generation_config == "vllm"
        else _read(model_path, defaults.generation_config, override)
    )
    limit = override.get("max_new_tokens", None if is_of_model else config.get("max_new_tokens"))
    merged = {**config, **override}
    return SamplingDefaults(
        values={name: merged[name] for name in _NAMES if merged.get(name) is not None},
        max_tokens=merged.get("max_new_tokens"),
        max_tokens_limit=limit,
    )


def _read(model_path: Path, source: str, override: Container[str]) -> dict[str, Any]:
    """Return the parameters of a generation config, except those in `override`."""
    file = (model_path if source == "auto" else Path(source)) / "generation_config.json"
    given = {} if source == "auto" and not file.is_file() else read_json(file)
    samples = _checked(file, "do_sample", given.get("do_sample"), _Sampling)
    names = _PENALTIES if samples is False else _NAMES
    config = {
        name: _checked(file, name, given.get(name), GenerationConfig)
        for name in (*names, "max_new_tokens")
        if name not in override
    }
    return {"temperature": 0.0, **config} if samples is False else config


class _Sampling(Struct):
    do_sample: bool | None = None


def _checked(file: Path, name: str, value: Any, kind: type[Struct]) -> Any:
    """Return the value of a key as a flag would take it."""
    try:
        return getattr(convert({name: value}, kind), name)
    except InvalidValue as error:
        _, _, told = str(error).partition(": ")
        raise ConfigError(
            f"{file}: {name}: {told or error}; correct it, replace it by --override-generation-config, or leave the "
            "file out by --generation-config vllm"
        ) from None
