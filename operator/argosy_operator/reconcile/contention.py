"""Contention: children that others change again and again, which are left alone, and those that cannot be written,
which are tried again with back-off.

Owns the memory of them, and how often a pod template is repaired. Must not write anything. Invariants: an object that
another writer changes as soon as it is applied (a mutating webhook) is not written over and over; a controller that
changes a pod template again some time after each repair does not get the replicas rolled out each time; a write that
failed is not repeated sooner because a pod has changed; what is noted of an object that is gone is forgotten when
another one is noted, so there are never more notes than objects; a failure that nothing has come back to is forgotten
after a minute.
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
from argosy_operator.errors import OperatorError
from argosy_operator.kinds import Kind, Name, Object, kind_of, object_name
from argosy_operator.names import APPLIED_ANNOTATION, REVISION_LABEL
from argosy_operator.reconcile.workqueue import BACKOFF_MAX, backoff

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


class Failure(Struct, frozen=True, kw_only=True):
    """A write that was refused, or was not answered."""

    sent: str
    """Hash of the manifest."""
    contents: str
    """Hash of the object to which it was sent."""
    error: OperatorError
    number: int
    """How many of these there have been in a row, with this one."""
    retry_at: float


class Contention:
    """What is known of other writers of children, and of writes that failed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._contested: dict[_Key, tuple[str, str]] = {}
        """Objects that are left alone until either changes: hash of what was sent, and of what it led to. (Not its
        generation, which a Service does not have.)"""
        self._repairs: dict[_Key, Repair] = {}
        """The last one of each object."""
        self._failures: dict[_Key, Failure] = {}
        """The last write of each object, of those that failed."""

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

    def failure(self, wanted: Object, live: Mapping[str, Any] | None) -> Failure | None:
        """The failed write of this manifest to this object, until it is due again; None if it may be written now."""
        found = self._failures.get(_key(wanted))
        if found is None or asyncio.get_running_loop().time() >= found.retry_at:
            return None
        is_same = (found.sent, found.contents) == (applied_hash(wanted), _contents(wanted, live))
        return found if is_same else None

    def note_failure(self, wanted: Object, live: Mapping[str, Any] | None, error: OperatorError) -> None:
        """Note that a write has failed: it is due again after a pause, as a key of the queue is."""
        now, key = asyncio.get_running_loop().time(), _key(wanted)
        old = [each for each, found in self._failures.items() if now >= found.retry_at + BACKOFF_MAX]
        for each in old:
            del self._failures[each]
        before, sent, contents = self._failures.get(key), applied_hash(wanted), _contents(wanted, live)
        is_again = before is not None and (before.sent, before.contents) == (sent, contents)
        number = before.number + 1 if before is not None and is_again else 1
        self._failures[key] = Failure(
            sent=sent, contents=contents, error=error, number=number, retry_at=now + backoff(number - 1)
        )

    def note_written(self, wanted: Object) -> None:
        """Note that a write has succeeded, or was not needed."""
        self._failures.pop(_key(wanted), None)

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
