"""The operator's copy of the cluster: the last version of every object it has seen.

Owns resources, children and pods, by kind and name, fed by lists, events and the answers to its own writes.
Must not decide anything. Invariants: an older version never replaces a newer one; a list is the truth for its
kind, so an event that was lost is healed by the next one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from argosy_operator.api import (
    BUDGETS,
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    PODS,
    SERVICES_KIND,
    Kind,
)
from argosy_operator.names import SERVICE_LABEL

Object = dict[str, Any]
Name = tuple[str, str]
"""Namespace and name."""


class Store:
    """Objects by kind and name."""

    def __init__(self) -> None:
        self._objects: dict[Kind, dict[Name, Object]] = {
            kind: {} for kind in (INFERENCE_SERVICES, DEPLOYMENTS, SERVICES_KIND, BUDGETS, PODS)
        }
        self._by_service: dict[tuple[Kind, Name], set[Name]] = defaultdict(set)

    def children(self, kind: Kind, service: Name) -> list[Object]:
        """Objects that carry the service's label, in its namespace."""
        held = self._objects[kind]
        return [held[name] for name in sorted(self._by_service.get((kind, service), ()))]

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return self._objects[kind].get((namespace, name))

    def all(self, kind: Kind) -> Iterator[Object]:
        return iter(list(self._objects[kind].values()))

    def put(self, kind: Kind, obj: Object) -> bool:
        """Takes a version in. False if it is not newer than the one held."""
        if kind not in self._objects:
            return False
        name = object_name(obj)
        held = self._objects[kind].get(name)
        if held is not None and _version(held) >= _version(obj) and _uid(held) == _uid(obj):
            return False
        if held is not None:
            self._drop(kind, name)
        self._objects[kind][name] = _trimmed(obj)
        service = service_of(obj)
        if service is not None:
            self._by_service[kind, service].add(name)
        return True

    def remove(self, kind: Kind, obj: Object) -> bool:
        """Forgets an object that was deleted, unless a namesake has taken its place."""
        name = object_name(obj)
        held = self._objects[kind].get(name)
        if held is None or _uid(held) != _uid(obj):
            return False
        self._drop(kind, name)
        return True

    def replace(self, kind: Kind, objects: Iterable[Object], *, namespace: str | None) -> list[Object]:
        """Takes a list as the truth for a kind (and namespace). Returns what had changed unnoticed."""
        listed = {object_name(obj): obj for obj in objects}
        changed = [obj for obj in listed.values() if self.put(kind, obj)]
        for name, held in list(self._objects[kind].items()):
            if name not in listed and namespace in (None, name[0]):
                self._drop(kind, name)
                changed.append(held)
        return changed

    def _drop(self, kind: Kind, name: Name) -> None:
        service = service_of(self._objects[kind].pop(name))
        if service is not None:
            names = self._by_service[kind, service]
            names.discard(name)
            if not names:
                del self._by_service[kind, service]


def service_of(obj: Mapping[str, Any]) -> Name | None:
    """Namespace and name of the InferenceService whose label an object carries."""
    label = obj["metadata"].get("labels", {}).get(SERVICE_LABEL)
    return (obj["metadata"].get("namespace", ""), label) if label else None


def object_name(obj: Mapping[str, Any]) -> Name:
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _version(obj: Object) -> int:
    """Resource versions are comparable as integers (KEP-5504, since 1.35); etcd's always were."""
    version = obj["metadata"].get("resourceVersion", "")
    return int(version) if version.isdigit() else 0


def _uid(obj: Object) -> str:
    return obj["metadata"].get("uid", "")


def _trimmed(obj: Object) -> Object:
    """Without managedFields, which are often larger than the object."""
    metadata = {name: value for name, value in obj["metadata"].items() if name != "managedFields"}
    return {**obj, "metadata": metadata}
