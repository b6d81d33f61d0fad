"""Selects the changes of a status that become Kubernetes Events.

Must not know how a status is computed, nor how events are posted. Invariants: a change of a message alone is no event,
since messages count replicas; a service that becomes ready, stops being ready, or recovers has one, and so has a
replica that finds no node or whose volumes are not mounted, each number that spec.scaling decides, and each step of a
canary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal

from msgspec import Struct

from argosy_resource.types import Condition, InferenceServiceStatus

EventType = Literal["Normal", "Warning"]

_PROGRESS: Final[Mapping[str, EventType]] = {
    "RolloutHalted": "Warning",
    "WaitingForCapacity": "Warning",
    "NoGPUForSurge": "Normal",
    "NoRoomForSurge": "Normal",
    "CanaryStarting": "Normal",
    "CanaryAnalyzing": "Normal",
    "CanaryHeld": "Normal",
    "CanaryPromoting": "Normal",
    "WaitingForTurn": "Normal",
    "Paused": "Normal",
}
"""Reasons of Progressing that become an event, and its type."""
_PLANNED: Final = frozenset(
    {
        "RollingOut",
        "Untried",
        "Paused",
        "WaitingForTurn",
        "CanaryStarting",
        "CanaryAnalyzing",
        "CanaryHeld",
        "CanaryPromoting",
    }
)
"""Reasons for which a service that was ready is not any more because somebody has changed it."""
_WORKLOAD: Final[Mapping[str, EventType]] = {
    "Unschedulable": "Normal",
    "SchedulingGated": "Normal",
    "VolumesNotMounted": "Warning",
}
"""Reasons of WorkloadReady that become an event, and its type. An autoscaler takes minutes to add a node; if none
comes, Degraded has a Warning."""
_WAITS_FOR_GPU: Final = frozenset({"WaitingForCapacity", "NoGPUForSurge", "NoRoomForSurge"})
"""Reasons of Progressing that have an event themselves, and say that a replica finds no node."""
_RECOVERED: Final = "Recovered"
_FETCH: Final[Mapping[str, tuple[EventType, str]]] = {
    "Fetching": ("Normal", "ModelFetching"),
    "Cached": ("Normal", "ModelCached"),
    "FetchFailed": ("Warning", "ModelFetchFailed"),
    "StoreLocked": ("Warning", "ModelStoreLocked"),
}
"""Reasons of ModelCached that become an event, with its type and reason."""
_TOLD_BY_FETCH: Final = frozenset(reason for _, reason in _FETCH.values())
"""Reasons of Degraded whose end has an event of its own: the fetch goes on, or is done."""


_CRASHES: Final = frozenset({"CrashLoopBackOff", "ContainerExited"})
"""Reasons of Degraded between which an engine that exits again and again alternates with each attempt."""


class Event(Struct, frozen=True):
    """An Event before it is posted."""

    type: EventType
    reason: str
    message: str


def events_of_change(before: InferenceServiceStatus, after: InferenceServiceStatus) -> list[Event]:
    """Events for what changed between two statuses of a service."""
    found = events_between(before.conditions, after.conditions)
    scaled, scaling = before.scaling, after.scaling
    if scaled is not None and scaling is not None and scaled.time and scaled.wanted != scaling.wanted:
        message = f"from {scaled.wanted} to {scaling.wanted} replicas: {scaling.message or scaling.reason}"
        found.append(Event("Normal", "Scaled", message))
    was, rollout = before.rollout, after.rollout
    if (
        was is not None
        and rollout is not None
        and was.revision == rollout.revision
        and was.step != rollout.step
    ):
        message = f"revision {rollout.revision}: step {rollout.step} of {rollout.steps}"
        found.append(Event("Normal", "CanaryStep", message))
    return found


def events_between(before: Iterable[Condition], after: Iterable[Condition]) -> list[Event]:
    """Events for the conditions whose status or reason changed between two statuses."""
    old, after = {each.type: each for each in before}, tuple(after)
    is_surging = any(each.type == "Progressing" and each.reason in _WAITS_FOR_GPU for each in after)
    found: dict[str, Event] = {}
    for each in after:
        previous = old.get(each.type)
        was = (previous.status, previous.reason) if previous is not None else ("Unknown", "")
        if was == (each.status, each.reason):
            continue
        kind: EventType | None = None
        reason = each.reason
        if each.type == "Degraded" and each.status == "True":
            kind = None if was[0] == "True" and {was[1], each.reason} <= _CRASHES else "Warning"
        elif each.type == "Degraded" and was[0] == "True" and was[1] not in _TOLD_BY_FETCH:
            kind, reason = "Normal", _RECOVERED
        elif each.type == "Ready" and each.status == "True":
            kind = "Normal"
        elif each.type == "Ready" and was[0] == "True":
            kind = "Normal" if each.reason in _PLANNED else "Warning"
        elif each.type == "Progressing" and each.reason in _PROGRESS:
            kind = _PROGRESS[each.reason]
        elif each.type == "WorkloadReady" and each.reason in _WORKLOAD and not is_surging:
            kind = _WORKLOAD[each.reason]
        elif each.type == "ModelCached" and each.reason in _FETCH:
            kind, reason = _FETCH[each.reason]
        if kind is not None:
            message = each.message or f"{was[1]} is over"
            # One event for two conditions with the same reason.
            if reason not in found or (kind == "Warning" and found[reason].type == "Normal"):
                found[reason] = Event(kind, reason, message)
    return list(found.values())
