"""Command-line flags generated from configuration classes, with `--config FILE`.

A configuration class is a msgspec struct or a dataclass. Each of its fields is one flag: type, default and bounds come
from the field, the help text from `msgspec.Meta(description=...)`, and the rest (group, spelling) from `Flag`. A field
that is itself a configuration class contributes its own fields, unless its flag takes JSON. Descriptions name
environment variables, and defaults that depend on the device, by hand.

Order of sources: command line, environment, file, default. The keys of a file are flag names, with `-` or `_`; a key
without a flag is an error. A flag that takes JSON may be given by keys, as vLLM takes them:
`--override-generation-config.temperature 0.5` for `{"temperature": 0.5}`. All keys of a flag become one JSON object,
which wins over an object given as a whole.

At the end are ranges that flags share with another user of them: with the custom resource, so that a manifest is
accepted only with values that the engine accepts, too; and the origins that `--allowed-origins` takes.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

MAX_CONFIG_FILE_BYTES = 1 << 20
_SIZES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
"""vLLM's suffixes: small letters are decimal, capitals binary."""
_MIN_LIKENESS = 0.75
"""Above it a flag is suggested for an unknown one: one of four letters may be wrong."""

_OTHER_FORM = "matching regex"
"""Part of msgspec's message about a text that does not match the pattern of its field."""
_OTHER_WORD = "Invalid enum value"
"""Its beginning about a text that is none of the words, of a field that takes words or something else."""
_UNKNOWN_KEY = "Object contains unknown field"
_MAX_SHOWN_CHARS = 64

T = TypeVar("T")


class InvalidValue(Exception):
    """A value that its field does not take; the message names the flag."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """Properties of a flag beyond type, default and description. Add it to the field's `Annotated`."""

    name: str = ""
    """Spelling without `--`; by default the field's name without its unit (`_s`)."""
    group: str = ""
    """Title of its group in the help text."""
    metavar: str = ""
    short: str = ""
    """Short form, such as `-tp`."""
    is_repeatable: bool = False
    """Whether a tuple's values are given by repeating the flag, instead of all behind one flag."""
    takes_several: bool = False
    """Whether a repeatable flag takes several values each time, as vLLM's `--api-key`. The parsed options then have a
    list of them for each time."""
    is_size: bool = False
    """Whether it accepts `4k`, `2.5M`, `16G` as well as numbers."""
    is_json: bool = False
    """Whether its value is JSON: an object, also if its type is a configuration class, or a list."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Other spellings of values, with the values that they stand for."""
    environment: str = ""
    """Environment variable with the value, used if the command line does not give one."""
    is_hidden: bool = False
    """Whether the field has no flag, because it is set by the environment or by other means."""
    form: str = ""
    """The form of a text in words, which the message about another one has instead of the pattern."""
    remedies: tuple[tuple[str, str], ...] = ()
    """Values that users may expect and that are refused, with what to give instead."""
    other_keys: str = ""
    """What to do about keys that a JSON object does not have; the end of the message about one."""
    default: str = ""
    """Description of the default, if the field's default value does not explain itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One field of a configuration class, as a flag."""

    path: tuple[str, ...]
    """Names of the fields that lead to it, its own included."""
    kind: Any
    """Its type, without annotations and `None`."""
    default: Any
    meta: tuple[msgspec.Meta, ...]
    flag: Flag

    @property
    def name(self) -> str:
        """The flag without `--`."""
        return self.flag.name or self.path[-1].removesuffix("_s").replace("_", "-")

    @property
    def description(self) -> str:
        return next((meta.description for meta in self.meta if meta.description), "")

    @property
    def dest(self) -> str:
        """Name of the value in argparse's namespace."""
        return ".".join(self.path)

    def bound(self, name: str) -> Any:
        """A bound of the value (`ge`, `gt`, `le` or `lt` of its annotation), or None."""
        return next((found for meta in self.meta if (found := getattr(meta, name)) is not None), None)

    def requirement(self) -> str:
        """The type and bounds of a value in words; empty if there is no simple description."""
        if choices := _choices(self.kind):
            return "one of " + ", ".join(choices)
        noun = {int: "a whole number", float: "a number"}.get(self.kind)
        if noun is None:
            return ""
        low, above = self.bound("ge"), self.bound("gt")
        high, below = self.bound("le"), self.bound("lt")
        if low is not None and high is not None:
            return f"{noun} from {_plain(low)} to {_plain(high)}"
        limits = [
            f"{word} {_plain(value)}"
            for word, value in (("at least", low), ("above", above), ("at most", high), ("below", below))
            if value is not None
        ]
        return " ".join([noun, " and ".join(limits)]).strip()


