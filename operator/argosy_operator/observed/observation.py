"""What the operator sees of one service: its Deployment, its pods, its routers, who contests its names.

Must not decide anything. Invariant: an observation is a value; nothing in it changes while it is being acted on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from argosy_operator.observed.pod import Pod
from argosy_operator.resource.types import InferenceService
from argosy_protocol.fleet import NameConflict

Object = Mapping[str, Any]
"""A Kubernetes object as JSON, read only."""


class Routers(Struct, frozen=True, kw_only=True):
    """What the routers said last."""

    known: bool = False
    """Whether the routers have been asked at all since the operator started."""
    alive: int = 0
    """Routers that answer."""
    routable: frozenset[str] = frozenset()
    """UIDs of pods that at least one living router sends requests to."""
    draining: frozenset[str] = frozenset()
    """UIDs of pods that a living router saw draining, and that no router sends requests to."""


class Observed(Struct, frozen=True, kw_only=True):
    """Everything `desired` and `status` may look at, besides the resource."""

    deployment: Object | None = None
    pods: tuple[Pod, ...] = ()
    routers: Routers = Routers()
    conflicts: tuple[NameConflict, ...] = ()
    rolling_elsewhere: str = ""
    """Another service that a change of the operator's is being rolled out to (`namespace/name`), if there is one."""
    lacks_canary: bool = False
    """Whether the service names a canary that does not exist."""


def is_owned(obj: Object, service: InferenceService) -> bool:
    """Whether the resource controls the object."""
    owners = obj["metadata"].get("ownerReferences", ())
    return any(owner.get("controller") and owner["uid"] == service.metadata.uid for owner in owners)
