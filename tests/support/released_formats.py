"""What the last release wrote (tests/protocol/released), and how a schema of today differs from one of then."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RELEASED = Path(__file__).parents[1] / "protocol" / "released"
LIMITS = ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "pattern")
Schema = dict[str, Any]


def released(name: str) -> Any:
    """One of the recorded files."""
    return json.loads((RELEASED / name).read_text(encoding="utf-8"))


def lost_fields(old: object, new: object, path: str = "") -> Iterator[str]:
    """Name the parts of a recorded document that another one does not have with the same value."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name, value in old.items():
            if name in new:
                yield from lost_fields(value, new[name], f"{path}.{name}")
            else:
                yield f"{path}.{name} is missing"
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from lost_fields(one, other, f"{path}[{index}]")
    elif old != new:
        yield f"{path}: {old!r} became {new!r}"


def breaking_changes(old: Schema, new: Schema) -> list[str]:
    """Say why programs of two releases would misread each other's messages, given the schemas of a message in both.

    Fields may be added, with defaults; then everything else must stay as it was. A wider limit or another value of an
    enumeration is a break, too: the older reader refuses the whole message. So is another default, because fields are
    not written that have it.
    """
    return list(_changes(old, new, old, new, ""))


def _changes(old: Schema, new: Schema, old_root: Schema, new_root: Schema, path: str) -> Iterator[str]:
    old_default, new_default = old.get("default"), new.get("default")
    old, new = _resolved(old, old_root), _resolved(new, new_root)
    if old_default != new_default:
        yield f"{path}: default {old_default!r} became {new_default!r}"
    for key in ("type", "enum", "contentEncoding", *LIMITS):
        if old.get(key) != new.get(key):
            yield f"{path}: {key} {old.get(key)!r} became {new.get(key)!r}"
    properties = new.get("properties", {})
    for name, nested in old.get("properties", {}).items():
        if name in properties:
            yield from _changes(nested, properties[name], old_root, new_root, f"{path}.{name}")
        else:
            yield f"{path}.{name} is gone"
    required, is_required = set(old.get("required", ())), set(new.get("required", ()))
    yield from (f"{path}.{name} is required now" for name in sorted(is_required - required))
    yield from (f"{path}.{name} is not always written any more" for name in sorted(required - is_required))
    for key in ("items", "additionalProperties"):
        if isinstance(old.get(key), dict) and isinstance(new.get(key), dict):
            yield from _changes(old[key], new[key], old_root, new_root, f"{path}[]")
        elif old.get(key) != new.get(key):
            yield f"{path}: {key} changed"
    options, other_options = old.get("anyOf", []), new.get("anyOf", [])
    if len(options) != len(other_options):
        yield f"{path}: {len(options)} alternatives became {len(other_options)}"
    for one, other in zip(options, other_options, strict=False):
        yield from _changes(one, other, old_root, new_root, path)


def _resolved(schema: Schema, root: Schema) -> Schema:
    while "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    return schema
