"""The Kubernetes kinds that the operator reads and writes, and how an object is identified.

Owns the table of kinds, so that no API discovery is needed. Knows no object's content but its metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from argosy_resource import types

Object = dict[str, Any]
"""A Kubernetes object as JSON."""
Name = tuple[str, str]
"""Namespace and name."""


class Kind(Struct, frozen=True):
    """An API resource."""

    group: str
    version: str
    name: str
    plural: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


SERVICES: Final = Kind("", "v1", "Service", "services")
SECRETS: Final = Kind("", "v1", "Secret", "secrets")
PODS: Final = Kind("", "v1", "Pod", "pods")
CONFIGMAPS: Final = Kind("", "v1", "ConfigMap", "configmaps")
EVENTS: Final = Kind("", "v1", "Event", "events")
DEPLOYMENTS: Final = Kind("apps", "v1", "Deployment", "deployments")
STATEFUL_SETS: Final = Kind("apps", "v1", "StatefulSet", "statefulsets")
BUDGETS: Final = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
NAMESPACES: Final = Kind("", "v1", "Namespace", "namespaces")
LEASES: Final = Kind("coordination.k8s.io", "v1", "Lease", "leases")
AUTOSCALERS: Final = Kind("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
INFERENCE_SERVICES: Final = Kind(types.GROUP, types.VERSION, types.KIND, types.PLURAL)

KINDS: Final[Mapping[tuple[str, str], Kind]] = {
    (kind.api_version, kind.name): kind
    for kind in (
        SERVICES,
        SECRETS,
        PODS,
        CONFIGMAPS,
        EVENTS,
        DEPLOYMENTS,
        STATEFUL_SETS,
        BUDGETS,
        NAMESPACES,
        LEASES,
        AUTOSCALERS,
        INFERENCE_SERVICES,
    )
}
"""Every kind, by `apiVersion` and `kind` of its objects."""


def kind_of(manifest: Mapping[str, Any]) -> Kind:
    """The kind of an object that says its own."""
    return KINDS[manifest["apiVersion"], manifest["kind"]]


def object_name(obj: Mapping[str, Any]) -> Name:
    """Namespace and name of an object."""
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def controller_of(obj: Mapping[str, Any]) -> Mapping[str, Any]:
    """The owner reference of what controls an object; empty if nothing does."""
    owners = obj["metadata"].get("ownerReferences", ())
    return next((owner for owner in owners if owner.get("controller")), {})
