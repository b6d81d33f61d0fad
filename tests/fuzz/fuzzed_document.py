"""The OpenAPI document of a server, narrowed so that generated requests get beyond the first checks.

Owns: which values free texts get that servers compare with what they know: models, roles, kinds of parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
KINDS = (
    "text", "input_text", "output_text", "refusal", "image_url", "function", "custom", "message", "function_call",
    "function_call_output", "reasoning", "item_reference", "tool_use", "tool_result", "thinking", "json_object",
    "json_schema", "auto", "any", "none",
)  # fmt: skip
ADMINISTRATION = r"^/(sleep|wake_up|reset_prefix_cache|server_info|metrics|docs|openapi\.json)$"
"""Paths that would stop the server under test, or that answer all requests alike."""

_SCHEMAS = "#/components/schemas/"
_EVENTS = "text/event-stream"
_SENT = "Sent"
"""Prefix of the names of schemas that are narrowed: those of answers stay as they are."""


def narrowed(
    document: Mapping[str, Any], models: Sequence[str], known: Mapping[str, Sequence[str]], only: str
) -> dict[str, Any]:
    """Return a document whose requests name these models, known roles, and often objects that exist.

    Args:
        known: ids of objects by the path that their ids follow.
        only: regular expression of the paths that are kept.
    """
    schemas = document["components"]["schemas"]
    sent = {_SENT + name: _narrowed_schema(schema, models) for name, schema in schemas.items()}
    paths = {
        path: {method: _with_ids(path, operation, known) for method, operation in operations.items()}
        for path, operations in document["paths"].items()
        if not re.search(ADMINISTRATION, path) and re.search(only, path)
    }
    for operations in paths.values():
        for operation in operations.values():
            if "requestBody" in operation:
                operation["requestBody"] = _narrowed_schema(operation["requestBody"], models)
            operation["responses"] = {
                status: _with_any_events(answer) for status, answer in operation.get("responses", {}).items()
            }
    components = {**document["components"], "schemas": {**schemas, **sent}}
    return {**document, "paths": paths, "components": components, "security": []}


def _narrowed_schema(schema: Any, models: Sequence[str]) -> Any:
    """Return a copy for requests, which refers to other copies."""
    if isinstance(schema, list):
        return [_narrowed_schema(each, models) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: _narrowed_schema(value, models) for name, value in schema.items()}
    if isinstance(target := result.get("$ref"), str):
        result["$ref"] = target.replace(_SCHEMAS, _SCHEMAS + _SENT)
    properties = result.get("properties")
    if isinstance(properties, dict):
        for name, values in (("model", models), ("role", ROLES), ("type", KINDS)):
            if properties.get(name, {}).get("type") == "string" or (name == "model" and name in properties):
                properties[name] = {"enum": list(values)}
    return result


def _with_any_events(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer whose streams have no schema: Schemathesis compares the schema of a stream, which is a text,
    with each event, which it takes for an object."""
    content = answer.get("content", {})
    return {**answer, "content": {**content, _EVENTS: {}}} if _EVENTS in content else dict(answer)


def _with_ids(path: str, operation: Mapping[str, Any], known: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    ids = known.get(path.partition("/{")[0], ())
    if "{name}" not in path or not ids:
        return dict(operation)
    parameters = [
        {**each, "schema": {"anyOf": [{"enum": list(ids)}, each["schema"]]}}
        if each["name"] == "name"
        else each
        for each in operation["parameters"]
    ]
    return {**operation, "parameters": parameters}
