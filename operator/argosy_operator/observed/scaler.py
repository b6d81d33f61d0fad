"""The HorizontalPodAutoscalers that scale one service.

Owns what of a HorizontalPodAutoscaler matters here. Must not know how they are watched, nor what follows. Field
managers cannot tell of them: a write through a CustomResourceDefinition's scale subresource leaves no entry in
managedFields on Kubernetes 1.36. KEDA makes one for each ScaledObject, and keeps it at zero replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from argosy_operator.kinds import Name
from argosy_resource.types import GROUP, KIND


class Scaler(Struct, frozen=True, kw_only=True):
    """A HorizontalPodAutoscaler whose target is an InferenceService."""

    name: str
    service: Name
    has_synced: bool
    """Whether its controller has looked at the service: from then on spec.replicas is what it decided."""

    @property
    def key(self) -> Name:
        return self.service[0], self.name


class Scalers(Struct, frozen=True, kw_only=True):
    """The HorizontalPodAutoscalers of one service."""

    is_known: bool = False
    """Whether the API server lists them."""
    names: tuple[str, ...] = ()
    """Sorted; empty if there is none, or if that is not known."""
    has_synced: bool = False
    """Whether one of them has looked at the service."""


def summarize(scalers: Iterable[Scaler], *, is_known: bool) -> Scalers:
    """What matters of the autoscalers of one service."""
    found = list(scalers)
    return Scalers(
        is_known=is_known,
        names=tuple(sorted(each.name for each in found)),
        has_synced=any(each.has_synced for each in found),
    )


def read_scaler(obj: Mapping[str, Any]) -> Scaler | None:
    """Read a HorizontalPodAutoscaler; None if it scales something else."""
    metadata, target = obj["metadata"], obj.get("spec", {}).get("scaleTargetRef", {})
    group = target.get("apiVersion", "").partition("/")[0]
    if group != GROUP or target.get("kind") != KIND:
        return None
    return Scaler(
        name=metadata["name"],
        service=(metadata.get("namespace", ""), target.get("name", "")),
        has_synced=bool(obj.get("status", {}).get("conditions")),
    )
