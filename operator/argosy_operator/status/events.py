"""Selects the changes of a status that become Kubernetes Events.

Must not know how a status is computed, nor how events are posted. Invariant: a change of a message alone is no event,
since messages count replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from msgspec import Struct

from argosy_resource.types import Condition

_PROGRESS: Final = {
    "RolloutHalted": "Warning",
    "WaitingForCapacity": "Warning",
    "NoGPUForSurge": "Normal",
    "WaitingForTurn": "Normal",
}
"""Reasons of Progressing that become an event, and its type."""


class Event(Struct, frozen=True):
    """An Event before it is posted."""

    type: Literal["Normal", "Warning"]
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
        kind: Literal["Normal", "Warning"] | None = None
        if each.type == "Degraded" and each.status == "True":
            kind = "Warning"
        elif each.type == "Ready" and each.status == "True" != was[0]:
            kind = "Normal"
        elif each.type == "Progressing" and each.reason in _PROGRESS:
            kind = "Warning" if _PROGRESS[each.reason] == "Warning" else "Normal"
        if kind is not None:
            found[each.reason] = Event(kind, each.reason, each.message)
    return list(found.values())
