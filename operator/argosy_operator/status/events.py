"""Selects the changes of a status that become Kubernetes Events.

Must not know how a status is computed, nor how events are posted. Invariant: a change of a message alone is no event,
since messages count replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal

from msgspec import Struct

from argosy_resource.types import Condition

EventType = Literal["Normal", "Warning"]

_PROGRESS: Final[Mapping[str, EventType]] = {
    "RolloutHalted": "Warning",
    "WaitingForCapacity": "Warning",
    "NoGPUForSurge": "Normal",
    "WaitingForTurn": "Normal",
}
"""Reasons of Progressing that become an event, and its type."""
_FETCH: Final[Mapping[str, tuple[EventType, str]]] = {
    "Fetching": ("Normal", "ModelFetching"),
    "Cached": ("Normal", "ModelCached"),
    "FetchFailed": ("Warning", "ModelFetchFailed"),
    "StoreLocked": ("Warning", "ModelStoreLocked"),
}
"""Reasons of ModelCached that become an event, with its type and reason."""


class Event(Struct, frozen=True):
    """An Event before it is posted."""

    type: EventType
    reason: str
    message: str


def events_between(before: Iterable[Condition], after: Iterable[Condition]) -> list[Event]:
    """Events for the conditions whose status or reason changed between two statuses."""
    old = {each.type: each for each in before}
    found: dict[str, Event] = {}
    for each in after:
        previous = old.get(each.type)
        was = (previous.status, previous.reason) if previous is not None else ("Unknown", "")
        if was == (each.status, each.reason):
            continue
        kind: EventType | None = None
        reason = each.reason
        if each.type == "Degraded" and each.status == "True":
            kind = "Warning"
        elif each.type == "Ready" and each.status == "True" != was[0]:
            kind = "Normal"
        elif each.type == "Progressing" and each.reason in _PROGRESS:
            kind = _PROGRESS[each.reason]
        elif each.type == "ModelCached" and each.reason in _FETCH:
            kind, reason = _FETCH[each.reason]
        if kind is not None:
            found[reason] = Event(kind, reason, each.message)
    return list(found.values())
