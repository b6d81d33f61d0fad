"""Relaxation: what is left out of a tool's JSON schema because no grammar enforces it.

Invariant: what is left accepts all that the schema accepts. A keyword is dropped where it stands. An object without
`additionalProperties` has no properties but those it declares, so if what was dropped may have named others, the schema
is checked again with all such objects open.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

OPEN_OBJECT = {"type": "object", "additionalProperties": True}
_MAX_DEPTH = 64
_IN_PLACE = ("if", "then", "else", "anyOf", "oneOf", "allOf")
"""Keywords whose schemas apply to the value itself, and declare its properties; `not` declares none."""
_NAMING = frozenset(
    (
        "$ref", "$dynamicRef", "$recursiveRef", "$id", "dependentSchemas", "dependencies", "dependentRequired",
        "patternProperties", "propertyNames", "items", "prefixItems", "contains", "additionalItems",
        "unevaluatedItems",
    )
)  # fmt: skip
"""Keywords that may name anything, as far as this module looks."""
_HARMLESS = frozenset(("not", "propertyNames"))
"""Keywords that name nothing, whatever they hold."""


class Relaxation:
    """
    Args:
        is_open: whether objects and arrays that do not say whether they may have more than they declare may do so.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open = is_open
        self.must_open = False
        """Whether what was dropped may have named properties or items that the rest does not declare."""
        self.keywords: set[str] = set()
        """Keywords that were dropped somewhere."""

    def drop(self, schema: dict[str, Any], *keywords: str) -> None:
        """Drop keywords from a schema that has them."""
        for keyword in keywords:
            value = schema.pop(keyword)
            self.keywords.add(keyword)
            if keyword in _HARMLESS:
                continue
            declared = schema.get("properties")
            known = declared if isinstance(declared, Mapping) else ()
            if not _may_name({keyword: value}, known, 0):
                continue
            self.must_open = True
            for limit in ("unevaluatedProperties", "unevaluatedItems"):  # they knew what was dropped
                schema.pop(limit, None)

    def open_object(self, schema: dict[str, Any]) -> None:
        """Let an object have properties that it does not declare, unless it says whether it may."""
        if self.is_open and "unevaluatedProperties" not in schema:
            schema.setdefault("additionalProperties", True)

    def open_array(self, schema: dict[str, Any]) -> None:
        """Let an array have items that it does not declare, unless it says whether it may."""
        if self.is_open and "unevaluatedItems" not in schema:
            schema.setdefault("items", True)


def merge_all_of(schema: dict[str, Any]) -> None:
    """Merge the objects of `allOf` into a schema if each merely declares properties and no two the same one."""
    parts = schema.get("allOf")
    if not isinstance(parts, list) or len(parts) < 2 or not all(map(_is_plain, parts)):
        return
    rest = {
        keyword: value
        for keyword, value in schema.items()
        if keyword not in ("allOf", "$defs", "definitions")
    }
    if not _is_plain({"type": "object", **rest}):
        return
    properties, required = dict(rest.get("properties") or {}), list(rest.get("required") or ())
    for part in parts:
        named = part.get("properties", {})
        if properties.keys() & named.keys():
            return
        properties |= named
        required += part.get("required", ())
    del schema["allOf"]
    schema |= {"type": "object", "properties": properties, "required": list(dict.fromkeys(required))}


_PLAIN = frozenset(("type", "properties", "required", "title", "description", "$schema"))


def _is_plain(schema: Any) -> bool:
    """Whether a schema does nothing but declare properties of an object."""
    return (
        isinstance(schema, dict)
        and schema.get("type") == "object"
        and schema.keys() <= _PLAIN
        and isinstance(schema.get("properties", {}), dict)
        and isinstance(names := schema.get("required", []), list)
        and all(isinstance(name, str) for name in names)
    )


def _may_name(schema: Any, known: Collection[str], depth: int) -> bool:
    """Whether a schema may declare properties other than `known`, anything within them, or items.

    Args:
        known: names that the schema which it applies beside declares.
    """
    if depth > _MAX_DEPTH:
        return True
    if not isinstance(schema, Mapping):
        return False
    for keyword, value in schema.items():
        if keyword in _NAMING:
            return True
        if keyword in ("additionalProperties", "unevaluatedProperties"):
            if value is not False:
                return True
        elif keyword == "required":
            if not isinstance(value, list) or not all(
                isinstance(name, str) and name in known for name in value
            ):
                return True
        elif keyword == "properties":
            if not isinstance(value, Mapping) or any(
                name not in known or _may_name(each, (), depth + 1) for name, each in value.items()
            ):
                return True
        elif keyword in _IN_PLACE:
            options = value if isinstance(value, list) else [value]
            if any(_may_name(option, known, depth + 1) for option in options):
                return True
    return False
