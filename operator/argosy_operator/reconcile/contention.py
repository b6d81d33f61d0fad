"""Contention: children that others change again and again, which are left alone.

Owns the memory of them, and how often a pod template is repaired. Must not write anything. Invariants: an object that
another writer changes as soon as it is applied (a mutating webhook) is not written over and over; a controller that
changes a pod template again some time after each repair does not get the replicas rolled out each time; what is noted
of an object that is gone is forgotten when another one is noted, so there are never more notes than objects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import xxhash
from msgspec import Struct

from argosy_operator.cluster.kept_fields import kept_fields
from argosy_operator.cluster.store import Store
from argosy_operator.desired.drift import contains
from argosy_operator.kinds import Kind, Name, Object, kind_of, object_name
from argosy_operator.names import APPLIED_ANNOTATION, REVISION_LABEL

MAX_REPAIRS: Final = 3
"""How often a pod template is given back what it should be, if others change it in the same way each time."""
REPAIR_WINDOW_S: Final = 3600.0
"""A repair that is longer ago does not count: people try things out, controllers do not pause for so long."""

_Key = tuple[Kind, Name]


class Repair(Struct, frozen=True):
    """A pod template that others had changed since it was applied is given back what it should be."""

    state: str
    """Hash of what was found, and of what was wanted."""
    number: int
    """How many of these there have been in a row, with this one."""
    time: float

    @property
    def is_given_up(self) -> bool:
        return self.number > MAX_REPAIRS


class Contention:
    """What is known of other writers of children."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._contested: dict[_Key, tuple[str, str]] = {}
        """Objects that are left alone until either changes: hash of what was sent, and of what it led to. (Not its
        generation, which a Service does not have.)"""
        self._repairs: dict[_Key, Repair] = {}
        """The last one of each object."""

    @property
    def num_contested(self) -> int:
        """Number of objects that are left alone."""
        return len(self._contested)

    def is_left_alone(self, wanted: Object, live: Mapping[str, Any] | None) -> bool:
        """Whether applying the same manifest has led to the same object before."""
        return self._contested.get(_key(wanted)) == (applied_hash(wanted), _contents(wanted, live))

    def next_repair(self, wanted: Object, live: Mapping[str, Any] | None) -> Repair | None:
        """The repair of a pod template that others have changed since it was applied; None if nobody has."""
        found, own = ((each or {}).get("spec", {}).get("template") for each in (live, wanted))
        if live is None or own is None or _revision(found) != _revision(own) or contains(found, own):
            return None  # what the operator changes itself is no repair
        state = xxhash.xxh3_64_hexdigest(msgspec.json.encode([found, own], order="deterministic"))
        now = asyncio.get_running_loop().time()
        before = self._repairs.get(_key(wanted))
        is_again = before is not None and before.state == state and now - before.time <= REPAIR_WINDOW_S
        return Repair(state, before.number + 1 if before is not None and is_again else 1, now)

    def note_contested(self, wanted: Object, live: Mapping[str, Any]) -> None:
        """Leave the object alone until it, or the manifest, changes."""
        self._forget_gone(self._contested)
        self._contested[_key(wanted)] = applied_hash(wanted), _contents(wanted, live)

    def note_settled(self, wanted: Object, repair: Repair | None) -> None:
        """The object is as it was applied, by this repair if it was one."""
        self._contested.pop(_key(wanted), None)
        if repair is not None:
            self._forget_gone(self._repairs)
            self._repairs[_key(wanted)] = repair

    def _forget_gone(self, notes: dict[_Key, Any]) -> None:
        for key in [(kind, name) for kind, name in notes if self._store.get(kind, *name) is None]:
            del notes[key]


def applied_hash(obj: Mapping[str, Any]) -> str:
    """Hash of the manifest that was applied last; empty if there is none."""
    return str(obj["metadata"].get("annotations", {}).get(APPLIED_ANNOTATION, ""))


def _key(obj: Object) -> _Key:
    return kind_of(obj), object_name(obj)


def _revision(template: Object | None) -> str:
    return str((template or {}).get("metadata", {}).get("labels", {}).get(REVISION_LABEL, ""))


def _contents(wanted: Object, live: Mapping[str, Any] | None) -> str:
    """Hash of what the operator could have written of an object; empty if there is none."""
    if live is None:
        return ""
    kept = kept_fields(kind_of(wanted), dict(live))
    metadata = [kept["metadata"].get(name) for name in ("uid", "labels", "annotations")]
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode([metadata, kept.get("spec")], order="deterministic"))
