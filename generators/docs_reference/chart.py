"""The page of the chart's values: names and types from its schema, defaults and meanings from values.yaml."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from docs_reference.markdown import code, page, table

_INTRODUCTION = """\
Every value of the Helm chart [charts/argosy](../../charts/argosy). The schema refuses any other.
[Installation](../installation.md) explains how they work together."""
_KEY = re.compile(r"^(?P<indent> *)(?P<name>[A-Za-z]+):(?P<rest>.*)$")


def chart_page(chart: Path) -> str:
    schema = json.loads((chart / "values.schema.json").read_text("utf-8"))
    text = (chart / "values.yaml").read_text("utf-8")
    values, comments = yaml.safe_load(text), comments_of(text)
    rows = [
        (
            code(path),
            _type(kind),
            code(json.dumps(value)) if value is not None else "",
            comments.get(path, ""),
        )
        for path, kind, value in _leaves("", schema, values, schema["$defs"])
        if value is not None or path in comments
    ]
    return page("Chart values", _INTRODUCTION, [table(("value", "type", "default", "meaning"), rows)])


def comments_of(text: str) -> dict[str, str]:
    """Path of a key -> the comment above it, and the one behind it."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    above: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            above.append(stripped.lstrip("# "))
            continue
        if match := _KEY.match(line):
            indent = len(match["indent"])
            path = [(depth, name) for depth, name in path if depth < indent] + [(indent, match["name"])]
            _, separator, behind = match["rest"].partition("# ")
            words = [*above, *([behind.strip()] if separator else [])]
            if words:
                found[".".join(name for _, name in path)] = " ".join(words)
        above = []
    return found


def _leaves(
    path: str, schema: Mapping[str, Any], value: Any, definitions: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    """Path, schema and default of every value; objects whose keys the schema names are entered."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    properties = schema.get("properties")
    if properties is None:
        yield path, schema, value
        return
    if path:
        yield path, schema, None
    for name, field in properties.items():
        inner = value.get(name) if isinstance(value, dict) else None
        yield from _leaves(f"{path}.{name}".lstrip("."), field, inner, definitions)


def _type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(code(value) for value in schema["enum"])
    kind = schema["type"]
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        return "list"
    if "minimum" in schema:
        return f"{kind}, {schema['minimum']} to {schema['maximum']}"
    return str(kind)
