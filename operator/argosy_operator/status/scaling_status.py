"""What the status says of `spec.scaling`, and what is wrong with it.

Must not decide a number of replicas (`desired.scaling`). Invariant: reason and time change only with the number, so
that a service at rest causes no write.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from argosy_operator.desired.diff import GateChange
from argosy_operator.desired.scaling import ScalingDecision, unknown_time_zones
from argosy_operator.names import deployment_name
from argosy_operator.observed.elapsed import seconds_between
from argosy_operator.observed.observation import Routers
from argosy_operator.observed.pod import Problem
from argosy_operator.observed.scaler import Scalers
from argosy_resource.scaling_spec import MAX_COLD_START_SECONDS, ScalingStatus
from argosy_resource.types import API_VERSION, KIND, InferenceService, ManagedFieldsEntry

FOREIGN_WRITE_SECONDS: Final = 600
"""A write by an unknown client may be a person's (k9s, a dashboard): without another one for so long it was."""
_AUTOSCALERS: Final = frozenset({"kube-controller-manager", "keda-operator"})
"""Field managers of the HorizontalPodAutoscaler, and of KEDA, which scales to and from zero itself. Where autoscalers
are listed, what was written by those that are gone does not count."""
SCALED_ELSEWHERE: Final = "HorizontalPodAutoscaler"
"""Reason in status.scaling while a HorizontalPodAutoscaler decides."""
_SHOWN: Final = 3
_INTERACTIVE: Final = "kubectl"
"""People scale by hand, which is no controller that would do it again."""


def scaling_status(
    service: InferenceService,
    decision: ScalingDecision | None,
    gates: Iterable[GateChange],
    now: str,
    scalers: Scalers,
) -> ScalingStatus | None:
    """The status of a service whose spec.replicas is the number that was decided; None without spec.scaling.

    Args:
        gates: the readiness gates that change now. One that opens for the first time shows how long a replica takes.
        now: RFC 3339.
        scalers: what decides instead.
    """
    if service.spec.scaling is None:
        return None
    if scalers.decide:
        decision = ScalingDecision(
            wanted=service.spec.replicas, reason=SCALED_ELSEWHERE, message=f"{_named(scalers)} decides"
        )
    before = service.status.scaling or ScalingStatus()
    wanted = service.spec.replicas
    cold_start = max(
        (
            _seconds_between(gate.pod.created, now)
            for gate in gates
            if gate.status == "True" and not gate.pod.gate
        ),
        default=before.cold_start_seconds,
    )
    is_elsewhere = decision is not None and decision.reason == SCALED_ELSEWHERE
    if before.time and before.wanted == wanted and is_elsewhere == (before.reason == SCALED_ELSEWHERE):
        reason, message, time = before.reason, before.message, before.time
    else:
        reason = decision.reason if decision is not None else "Initial"
        message, time = decision.message if decision is not None else "", now
    return ScalingStatus(
        wanted=wanted, reason=reason, message=message, time=time, cold_start_seconds=cold_start
    )


def scaling_problem(service: InferenceService, scalers: Scalers, now: str) -> Problem | None:
    """Why spec.replicas or spec.scaling does not do what it says at `now` (RFC 3339); None if it does."""
    scaling = service.spec.scaling
    if scalers.of_deployment:
        name = service.metadata.name
        message = (
            f"HorizontalPodAutoscaler {_listed(scalers.of_deployment)} scales the Deployment {deployment_name(name)}, "
            "whose number of replicas the operator writes: each undoes what the other does. Let scaleTargetRef be "
            f"apiVersion: {API_VERSION}, kind: {KIND}, name: {name} (of KEDA's in the ScaledObject), or remove it"
        )
        return Problem("DeploymentScaled", message)
    if scaling is None:
        return None
    if scalers.names:
        who = (
            "decides the number of replicas, and spec.scaling waits"
            if scalers.decide
            else "has chosen no number of replicas yet, and spec.scaling decides until then"
        )
        message = (
            f"{_named(scalers)} {who}: remove spec.scaling, or the "
            "HorizontalPodAutoscaler (KEDA's with its ScaledObject)"
        )
        return Problem("ScaledTwice", message)
    others = sorted(
        {entry.manager for entry in _foreign_writes(service, scalers) if _seconds_left(entry, now) > 0}
    )
    if others:
        message = (
            f"{', '.join(others)} writes spec.replicas through the scale subresource, and spec.scaling decides: remove "
            "one of the two; kubectl scale takes the field over from one that is gone"
        )
        return Problem("ScaledTwice", message)
    if unknown := unknown_time_zones(scaling):
        named = ", ".join(unknown)
        return Problem(
            "UnknownTimeZone", f"schedules in {named} are ignored: the operator has no such time zone"
        )
    return None


