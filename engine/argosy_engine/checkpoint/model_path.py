"""Model paths: resolves `builtin://tiny`, `file:///path` or a directory to a local directory.

Must not know how remote models are fetched (`frontend.model_source`): core and workers read directories only.
"""

from __future__ import annotations

from pathlib import Path

from argosy_engine.errors import OTHER_ENGINES, ConfigError
from argosy_engine.model_configs.file_permission import may_not_read
from argosy_engine.model_configs.model_config import read_json
from argosy_fetcher.errors import FetchError
from argosy_fetcher.model_hold import ModelHold, hold_model

_PACKAGE = Path(__file__).resolve().parent.parent
_BUILTIN = {"tiny": "argosy-tiny"}


def resolve_model(source: str) -> Path:
    """Return the model's directory, which has a config.json.

    Raises:
        ConfigError: unknown scheme or built-in name, no directory, or one without a config.json.
    """
    scheme, separator, rest = source.partition("://")
    if separator and scheme == "builtin":
        return _resolve_builtin(rest)
    if separator and scheme != "file":
        raise ConfigError(
            f"model source {source!r} is not on this machine; give a directory, file:// or builtin://tiny"
        )
    path = Path(rest if separator else source).expanduser()
    try:
        has_config = (path / "config.json").is_file()
    except PermissionError:
        raise may_not_read(path, path / "config.json") from None
    if not has_config and (path / "adapter_config.json").is_file():
        raise ConfigError(
            f"model {source!r}: {path} is an adapter{_base_of(path)}, and adapters are not served yet; merge it into "
            f"its base model (peft's merge_and_unload, then save_pretrained) and serve that, {OTHER_ENGINES}"
        )
    if not has_config:
        old_name = (
            "" if "/" in source else ", where old names have an organisation too: openai-community/gpt2"
        )
        what = "has no config.json" if path.is_dir() else "is no directory"
        raise ConfigError(
            f"model {source!r}: {path} {what}; give a directory in Hugging Face's layout, "
            f"or hf://ORG/NAME for a repository of the hub{old_name}"
        )
    return path


def _base_of(adapter: Path) -> str:
    """What an adapter's config says it belongs to, for a message."""
    try:
        base = read_json(adapter / "adapter_config.json").get("base_model_name_or_path")
    except ConfigError:
        return ""
    return f" of {base[:200]}" if isinstance(base, str) and base.isprintable() else ""


def hold_stored_model(path: Path) -> ModelHold | None:
    """Keep a model of the fetcher's store from being removed while its engine runs. None if it is not of a store.

    Raises:
        ConfigError: it is being removed.
    """
    try:
        return hold_model(path)
    except FetchError as error:
        raise ConfigError(str(error)) from None


def _resolve_builtin(name: str) -> Path:
    folder = _BUILTIN.get(name)
    if folder is None:
        raise ConfigError(f"unknown built-in model {name!r}; there is: {', '.join(sorted(_BUILTIN))}")
    installed = _PACKAGE / "builtin" / folder
    checkout = _PACKAGE.parent.parent / "models" / folder
    for path in (installed, checkout):
        if (path / "config.json").is_file():
            return path
    raise ConfigError(f"built-in model {name!r} is missing from this installation")
