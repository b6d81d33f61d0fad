"""Which replicas a Deployment gives up first when it is made smaller: those whose caches are worth least.

Owns the choice, and the annotation by which the ReplicaSet controller follows it (KEP-2255). Must not know when a
Deployment is made smaller. Invariants: replicas that do not serve are left to the ReplicaSet controller, which removes
them first; only replicas to be removed carry the annotation, so that as many pods are written as are removed, and it
goes with them; without a report nothing is written, and Kubernetes chooses.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from msgspec import Struct

from argosy_operator.observed.pod import DELETION_COST_ANNOTATION, Pod
from argosy_operator.observed.service_load import ReplicaUse, ServiceLoad

_REMOVED_FIRST: Final = -1
"""Pods without the annotation cost 0."""


class CostChange(Struct, frozen=True):
    """A pod's deletion cost is to change."""

    pod: Pod
    cost: int

    @property
    def patch(self) -> dict[str, Any]:
        """Merge patch of the pod; a cost of 0 removes the annotation."""
        value = str(self.cost) if self.cost else None
        return {"metadata": {"uid": self.pod.uid, "annotations": {DELETION_COST_ANNOTATION: value}}}


def cost_changes(pods: Iterable[Pod], load: ServiceLoad | None, removed: int) -> tuple[CostChange, ...]:
    """The costs to write before a Deployment loses `removed` replicas."""
    if load is None:
        return ()
    alive = [pod for pod in pods if pod.is_alive]
    serving = [pod for pod in alive if pod.is_routable]
    count = max(0, removed - (len(alive) - len(serving)))
    unknown = ReplicaUse()
    ranked = sorted(serving, key=lambda pod: pod.name)
    ranked.sort(key=lambda pod: pod.created, reverse=True)  # of equals the newest, as Kubernetes does
    ranked.sort(key=lambda pod: load.replicas.get(pod.uid, unknown).cache_value)
    victims = {pod.uid for pod in ranked[:count]}
    wanted = {pod.uid: _REMOVED_FIRST if pod.uid in victims else 0 for pod in alive}
    return tuple(CostChange(pod, wanted[pod.uid]) for pod in alive if pod.deletion_cost != wanted[pod.uid])
