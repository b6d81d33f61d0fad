"""When the number of a HorizontalPodAutoscaler begins to count for a service with spec.scaling.

Owns that decision, and what it remembers of each service. Must not know how a number is decided or applied. While
spec.scaling decides, spec.replicas is not the number of replicas that there are, but the autoscaler takes it for that:
it leaves it as it is when the load is at its target, raises it to no more than the double at once, and so writes
numbers that it would not choose. Invariants: until a number counts spec.scaling goes on, so that some controller always
decides; once it counts it does until the last autoscaler is removed, also in a new operator, which reads it in
status.scaling.
"""

from __future__ import annotations

from msgspec import Struct

from argosy_operator.kinds import Name
from argosy_operator.observed.scaler import Scalers
from argosy_operator.status.scaling_status import SCALED_ELSEWHERE
from argosy_resource.types import InferenceService


class _Kept(Struct):
    uid: str
    replicas: int | None = None
    """spec.replicas before the autoscaler came, or the last that was not zero; None if not seen."""
    is_over: bool = False
    """Whether the autoscaler's number counts."""


class Handovers:
    """The handovers of all services."""

    def __init__(self) -> None:
        self._kept: dict[Name, _Kept] = {}

    def forget(self, name: Name | None = None) -> None:
        """Forget a service; all if None."""
        if name is None:
            self._kept.clear()
        else:
            self._kept.pop(name, None)

    def is_over(self, service: InferenceService, scalers: Scalers, present: int | None) -> bool:
        """Whether spec.replicas counts. `present` is the number of the Deployment, None without one."""
        name = (service.metadata.namespace, service.metadata.name)
        kept = self._kept.get(name)
        if kept is None or kept.uid != service.metadata.uid:
            kept = self._kept[name] = _Kept(service.metadata.uid)
        if not scalers.names:
            kept.replicas, kept.is_over = service.spec.replicas, False
        elif not kept.is_over:
            kept.is_over = _begins_to_count(service, scalers, present, kept.replicas)
            if service.spec.replicas:
                kept.replicas = service.spec.replicas
        return kept.is_over


def _begins_to_count(
    service: InferenceService, scalers: Scalers, present: int | None, before: int | None
) -> bool:
    wanted, status = service.spec.replicas, service.status.scaling
    if status is not None and status.reason == SCALED_ELSEWHERE:
        return True
    if scalers.have_chosen:
        return True
    if wanted == 0 and before is not None:
        return before > 0  # KEDA writes zero; a zero that was there before is only a number to start with
    loses_none = present is None or wanted >= present
    return loses_none and (scalers.are_active or wanted == 0)
