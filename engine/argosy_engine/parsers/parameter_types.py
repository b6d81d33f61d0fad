"""Parameter types: values of arguments that a model writes as plain text, by the JSON schema of the function.

As in vLLM the first type counts that the text can be read as, in the order null, integer, number, boolean, object,
array, string; the text itself is the value if none fits. Texts of an `enum` or `const` come before all of these. The
grammar of calls that `tool_choice` requires allows white space around values that a schema limits; it is removed here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
_ELSEWHERE = ("const", "enum", "$ref", "anyOf", "oneOf", "allOf")
"""Keywords that tell the types of a schema without `type`."""
_KEYWORDS = {
    "object": ("properties", "additionalProperties", "unevaluatedProperties"),
    "array": ("items", "prefixItems", "unevaluatedItems"),
}
_ANY = frozenset({"object", "array", "string"})
"""How the grammar of a required call reads the value of a schema that allows any: a number or word as a text."""
_MAX_STEPS = 200_000
"""Schemas, values and parts of references that are looked at for a request's parameters, because references multiply
them. The parameters after them are text, or what their own `type` says."""
_MAX_REFERENCE_CHARS = 1024
_MAX_NUMBER_CHARS = 400


class _Values(NamedTuple):
    """What the values of a parameter may be."""

    types: frozenset[str] = frozenset({"string"})
    texts: Mapping[str, str] = {}
    """For texts that the schema lists, with and without the white space around them, the text."""
    is_bare: bool = False
    """Whether white space around a text is no part of it."""
    max_chars: int | None = None
    """Length beyond which white space around a text is no part of it."""

    def read(self, text: str) -> Any:
        for written in (text, text.strip()):
            if written in self.texts:
                return self.texts[written]
        value = read_value(text, self.types)
        is_long = self.max_chars is not None and len(text) > self.max_chars
        return text.strip() if value is text and (self.is_bare or is_long) else value


class ParameterTypes:
    """
    Args:
        tools: tool definitions of the request.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._functions: dict[str, Any] = {}
        for tool in tools:
            if isinstance(described := tool.get("function"), Mapping):
                self._functions[str(described.get("name"))] = described.get("parameters")
        self._declared: dict[str, tuple[dict[str, list[Any]], list[Any]]] = {}
        """For each function that was called, the schemas of its parameters, and those of all others."""
        self._known: dict[tuple[str, str | None], _Values] = {}
        """For each parameter that was read; None stands for those that are not declared."""
        self._steps_left = _MAX_STEPS

    def value(self, function: str, parameter: str, text: str) -> Any:
        """Read the text of a function's argument."""
        if function not in self._functions:
            return text
        if function not in self._declared:
            self._declared[function] = self._read_function(self._functions[function])
        declared, others = self._declared[function]
        key = function, parameter if parameter in declared else None
        values = self._known.get(key)
        if values is None:
            schemas = declared.get(parameter, others)
            values = self._known[key] = self._read_schemas(self._functions[function], schemas)
        return values.read(text)

    def _read_function(self, root: Any) -> tuple[dict[str, list[Any]], list[Any]]:
        declared: dict[str, list[Any]] = {}
        others = []
        for schema in self._reachable(root, [root]):
            if isinstance(properties := schema.get("properties"), Mapping):
                for name, value in properties.items():
                    declared.setdefault(name, []).append(value)
            if (other := schema.get("additionalProperties")) is True or isinstance(other, Mapping):
                others.append(other)
        return declared, others

    def _read_schemas(self, root: Any, schemas: Sequence[Any]) -> _Values:
        types: set[str] = set()
        texts: dict[str, str] = {}
        is_bare, lengths = False, []
        for schema in self._reachable(root, schemas):
            types |= _own_types(schema)
            for listed in ([schema["const"]] if "const" in schema else [], _list(schema.get("enum"))):
                listed = listed[: self._steps_left]
                self._steps_left -= len(listed)
                types |= {_TYPE_NAMES.get(kind, "object") for kind in set(map(type, listed))}
                for text in listed:
                    if isinstance(text, str):
                        texts[text] = text
                        texts.setdefault(text.strip(), text)
            is_bare = is_bare or "pattern" in schema or "format" in schema
            if type(length := schema.get("maxLength")) is int:
                lengths.append(length)
        if True in schemas:
            types |= _ANY
        return _Values(frozenset(types) or _Values().types, texts, is_bare, max(lengths) if lengths else None)

    def _reachable(self, root: Any, schemas: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
        """Return the schemas, with those that they refer to and combine."""
        seen: set[int] = set()
        left = list(reversed(schemas))
        while left:
            schema = left.pop()
            if not isinstance(schema, Mapping) or id(schema) in seen:
                continue
            seen.add(id(schema))
            yield schema
            if self._steps_left <= 0:
                return
            self._steps_left -= 1
            for key in ("anyOf", "oneOf", "allOf"):
                left += reversed(_list(schema.get(key)))
            if isinstance(reference := schema.get("$ref"), str) and len(reference) <= _MAX_REFERENCE_CHARS:
                self._steps_left = max(0, self._steps_left - reference.count("/"))
                left.append(_resolved(root, reference))


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


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names, or that its keywords are about."""
    given = schema.get("type")
    found = {
        _ALIASES.get(name.lower(), name.lower()) for name in _list(given) or [given] if isinstance(name, str)
    }
    if found or any(key in schema for key in _ELSEWHERE):
        return found
    for kind, keywords in _KEYWORDS.items():
        if any(key in schema for key in keywords):
            return {kind}
    return set(_ANY)


def _resolved(root: Any, reference: str) -> Any:
    """Return what a reference within the schema leads to; None if it leads nowhere."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    target = root
    for part in filter(None, reference[2:].split("/")):
        target = target.get(part) if isinstance(target, Mapping) else None
    return target


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
