"""One observation of a service: its children and pods, the reports about them, and the names that it lost.

Owns the value that a decision is made on. Must not decide anything, nor know where its contents come from.
Invariant: an observation does not change while it is acted on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from argosy_operator.kinds import BUDGETS, DEPLOYMENTS, SERVICES, STATEFUL_SETS, Kind, Name, controller_of
from argosy_operator.observed.pod import Pod
from argosy_operator.observed.scaler import Scalers
from argosy_operator.observed.service_load import ServiceLoad
from argosy_protocol.model_progress import ModelProgress
from argosy_resource.name_claims import LostName
from argosy_resource.types import InferenceService

Object = Mapping[str, Any]
"""A Kubernetes object as JSON, read only."""

CHILD_KINDS: Final = (SERVICES, BUDGETS, DEPLOYMENTS, STATEFUL_SETS)
"""Kinds of the children that are watched. A Secret, the other child, is never read."""


class Routers(Struct, frozen=True, kw_only=True):
    """The last reports of the routers, merged."""

    known: bool = False
    """Whether the routers have been asked at all since the operator started."""
    alive: int = 0
    """Number of routers that answer."""
    routable: frozenset[str] = frozenset()
    """UIDs of pods to which at least one router sends requests."""
    unreachable: tuple[str, ...] = ()
    """Sorted names of the pods of routers that run and have not answered for a minute."""
    unsent: frozenset[str] = frozenset()
    """Services (`namespace/name`) with replicas that routers know and have sent no requests to for a minute, to none of
    them. Those that are silent do not count, and may do so."""
    draining: frozenset[str] = frozenset()
    """UIDs of pods that a router reports as draining, and to which none sends requests."""


class Observation(Struct, frozen=True, kw_only=True):
    """Everything, besides the resource, that a decision and the status may depend on."""

    deployment: Object | None = None
    """The Deployment that the service controls."""
    children: Mapping[tuple[Kind, Name], Object] = {}
    """Live objects of CHILD_KINDS that carry the service's label or the name of one of its children, whoever
    controls them."""
    pods: tuple[Pod, ...] = ()
    """The replicas. Pods that are further nodes of one are in its `workers`."""
    routers: Routers = Routers()
    fetches: Mapping[str, ModelProgress] = {}
    """The last report of each model fetch that runs, by UID of its pod."""
    unpolled_fetches: frozenset[str] = frozenset()
    """UIDs of the pods whose model fetch runs and was not asked yet since the operator, or the fetch, started."""
    lost_names: tuple[LostName, ...] = ()
    """Names that the service claims and does not have."""
    rolling_elsewhere: str = ""
    """Another service (`namespace/name`) that a change of the operator's is being rolled out to; empty if none."""
    lacks_canary: bool = False
    """Whether the service names a canary that does not exist."""
    published_canary: str = ""
    """The canary revision by which the fleet document divides the service; empty if it does not."""
    load: ServiceLoad | None = None
    """What the routers report of the service while it may have a canary; None if none has reported, or nobody asks."""
    scalers: Scalers = Scalers()
    """The HorizontalPodAutoscalers of a service with spec.scaling."""
    began: str = ""
    """When this operator began to lead, by its own clock (RFC 3339); empty if that is not known."""
    time: str = ""
    """When it was taken (RFC 3339). What waits for time alone is decided by it."""

    @property
    def without_canary(self) -> Observation:
        """The observation without the pods of a canary rollout's own Deployment."""
        if not any(pod.is_canary for pod in self.pods):
            return self
        return msgspec.structs.replace(self, pods=tuple(pod for pod in self.pods if not pod.is_canary))


def is_owned(obj: Object, service: InferenceService) -> bool:
    """Whether the resource controls the object."""
    return controller_uid(obj) == service.metadata.uid


def controller_uid(obj: Object) -> str | None:
    """UID of the object that controls this one; None if none does."""
    return controller_of(obj).get("uid")