def fields_of(cls: type, path: tuple[str, ...] = ()) -> Iterator[Field]:
    """Iterate over the fields of a configuration class. Those of a nested class take its place, unless it is JSON."""
    defaults = _defaults(cls)
    for name, annotation in _annotations(cls).items():
        if name not in defaults:
            continue
        kind, metadata = _unwrap(annotation)
        flag = next((item for item in metadata if isinstance(item, Flag)), Flag())
        if _is_config(kind) and _is_config(type(defaults[name])) and not flag.is_json:
            yield from fields_of(kind, (*path, name))
            continue
        meta = tuple(item for item in metadata if isinstance(item, msgspec.Meta))
        yield Field((*path, name), kind, defaults[name], meta, flag)


class FlagParser(argparse.ArgumentParser):
    """argparse with the flags of configuration classes, `--config FILE`, and suggestions for unknown flags."""

    def __init__(self, prog: str, description: str, epilog: str | None = None) -> None:
        super().__init__(prog=prog, description=description, epilog=epilog, allow_abbrev=False)
        self.add_argument(
            "--config", type=Path, metavar="FILE", help="YAML file of flags; the command line wins over it"
        )
        self._configs: dict[type, list[Field]] = {}

    def add_config(self, cls: type, group: str = "options") -> None:
        """Add one flag per field of a configuration class; booleans also get a `--no-` form, as in vLLM.

        Args:
            group: title of the group of fields that name none.
        """
        groups: dict[str, argparse._ArgumentGroup] = {}
        self._configs[cls] = list(fields_of(cls))
        for field in self._configs[cls]:
            if field.flag.is_hidden:
                continue
            title = field.flag.group or group
            if title not in groups:
                groups[title] = self.add_argument_group(title)
            _add_flag(groups[title], field)

    @property
    def flag_names(self) -> frozenset[str]:
        """Every flag of the program, with its dashes."""
        return frozenset(self._option_string_actions)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse the command line and the file that it names. A field's value is None if neither gives one.

        Flags may be spelt with `_` for `-`, and JSON be given by keys (`with_joined_keys`), as in vLLM. An error ends
        the process with exit code 2 and one line.
        """
        blank = {action.dest: None for action in self._actions}  # keeps argparse from filling in defaults
        given = [self._with_dashes(word) for word in (sys.argv[1:] if args is None else args)]
        try:
            given = with_joined_keys(given, self._flags_with_keys())
        except MalformedKey as error:
            self.error(str(error))
        options, unknown = self.parse_known_args(given, argparse.Namespace(**blank))
        if unknown:
            self.error(f"unknown argument {unknown[0]}{suggestion(unknown[0], self._option_string_actions)}")
        path = options.config
        try:
            below, _ = self.parse_known_args(self._file_arguments(path) if path else [])
        except InvalidValue as error:
            self.error(str(error))
        options.from_file = set()
        for name, value in vars(below).items():
            if getattr(options, name) is None:
                setattr(options, name, value)
                options.from_file.add(name)
        return options

    def build(
        self,
        cls: type[T],
        options: argparse.Namespace,
        environment: Mapping[str, str] | None = None,
        *,
        dec_hook: Callable[[type, Any], Any] | None = None,
        **others: Any,
    ) -> T:
        """Build a configuration from parsed options and the environment.

        Args:
            options: the result of `parse_args`.
            environment: environment variables; None for none.
            dec_hook: msgspec's hook for types that msgspec does not know.
            others: values of further fields.

        Raises:
            InvalidValue: a value is of the wrong type or out of bounds; the message names its flag.
        """
        values: dict[str, Any] = dict(others)
        for field in self._configs[cls]:
            value: Any = getattr(options, field.dest, None)
            if value is None or field.dest in options.from_file:
                text = (environment or {}).get(field.flag.environment)
                if text:
                    value = (
                        [text] if field.flag.is_repeatable else text.encode() if field.kind is bytes else text
                    )
            if value is None:
                continue
            if field.flag.takes_several:
                value = [each for given in value for each in ([given] if isinstance(given, str) else given)]
            if field.flag.is_json:
                value = _json_value(value, field.name)
            else:
                value = _number_of(value, field)
            inner = values
            for name in field.path[:-1]:
                inner = inner.setdefault(name, {})
            inner[field.path[-1]] = value
        return convert(values, cls, dec_hook)

    def error(self, message: str) -> NoReturn:
        """Print one line instead of argparse's usage, and exit."""
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` lists the flags\n")

    def _flags_with_keys(self) -> dict[str, str]:
        """Spellings of the flags that take JSON, and of those that are only known by name, which may -> long form."""
        texts = {
            field.dest for fields in self._configs.values() for field in fields if not field.flag.is_json
        } | {"config", "help"}
        return {
            name: action.option_strings[0]
            for name, action in self._option_string_actions.items()
            if action.dest not in texts and action.nargs is None
        }

    def _with_dashes(self, word: str) -> str:
        """Return a word of the command line, in which a known flag is spelt with dashes."""
        name, equals, value = word.partition("=")
        dashed = name.replace("_", "-")
        is_flag = word.startswith("--") and dashed in self._option_string_actions
        return f"{dashed}{equals}{value}" if is_flag else word

    def _file_arguments(self, path: Path) -> list[str]:
        """Convert the file's values to command-line arguments.

        Raises:
            InvalidValue: not a YAML mapping, an unknown key, or a value that its flag does not take.
        """
        flags = self._flags()
        json_dests = {
            field.dest for fields in self._configs.values() for field in fields if field.flag.is_json
        }
        arguments: list[str] = []
        for key, value in _read_yaml(path).items():
            name = str(key).replace("_", "-")
            action = flags.get(name)
            if action is None:
                known = [flag.replace("-", "_") for flag in flags] if "_" in str(key) else flags
                raise InvalidValue(f"{path}: unknown key {key!r}{suggestion(str(key), known)}")
            if not action.option_strings:
                arguments.insert(0, str(value))
            elif isinstance(action, argparse.BooleanOptionalAction):
                if not isinstance(value, bool):
                    raise InvalidValue(f"{path}: {key} must be true or false")
                arguments.append(action.option_strings[0 if value else 1])
            elif action.nargs == 0:
                if value is True:
                    arguments.append(action.option_strings[0])
            elif value is not None:
                if isinstance(value, dict) or (isinstance(value, list) and action.dest in json_dests):
                    value = json.dumps(value, default=str)
                values = [str(item) for item in value] if isinstance(value, list) else [str(value)]
                if isinstance(action, argparse._AppendAction):
                    arguments += [f"{action.option_strings[0]}={item}" for item in values]
                elif action.nargs == "+":
                    arguments += [action.option_strings[0], *values]
                elif len(values) == 1:
                    arguments.append(f"{action.option_strings[0]}={values[0]}")
                else:
                    raise InvalidValue(f"{path}: {key} takes one value")
        return arguments

    def _flags(self) -> dict[str, argparse.Action]:
        """Name of each flag (long form without leading dashes) and positional argument -> its action."""
        flags = {}
        for action in self._actions:
            if action.dest not in ("help", "config"):
                name = action.option_strings[0] if action.option_strings else action.dest
                flags[name.lstrip("-").replace("_", "-")] = action
        return flags


def decode_path(kind: type, value: Any) -> Any:
    """Decode a `Path`, which msgspec does not know: a `dec_hook`.

    Raises:
        NotImplementedError: it is of another type.
    """
    if issubclass(kind, Path):
        return kind(value)
    raise NotImplementedError(kind)


def convert(values: Mapping[str, Any], cls: type[T], dec_hook: Callable[[type, Any], Any] | None = None) -> T:
    """Build a configuration from values by field name, nested like the classes; numbers may be text.

    Raises:
        InvalidValue: a value is of the wrong type or out of bounds.
    """
    try:
        return msgspec.convert(values, cls, strict=False, dec_hook=dec_hook)
    except msgspec.ValidationError as error:
        raise InvalidValue(_explained(str(error), cls, values)) from None


def convert_arguments(values: Mapping[str, Any], cls: type[T]) -> T:
    """Build a configuration from a Python caller's keyword arguments, which take what the flags take: `64M` as well.

    Raises:
        InvalidValue: an argument is unknown, of the wrong type or out of bounds.
    """
    fields = {field.path[0]: field for field in fields_of(cls)}
    for name in values:
        if name not in fields:
            raise InvalidValue(f"there is no argument {name}{suggestion(name, fields)}")
    texts: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, str):
            field = fields[name]
            value = dict(field.flag.aliases).get(value, value)
            texts[name] = _number_of(value, field)
    return convert({**values, **texts}, cls)


def _explained(message: str, cls: type, values: Mapping[str, Any]) -> str:
    """Rephrase msgspec's message with the flag's name instead of the path, the bounds in words, and the value.

    A value within a JSON object has its key behind the flag.
    """
    reason, _, path = message.partition(" - at `$.")
    names = tuple(re.split(r"[.\[]", path.rstrip("`")))
    field = _field_at(cls, names)
    if field is None:
        return f"{reason} ({path.rstrip('`')})" if path else reason
    inner = names[len(field.path) :]
    member = _field_at(field.kind, inner) if _is_config(field.kind) else None
    value = _value_at(values, names)
    if member is None:
        return f"--{field.name}: {_told(field, reason, value, is_exact=not inner)}"
    told = _told(member, reason, value, is_exact=inner == member.path)
    return f"--{field.name}: {'.'.join(member.path)}: {told}"


