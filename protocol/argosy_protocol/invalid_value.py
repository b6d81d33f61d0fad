"""The value of the field at fault, for the message about a request that cannot be decoded, and the values it may have.

Owns: finding the value, and how much of it is shown; finding the values that are allowed. Must not know: what is wrong.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

import msgspec
from msgspec.inspect import (
    ListType,
    LiteralType,
    Metadata,
    StructType,
    TypedDictType,
    UnionType,
    VarTupleType,
    type_info,
)

MAX_SHOWN_CHARS = 64
MAX_SEARCHED_BYTES = 64 * 1024
"""Larger bodies are not decoded a second time for the sake of a message."""
ADVISED = "advised"
"""Key of a type's `Meta(extra=...)` with the values that messages name, in place of all that it takes."""
_MAX_SHOWN_ITEMS = 3
_PROMPTS = frozenset(("messages", "prompt", "input", "documents"))
"""Fields whose values may be anybody's text."""
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def shown_value(body: bytes, kind: Any, path: str) -> str:
    """Return the end of a message that quotes the value at `path`, or empty text if it cannot or should not be shown.

    Args:
        body: JSON that is no `kind`.
        kind: the type of the whole body.
        path: such as `stream_options.include_usage` or `stop[0]`. The path of a mapping means one of its items.
    """
    steps = [name or int(index) for name, index in _STEP.findall(path)]
    if len(body) > MAX_SEARCHED_BYTES or not steps or steps[0] in _PROMPTS:
        return ""
    try:
        value: Any = msgspec.json.decode(body)
        for step in steps:
            value = value[step]
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, RecursionError):
        return ""
    if isinstance(value, dict) and len(steps) == 1:
        value = _items_at_fault(value, kind, steps[0])
    if isinstance(value, list | None):
        return ""
    text = json.dumps(value, ensure_ascii=False)
    return f"; it is {text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + '...'}"


@lru_cache(maxsize=256)
def allowed_values(kind: Any, path: str) -> tuple[str | int, ...]:
    """Return the values that the field at `path` may have, or those to advise (`ADVISED`), if its type lists them.

    Args:
        kind: the type of the whole body.
        path: as in `shown_value`.
    """
    kinds: list[Any] = [type_info(kind)]
    for name, _ in _STEP.findall(path):
        kinds = [inner for each in _members(kinds) for inner in _parts(each, name)]
    return tuple(value for each in _members(kinds) if isinstance(each, LiteralType) for value in each.values)


def _members(kinds: list[Any]) -> list[Any]:
    """Return the types with each union replaced by its members."""
    members: list[Any] = []
    for kind in kinds:
        inner = kind.type if isinstance(kind, Metadata) else kind
        if isinstance(kind, Metadata) and kind.extra and ADVISED in kind.extra:
            inner = LiteralType(kind.extra[ADVISED])
        members += _members(list(inner.types)) if isinstance(inner, UnionType) else [inner]
    return members


def _parts(kind: Any, name: str) -> list[Any]:
    """Return the types of an object's field, or of a list's items if the name is empty."""
    if not name:
        return [kind.item_type] if isinstance(kind, ListType | VarTupleType) else []
    fields = kind.fields if isinstance(kind, StructType | TypedDictType) else ()
    return [field.type for field in fields if field.encode_name == name]


def _items_at_fault(mapping: dict[str, Any], kind: Any, field: Any) -> dict[str, Any] | None:
    """Return the first items that the field's type does not allow; None if it is not the fault of items."""
    kinds = {each.encode_name: each.type for each in msgspec.structs.fields(kind)}
    wrong: dict[str, Any] = {}
    for key, value in mapping.items():
        try:
            msgspec.convert({key: value}, kinds[field], str_keys=True)
        except msgspec.ValidationError:
            wrong[key] = value
            if len(wrong) == _MAX_SHOWN_ITEMS:
                break
    return wrong or None
