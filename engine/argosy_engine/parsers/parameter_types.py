"""Parameter types: values of arguments that a model writes as plain text, by the JSON schema of the function.

As in vLLM the first type counts that the text can be read as, in the order null, integer, number, boolean, object,
array, string; the text itself is the value if none fits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

_ALIASES = {
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "str": "string",
    "dict": "object",
    "list": "array",
}
_TYPE_NAMES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
}
_MAX_DEPTH = 8
"""Alternatives within alternatives of a schema that are looked at."""
_MAX_NUMBER_CHARS = 400


class ParameterTypes:
    """
    Args:
        tools: tool definitions of the request.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._properties: dict[str, Mapping[str, Any]] = {}
        self._known: dict[tuple[str, str], set[str]] = {}
        """Types of the declared parameters that were read."""
        for tool in tools:
            described = tool.get("function")
            parameters = described.get("parameters") if isinstance(described, Mapping) else None
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            if isinstance(described, Mapping) and isinstance(properties, Mapping):
                self._properties[str(described.get("name"))] = properties

    def value(self, function: str, parameter: str, text: str) -> Any:
        """Read the text of a function's argument."""
        properties = self._properties.get(function, {})
        if parameter not in properties:
            return text
        types = self._known.get((function, parameter))
        if types is None:
            types = self._known[function, parameter] = _types(properties[parameter], 0)
        return read_value(text, types)


def read_value(text: str, types: Collection[str]) -> Any:
    """Read a text as the first type that fits it; the text itself if none does."""
    bare = text.strip()
    if "null" in types and bare.lower() == "null":
        return None
    if len(bare) <= _MAX_NUMBER_CHARS:
        if "integer" in types and (number := _number(bare, int)) is not None:
            return number
        if "number" in types and (number := _number(bare, int, float)) is not None:
            return number
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower() == "true"
    for kind, expected in (("object", dict), ("array", list)):
        if kind in types and isinstance(value := _json(bare), expected):
            return value
    return text


def _types(schema: Any, depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return {"string"}
    found: set[str] = set()
    given = schema.get("type")
    for name in _list(given) or [given]:
        if isinstance(name, str):
            found.add(_ALIASES.get(name.lower(), name.lower()))
    found |= {_TYPE_NAMES.get(kind, "object") for kind in set(map(type, _list(schema.get("enum"))))}
    for key in ("anyOf", "oneOf", "allOf"):
        for part in _list(schema.get(key)):
            found |= _types(part, depth + 1)
    return found or {"string"}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(text: str, *kinds: type[int] | type[float]) -> int | float | None:
    for kind in kinds:
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if math.isfinite(number) and "_" not in text else None
    return None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
