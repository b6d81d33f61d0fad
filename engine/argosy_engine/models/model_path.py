"""Model paths: resolves `builtin://tiny`, `file:///path` or a directory to a local directory."""

from __future__ import annotations

from pathlib import Path

from argosy_engine.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent
_BUILTIN = {"tiny": "argosy-tiny"}


def resolve_model(source: str) -> Path:
    """Return the model's directory, which has a config.json.

    Raises:
        ConfigError: unknown scheme or built-in name, or the directory has no config.json.
    """
    scheme, separator, rest = source.partition("://")
    if separator and scheme == "builtin":
        return _resolve_builtin(rest)
    if separator and scheme != "file":
        raise ConfigError(
            f"model source {source!r}: scheme must be builtin:// or file://, or give a directory"
        )
    path = Path(rest if separator else source).expanduser()
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model {source!r}: {path} has no config.json; give a directory in Hugging Face's layout"
        )
    return path


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
