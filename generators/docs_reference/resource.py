"""The page of the custom resource, from the CustomResourceDefinition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from docs_reference.markdown import code, page, section, table

Schema = dict[str, Any]

_INTRODUCTION = """\
Every field of an `InferenceService` (group `inference.argosy.dev`, version `v1alpha1`, short name `isvc`), from
[crds/inferenceservices.yaml](../../crds/inferenceservices.yaml). `kubectl explain isvc.spec --recursive` prints them
from a cluster, and `argosy crd` prints the definition itself. A field that is not listed is refused. A quantity is a
string such as `500m` or `16Gi`, or a whole number. The API server evaluates the rules below each table, and `argosy up`
evaluates the same ones. Manifests are in [examples/](../../examples)."""


def resource_page(crd: Path) -> str:
    (version,) = yaml.safe_load(crd.read_text("utf-8"))["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    spec, status = (schema["properties"][name] for name in ("spec", "status"))
    sections = [
        section(f"spec.{name}", _fields(f"spec.{name}", field, name in spec.get("required", ())))
        for name, field in spec["properties"].items()
    ]
    sections.append(section("Rules over several fields", _rules([*_messages(spec), *_messages(schema)])))
    rows = [
        (path, kind, meaning)
        for name, field in status["properties"].items()
        for path, kind, _, meaning in _rows(f"status.{name}", field, False)
    ]
    sections.append(section("status", table(("field", "type", "meaning"), rows)))
    return page("InferenceService reference", _INTRODUCTION, sections)


def _fields(path: str, schema: Schema, is_required: bool) -> str:
    rows = list(_rows(path, schema, is_required))
    rules = list(_all_messages(path, schema))
    text = table(("field", "type", "default", "meaning"), rows)
    return f"{text}\n\n{_rules(rules)}" if rules else text


def _rules(rules: list[str]) -> str:
    return "\n".join(f"- {rule}" for rule in dict.fromkeys(rules))


def _rows(path: str, schema: Schema, is_required: bool) -> Iterator[tuple[str, str, str, str]]:
    default = "required" if is_required else code(_json(schema["default"])) if "default" in schema else ""
    yield code(path), _type(schema), default, schema.get("description", "")
    inner = schema
    while inner.get("type") == "array":
        inner, path = inner["items"], path + "[]"
    for name, field in inner.get("properties", {}).items():
        yield from _rows(f"{path}.{name}", field, name in inner.get("required", ()))


def _type(schema: Schema) -> str:
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    kind = schema["type"]
    if "enum" in schema:
        return ", ".join(code(str(value)) for value in schema["enum"])
    if kind == "array":
        most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list of {schema['items']['type']}s{most}"
    if kind == "object":
        return "map of strings" if "additionalProperties" in schema else "object"
    if "maximum" in schema:
        return f"{kind}, {schema['minimum']} to {schema['maximum']}"
    if "minimum" in schema:
        return f"{kind}, at least {schema['minimum']}"
    if kind == "string" and "maxLength" in schema:
        return f"string, at most {schema['maxLength']} characters"
    return str(kind)


def _messages(schema: Schema) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield str(rule["message"])


def _all_messages(path: str, schema: Schema) -> Iterator[str]:
    """Messages of the rules at or below a field, with the field."""
    for message in _messages(schema):
        yield f"{code(path)}: {message}"
    if schema.get("type") == "array":
        yield from _all_messages(path + "[]", schema["items"])
    for name, field in schema.get("properties", {}).items():
        yield from _all_messages(f"{path}.{name}", field)


def _json(value: object) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True)).removesuffix("\n").removesuffix("\n...")
