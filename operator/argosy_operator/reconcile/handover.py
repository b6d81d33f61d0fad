"""When the number of a HorizontalPodAutoscaler begins to count for a service with spec.scaling.

Owns that decision, and what it remembers of each service. Must not know how a number is decided or applied. While
spec.scaling decides, spec.replicas is not the number of replicas that there are, but the autoscaler takes it for that:
it leaves it as it is when the load is at its target, raises it to no more than the double at once, and so writes
numbers that it would not choose. Invariants: until a number counts spec.scaling goes on, so that some controller always
decides; once it counts it does until the last autoscaler is removed, also in a new operator, which reads it in
status.scaling.
"""

from __future__ import annotations

from collections.abc import Set

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

    @property
    def names(self) -> Set[Name]:
        """The services of which something is kept."""
        return self._kept.keys()

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
            # What is not known for the moment goes on.
            kept.is_over = not scalers.is_known and (kept.is_over or _was_over(service))
            kept.replicas = service.spec.replicas
        elif not kept.is_over:
            kept.is_over = _begins_to_count(service, scalers, present, kept.replicas)
            if service.spec.replicas:
                kept.replicas = service.spec.replicas
        return kept.is_over


def _was_over(service: InferenceService) -> bool:
    """Whether the operator before this one let the number count."""
    status = service.status.scaling
    return status is not None and status.reason == SCALED_ELSEWHERE


def _begins_to_count(
    service: InferenceService, scalers: Scalers, present: int | None, before: int | None
) -> bool:
    wanted = service.spec.replicas
    if _was_over(service) or scalers.have_chosen:
        return True
    if wanted == 0:
        # KEDA writes zero, and wakes the service. Any other autoscaler stops at a zero, which was somebody else's; a
        # zero that was there before is only a number to start with.
        return scalers.are_kedas and before != 0
    loses_none = present is None or wanted >= present
    return loses_none and scalers.are_active