def _field_at(cls: type, names: tuple[str, ...]) -> Field | None:
    """The field that a path of names leads to or into, or None."""
    return next((field for field in fields_of(cls) if names[: len(field.path)] == field.path), None)


def _value_at(values: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The value that a path of names leads to; None if it leads into a list or a configuration class."""
    value: Any = values
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _told(field: Field, reason: str, value: Any, *, is_exact: bool) -> str:
    """What is wrong, in words. Of the values, those of numbers and words are shown, which are no secrets."""
    shown = ""
    if isinstance(value, str | int | float):
        shown = f", not {(value[:_MAX_SHOWN_CHARS] if isinstance(value, str) else value)!r}"
    if field.flag.form and _OTHER_FORM in reason:
        return field.flag.form
    if field.flag.form and reason.startswith(_OTHER_WORD):
        return f"{field.flag.form}{shown}"
    if reason.startswith(_UNKNOWN_KEY) and is_exact and _is_config(field.kind):
        others = f"; {field.flag.other_keys}" if field.flag.other_keys else ""
        return f"{reason}; there are {', '.join(_defaults(field.kind))}{others}"
    if is_exact and isinstance(value, str) and (remedy := dict(field.flag.remedies).get(value)):
        return f"{value} is not supported: {remedy}"
    requirement = field.requirement() if is_exact else ""
    return f"must be {requirement}{shown}" if requirement else reason


def _is_config(kind: Any) -> bool:
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct))


@functools.cache
def _annotations(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


@functools.cache
def _struct_fields(cls: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(cls)


def _defaults(cls: Any) -> dict[str, Any]:
    """Field names and defaults; None where a value is required."""
    is_struct = issubclass(cls, msgspec.Struct)
    listed: Sequence[Any] = _struct_fields(cls) if is_struct else dataclasses.fields(cls)
    return {field.name: _default(field) for field in listed}


def _default(field: Any) -> Any:
    missing = (dataclasses.MISSING, msgspec.NODEFAULT)
    if not any(field.default_factory is one for one in missing):
        return field.default_factory()
    return None if any(field.default is one for one in missing) else field.default


def _unwrap(annotation: Any) -> tuple[Any, list[Any]]:
    """Strip Annotated and Optional from a type; return it with the metadata of all annotations."""
    metadata: list[Any] = []
    while True:
        if get_origin(annotation) is Annotated:
            metadata += annotation.__metadata__
            annotation = annotation.__origin__
            continue
        options = [option for option in get_args(annotation) if option is not type(None)]
        if len(options) == 1 and get_origin(annotation) is not tuple:
            annotation = options[0]
            continue
        return annotation, metadata


def _choices(kind: Any) -> tuple[str, ...]:
    literals = get_args(kind)
    return literals if literals and all(isinstance(item, str) for item in literals) else ()


def add_switch(group: argparse._ArgumentGroup, name: str, help_text: str, dest: str, short: str = "") -> None:
    """Add `--NAME` and `--no-NAME`; only the former if the name begins with `no-`. Without either the value is None."""
    names = [f"--{name}", *([short] if short else [])]
    if name.startswith("no-"):
        group.add_argument(*names, action="store_const", const=True, help=help_text, dest=dest)
    else:
        action = argparse.BooleanOptionalAction
        group.add_argument(*names, action=action, default=None, help=help_text, dest=dest)


def _add_flag(group: argparse._ArgumentGroup, field: Field) -> None:
    flag, help_text = field.flag, field.description.replace("%", "%%")
    names = [f"--{field.name}", *([flag.short] if flag.short else [])]
    default = flag.default or _shown_default(field.default)
    if default:
        help_text += f" (default: {default})".replace("%", "%%")
    choices = _choices(field.kind)
    metavar = flag.metavar or (None if choices else field.name.split("-")[-1].upper())
    if field.kind is bool:
        add_switch(group, field.name, help_text, field.dest, flag.short)
    elif flag.is_repeatable:
        group.add_argument(
            *names,
            action="append",
            nargs="+" if flag.takes_several else None,
            metavar=metavar,
            help=help_text,
            dest=field.dest,
        )
    elif isinstance(field.default, tuple) and not flag.is_json:
        group.add_argument(*names, nargs="+", metavar=metavar, help=help_text, dest=field.dest)
    else:
        group.add_argument(
            *names,
            type=lambda text: _word(flag, text),
            choices=choices or None,
            metavar=metavar,
            help=help_text,
            dest=field.dest,
        )


def _word(flag: Flag, text: str) -> str:
    """The value that a text stands for; argparse prints why one is refused."""
    remedy = dict(flag.remedies).get(text)
    if remedy is not None:
        raise argparse.ArgumentTypeError(f"{text} is not supported: {remedy}")
    return dict(flag.aliases).get(text, text)


def _shown_default(value: Any) -> str:
    """The default as shown in the help; empty if there is nothing to say."""
    if isinstance(value, bool):
        return "on" if value else ""
    return "" if value in (None, (), "", b"") or _is_config(type(value)) else _plain(value)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)


class MalformedKey(Exception):
    """A key without a value, or below a value; the message names the flag."""


def with_joined_keys(words: Sequence[str], flags: Mapping[str, str]) -> list[str]:
    """Return the words of a command line, those with keys as JSON at its end.

    A key that ends with `+` takes a list, separated by commas. A value is JSON if it can be read so, else text.

    Args:
        flags: spellings of those that take keys, with their dashes -> the name to use.

    Raises:
        MalformedKey: a key has no value, or its path leads through a value.
    """
    left: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(words)
    for word in rest:
        if word == "--":
            left += [word, *rest]
            break
        name, equals, value = word.partition("=")
        flag, dot, path = name.partition(".")
        known = flags.get(flag.replace("_", "-"))
        if not dot or known is None:
            left.append(word)
            continue
        if not equals:
            value = next(rest, "")
            if not value:
                raise MalformedKey(f"{name} needs a value")
        read = value.split(",") if path.endswith("+") else _key_value(value)
        _put_key(objects.setdefault(known, {}), path.removesuffix("+").split("."), read, name)
    for flag, keys in objects.items():
        left += [flag, json.dumps(keys)]
    return left


def _key_value(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _put_key(keys: dict[str, Any], path: Sequence[str], value: Any, name: str) -> None:
    *outer, last = path
    for part in outer:
        keys = keys.setdefault(part, {})
        if not isinstance(keys, dict):
            raise MalformedKey(f"{name}: {part} has a value already")
    if not last:
        raise MalformedKey(f"{name} needs a key behind its dot")
    keys[last] = value


def _read_yaml(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        if path.stat().st_size > MAX_CONFIG_FILE_BYTES:
            raise InvalidValue(f"{path} is larger than {MAX_CONFIG_FILE_BYTES} bytes")
        value = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise InvalidValue(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        text = str(error).replace('in "<unicode string>", line', "at line")  # PyYAML's name of a text
        raise InvalidValue(f"cannot read {path}: {' '.join(text.split())}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidValue(f"{path} is not a mapping of flags to values")
    return value


def _number_of(value: Any, field: Field) -> Any:
    """Convert the text of a number or size as its field takes it; leave anything else to the field's type."""
    if field.flag.is_size:
        return _size(value, field.name)
    return _number(value, field.kind) if field.kind in (int, float) else value


def _size(value: str, name: str) -> str | int:
    """Convert `4k`, `2.5M`, `16G` to numbers; leave anything else to be checked by the field's type."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,6})?)([kmgKMG])", value)
    if found is None:
        return value
    number = float(found[1]) * _SIZES[found[2]]
    if not number.is_integer():
        raise InvalidValue(f"--{name} {value} is not a whole number")
    return int(number)


def _number(value: Any, kind: type) -> Any:
    """Convert a text as `float` and `int` do, which take `.9` as well; leave anything else to the field's type."""
    if not isinstance(value, str) or "_" in value:
        return value
    try:
        number = kind(value)
    except ValueError:
        return value
    return number if math.isfinite(number) else value


def _json_value(value: str, name: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        why = f"{error.msg} at character {error.pos + 1}"
    except (ValueError, RecursionError):
        why = "a number is too long, or it is nested too deeply"
    raise InvalidValue(f"--{name} is not JSON: {value[:64]!r} ({why})")


def suggestion(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown flag or key: the known one that is meant, if one is close; else empty.

    Leading dashes do not count, because they would make short flags alike that have nothing in common.
    """
    asked = _words(word.split("=")[0])
    rated = [(_likeness(asked, _words(name)), name) for name in known]
    likeness, closest = max(rated, default=(0.0, ""), key=lambda pair: pair[0])
    return f"; did you mean {closest}?" if likeness >= _MIN_LIKENESS else ""


def _words(name: str) -> list[str]:
    return name.lstrip("-").replace("_", "-").split("-")


def _likeness(asked: list[str], known: list[str]) -> float:
    """How alike two names are, from 0 to 1. A name that leaves out one word but the first is close enough."""
    ratio = difflib.SequenceMatcher(None, "-".join(known), "-".join(asked)).ratio()
    left_out = (known[:index] + known[index + 1 :] for index in range(1, len(known)))
    return max(ratio, _MIN_LIKENESS) if asked in left_out else ratio


_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@,A-Z\s\x7f-\U0010ffff]+")
_OWN_PORT = re.compile(r"http://.*:80|https://.*:443")
"""Browsers leave out the scheme's own port, and write names in other alphabets as `xn--...`."""


def origins_problem(origins: Iterable[str]) -> str:
    """Say which of the origins no browser would send, or return an empty string."""
    for origin in origins:
        if _ORIGIN.fullmatch(origin) is None or _OWN_PORT.fullmatch(origin) is not None:
            return (
                f"--allowed-origins: {origin[:128]!r} is no origin as browsers send it: write "
                "scheme://host or scheme://host:port in small letters, without a path and without the port 80 of http "
                'or 443 of https, or "*"'
            )
    return ""


MaxModelLen = Annotated[int, Meta(ge=16, le=1 << 22)]
"""In tokens. A chat template alone takes more than a few; four million exceeds every model."""
BlockSize = Annotated[int, Meta(ge=1, le=256)]
"""In tokens. Prefixes are shared in whole blocks, so larger blocks would share hardly anything."""
MaxNumSeqs = Annotated[int, Meta(ge=1, le=4096)]
"""In requests. The buffers of a step are allocated for this many."""
MaxNumBatchedTokens = Annotated[int, Meta(ge=16, le=1 << 20)]
"""In tokens. The buffers of a step are allocated for this many."""
Threads = Annotated[int, Meta(ge=1, le=1024)]

KvCacheBytes = Annotated[int, Meta(ge=1 << 16, le=1 << 46)]
