"""Flags with a key, as vLLM takes them: `--override-generation-config.temperature 0.5` for `{"temperature": 0.5}`.

All keys of a flag become one JSON object, which wins over an object given as a whole, as in vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


class MalformedKey(Exception):
    """A key without a value, or below a value; the message names the flag."""


def joined(words: Sequence[str], flags: Mapping[str, str]) -> list[str]:
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
        read = value.split(",") if path.endswith("+") else _read(value)
        _put(objects.setdefault(known, {}), path.removesuffix("+").split("."), read, name)
    for flag, keys in objects.items():
        left += [flag, json.dumps(keys)]
    return left


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _put(keys: dict[str, Any], path: Sequence[str], value: Any, name: str) -> None:
    *outer, last = path
    for part in outer:
        keys = keys.setdefault(part, {})
        if not isinstance(keys, dict):
            raise MalformedKey(f"{name}: {part} has a value already")
    if not last:
        raise MalformedKey(f"{name} needs a key behind its dot")
    keys[last] = value