def router_problem(routers: Routers) -> Problem | None:
    """What keeps figures of some router from the operator; None if nothing does."""
    if not routers.unreachable:
        return None
    message = (
        f"router {_listed(routers.unreachable)} runs and has not answered the operator for a minute: what "
        "it holds in queues does not count, fewer replicas follow from what replicas and other routers report, and "
        "neither does the service go to zero nor a canary on"
    )
    return Problem("RouterUnreachable", message)


def ignored_scale(service: InferenceService, scalers: Scalers, asked: int) -> str:
    """What is told of a `kubectl scale` that is the last edit and changes nothing, because spec.scaling decides; empty
    if there is none, or its edit was reported before.

    Args:
        asked: spec.replicas as it is stored; the service has the number that was decided.
    """
    wanted, metadata = service.spec.replicas, service.metadata
    is_reported = service.status.observed_generation == metadata.generation
    if service.spec.scaling is None or scalers.decide or is_reported or asked == wanted:
        return ""
    edits = [entry for entry in metadata.managed_fields if entry.subresource != "status"]
    newest = max((entry.time for entry in edits), default="")
    if not any(
        entry.subresource == "scale" and entry.manager.startswith(_INTERACTIVE) and entry.time == newest
        for entry in edits
    ):
        return ""
    return (
        f"spec.replicas is {asked}, which has no effect while spec.scaling is set: it has decided on {wanted}, between "
        "its minReplicas and maxReplicas; change these, or remove spec.scaling"
    )


def seconds_until_scaled_once(service: InferenceService, scalers: Scalers, now: str) -> float:
    """Seconds until the next foreign write of spec.replicas counts no more; 0 if there is none."""
    if service.spec.scaling is None:
        return 0.0
    left = [_seconds_left(entry, now) for entry in _foreign_writes(service, scalers)]
    return min((seconds for seconds in left if 0 < seconds < math.inf), default=0.0)


def _named(scalers: Scalers) -> str:
    if not scalers.names:
        return "a HorizontalPodAutoscaler"  # while it is not known which
    return f"HorizontalPodAutoscaler {_listed(scalers.names)}"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    more = len(names) - _SHOWN
    return shown + (f" and {more} more" if more > 0 else "")


def _foreign_writes(service: InferenceService, scalers: Scalers) -> Iterator[ManagedFieldsEntry]:
    return (
        entry
        for entry in service.metadata.managed_fields
        if entry.subresource == "scale"
        and not entry.manager.startswith(_INTERACTIVE)
        and not (scalers.is_known and entry.manager in _AUTOSCALERS)
    )


def _seconds_left(entry: ManagedFieldsEntry, now: str) -> float:
    """For how long a foreign write still counts. The operator's number has replaced it at once; only an autoscaler,
    which is silent while its own metrics rest, writes again."""
    if entry.manager in _AUTOSCALERS or not entry.time:
        return math.inf
    return max(0.0, FOREIGN_WRITE_SECONDS - seconds_between(entry.time, now))


def _seconds_between(start: str, end: str) -> int:
    return min(MAX_COLD_START_SECONDS, max(0, round(seconds_between(start, end))))
