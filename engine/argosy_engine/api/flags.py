"""The engine's flags: a parser made from `EngineArgs`, `--config FILE`, and the order in which values win.

Owns: how flags are spelt and read. Command line over file over default; a file's keys are flag names with `-` or `_`,
and a key that no flag has is an error. Shared by `argosy serve` and `argosy doctor`. No torch, no HTTP.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import msgspec
import yaml

from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError

MAX_CONFIG_FILE_BYTES = 1 << 20
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
"""vLLM's suffixes: small letters are decimal, capitals binary."""
_SIZED = (
    "max_model_len",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "structured_outputs_cache_bytes",
)

_JSON = ("hf_overrides",)
_SHORT = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp"}
"""vLLM's short forms."""


class FlagParser(argparse.ArgumentParser):
    """argparse with `model` in front, the flags of `EngineArgs`, `--config`, and a suggestion for what is unknown."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self.add_argument("model", nargs="?", help="builtin://tiny or a model directory")
        self.add_argument(
            "--config", type=Path, metavar="FILE", help="YAML file of flags; the command line wins over it"
        )
        self._engine_fields = ["model"]

    def add_engine_flags(self) -> None:
        """One flag per field of EngineArgs; booleans get vLLM's --no- form."""
        group = self.add_argument_group("engine")
        defaults = {field.name: field.default for field in msgspec.structs.fields(EngineArgs)}
        for name, annotation in get_type_hints(EngineArgs, include_extras=True).items():
            if name != "model":
                self._engine_fields.append(name)
                _add_flag(group, name, annotation, defaults[name])

    def parse(self, argv: Sequence[str] | None) -> tuple[argparse.Namespace, EngineArgs]:
        """Options and engine arguments; leaves with exit code 2 and one line when something is wrong."""
        # Values preset to None keep argparse from filling in defaults: what is still None was not given.
        blank = {action.dest: None for action in self._actions}
        options, unknown = self.parse_known_args(argv, argparse.Namespace(**blank))
        if unknown:
            self.error(f"unknown argument {unknown[0]}{_suggestion(unknown[0], self._option_string_actions)}")
        try:
            below = self.parse_args(self._file_arguments(options.config) if options.config else [])
        except ConfigError as error:
            self.error(str(error))
        for name, value in vars(below).items():
            if getattr(options, name) is None:
                setattr(options, name, value)
        if options.model is None:
            self.error("give a model: builtin://tiny or a directory, as argument or in --config")
        given = {name: getattr(options, name) for name in self._engine_fields}
        try:
            sized = {name: _size(given[name], name) for name in _SIZED}
            parsed = {name: _json_value(given[name], name) for name in _JSON}
            values = {**given, **sized, **parsed}
            return options, EngineArgs.of(**{k: v for k, v in values.items() if v is not None})
        except ConfigError as error:
            self.error(str(error))

    def error(self, message: str) -> NoReturn:
        """One line instead of argparse's page of usage."""
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` lists the flags\n")

    def _file_arguments(self, path: Path) -> list[str]:
        """The file's values as a command line.

        Raises:
            ConfigError: not a YAML mapping, an unknown key, or a value its flag does not take.
        """
        flags = {action.dest: action for action in self._actions if action.dest not in ("help", "config")}
        arguments: list[str] = []
        for key, value in _read_yaml(path).items():
            name = str(key).replace("-", "_")
            action = flags.get(name)
            if action is None:
                raise ConfigError(f"{path}: unknown key {key!r}{_suggestion(name, flags)}")
            if not action.option_strings:
                arguments.insert(0, str(value))
            elif isinstance(action, argparse.BooleanOptionalAction):
                if not isinstance(value, bool):
                    raise ConfigError(f"{path}: {key} must be true or false")
                arguments.append(action.option_strings[0 if value else 1])
            elif action.nargs == 0:
                if value is True:
                    arguments.append(action.option_strings[0])
            elif value is not None:
                if isinstance(value, dict):
                    value = json.dumps(value, default=str)
                values = [str(item) for item in value] if isinstance(value, list) else [str(value)]
                if isinstance(action, argparse._AppendAction):
                    arguments += [f"{action.option_strings[0]}={item}" for item in values]
                elif action.nargs == "+":
                    arguments += [action.option_strings[0], *values]
                elif len(values) == 1:
                    arguments.append(f"{action.option_strings[0]}={values[0]}")
                else:
                    raise ConfigError(f"{path}: {key} takes one value")
        return arguments


def _read_yaml(path: Path) -> dict[Any, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_CONFIG_FILE_BYTES} bytes")
        value = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a mapping of flags to values")
    return value


def _add_flag(group: argparse._ArgumentGroup, name: str, annotation: Any, default: Any) -> None:
    flag = "--" + name.replace("_", "-")
    names = (flag, _SHORT[name]) if name in _SHORT else (flag,)
    kind, help_text = _unwrap(annotation)
    help_text += "" if default in (None, ()) else f" (default: {default})"
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=help_text)
    elif isinstance(default, tuple):
        group.add_argument(flag, nargs="+", default=None, help=help_text)
    else:
        literals = get_args(kind)
        choices = literals if literals and all(isinstance(a, str) for a in literals) else ()
        metavar = None if choices else name.split("_")[-1].upper()
        group.add_argument(*names, default=None, choices=choices or None, metavar=metavar, help=help_text)


def _unwrap(annotation: Any) -> tuple[Any, str]:
    """The type below Annotated and Optional, and its description."""
    text = ""
    while True:
        if hasattr(annotation, "__metadata__"):
            text = next((meta.description for meta in annotation.__metadata__ if meta.description), text)
            annotation = annotation.__origin__
            continue
        options = [option for option in get_args(annotation) if option is not type(None)]
        if len(options) == 1 and get_origin(annotation) is not tuple:
            annotation = options[0]
            continue
        return annotation, text.replace("%", "%%")


def _size(value: str | None, name: str) -> str | int | None:
    """`4k`, `2.5M`, `16G` as numbers; anything else as it is, for `EngineArgs` to judge."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,6})?)([kmgKMG])", value or "")
    if found is None:
        return value
    number = float(found[1]) * _SIZES[found[2]]
    if not number.is_integer():
        raise ConfigError(f"--{name.replace('_', '-')} {value} is not a whole number")
    return int(number)


def _json_value(value: str | None, name: str) -> Any:
    if value is None:
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ConfigError(f"--{name.replace('_', '-')} is not JSON: {value[:64]!r}") from None


def _suggestion(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word.split("=")[0], list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
