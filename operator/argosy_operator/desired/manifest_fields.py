"""Kubernetes manifests from the structs of the custom resource, whose fields have Kubernetes' names.

Must not know any object. Invariant: what a user left out does not appear, so that a manifest does not depend on how a
field was left out.
"""

from __future__ import annotations

from typing import Any

import msgspec

Manifest = dict[str, Any]


def present(**fields: Any) -> Manifest:
    """The fields that are not empty."""
    return {name: value for name, value in fields.items() if value not in (None, {}, [])}


def as_manifest(value: Any) -> Any:
    """The Kubernetes field of the same shape as a struct, without what the user left out."""
    return _trimmed(msgspec.to_builtins(value))


def as_stored_manifest(value: Any) -> Any:
    """The same, but with the empty lists, and the nulls inside lists, that are part of the revision of pods which run
    already. They mean the same to an API server, which stores neither."""
    fields = msgspec.json.decode(msgspec.json.encode(value))
    return _without_null_fields(fields)


def _trimmed(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: _trimmed(nested) for name, nested in value.items() if nested is not None}
        return {name: nested for name, nested in kept.items() if nested != []}
    if isinstance(value, list | tuple):
        return [_trimmed(nested) for nested in value]
    return value


def _without_null_fields(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without_null_fields(nested) for name, nested in value.items() if nested is not None}
