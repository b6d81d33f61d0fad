"""What a replica says of its further nodes: how many they are, and the pod template that all of them have.

Owns the form of that annotation and its bounds. The text is a tenant's to write, in a pod of their own, so anything may
be in it. Invariant: a template that is returned has every field that `desired.engine_nodes` reads, and can be encoded.
"""

from __future__ import annotations

import functools
from hashlib import sha256
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from argosy_resource.resources import MAX_DEVICES

MAX_DEPTH: Final = 64
"""Levels of lists and objects in a template; Kubernetes' own pod templates have about a dozen."""
MAX_CHARS: Final = 128 * 1024
"""Of the text. All annotations of a pod together may have twice as many bytes."""
MAX_VALUES: Final = 2048
"""Estimate of the values in a template: the text's commas and opening brackets. Each value takes some hundred bytes of
memory, whatever it takes in the text."""


class NodeTemplate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the annotation holds."""

    workers: Annotated[int, Meta(ge=1, le=MAX_DEVICES - 1)]
    template: dict[str, Any]
    """Pod template of the workers, without what differs from leader to leader."""


class _Container(Struct):
    env: list[dict[str, Any]]


class _Spec(Struct):
    containers: Annotated[list[_Container], Meta(min_length=1, max_length=1)]


class _Metadata(Struct):
    labels: dict[str, str]
    annotations: dict[str, str] = {}


class _PodTemplate(Struct):
    """The fields of a template that are read; others may be there."""

    metadata: _Metadata
    spec: _Spec


@functools.lru_cache(maxsize=16)
def digest(text: str) -> str:
    """The hash by which a pod's container vouches for the annotation. All replicas of a revision have the same text."""
    return sha256(text.encode()).hexdigest()


def num_values(text: str) -> int:
    """An estimate of how many values are in a template, before it is read."""
    return sum(map(text.count, ",[{"))


@functools.lru_cache(maxsize=16)
def decode_node_template(text: str) -> NodeTemplate | None:
    """Read the annotation; None if there is none, or it does not say of what form the workers are. What is returned is
    shared, and only to be read."""
    if not text or len(text) > MAX_CHARS or num_values(text) > MAX_VALUES:
        return None
    try:
        found = msgspec.json.decode(text, type=NodeTemplate)
        msgspec.convert(found.template, _PodTemplate)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return found if _is_shallow(found.template) else None


def _is_shallow(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for each in level for inner in _items(each)]
        if not level:
            return True
    return False


def _items(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
