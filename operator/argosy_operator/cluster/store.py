"""The operator's cache of the cluster: the last version of every object it has seen, as an informer's store.

Holds resources, children and pods by kind and name; lists, events and the answers to the operator's own writes update
it. Must not decide anything. Invariants: an older version never replaces a newer one; a list is the truth for its kind
as of the list's resource version, so it repairs lost events and undoes nothing that happened later; of an object only
what is read is kept (`kept_fields`).

Resource versions are compared as integers, as Kubernetes promises since 1.35 (KEP-5504) and etcd always allowed.
Versions that are not integers are compared for equality only: what events and writes say during a list request
then takes precedence over the list, since the watch continues from there.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from msgspec import Struct, field

from argosy_operator.cluster.kept_fields import kept_fields
from argosy_operator.kinds import (
    BUDGETS,
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    PODS,
    SERVICES,
    STATEFUL_SETS,
    Kind,
    Name,
    Object,
    object_name,
)
from argosy_resource.engine_address import SERVICE_LABEL


class Listing(Struct):
    """A pending list request, and the changes of its kind that events and writes reported meanwhile."""

    kind: Kind
    namespace: str | None
    """None for all namespaces."""
    touched: set[Name] = field(default_factory=set)
    deleted: dict[Name, tuple[str, str]] = field(default_factory=dict)
    """UID of each deleted object, and the resource version of its deletion."""

    def covers(self, kind: Kind, name: Name) -> bool:
        return kind == self.kind and self.namespace in (None, name[0])


class Store:
    """Objects by kind and name."""

    def __init__(
        self,
        marks: Mapping[Kind, Callable[[Object], bool]] | None = None,
        tallied: Mapping[Kind, Callable[[Object], bool]] | None = None,
    ) -> None:
        """`marks` says of each kind which of its objects `marked` returns, and `tallied` which of them `tally` counts,
        so that nothing has to look through all of a large fleet."""
        self._marks = marks or {}
        self._tallied = tallied or {}
        self._tallies: dict[Kind, set[Name]] = {kind: set() for kind in self._tallied}
        self._marked: dict[Kind, dict[Name, Object]] = {kind: {} for kind in self._marks}
        self._objects: dict[Kind, dict[Name, Object]] = {
            kind: {} for kind in (INFERENCE_SERVICES, DEPLOYMENTS, STATEFUL_SETS, SERVICES, BUDGETS, PODS)
        }
        self._by_service: dict[tuple[Kind, Name], set[Name]] = defaultdict(set)
        self._open: list[Listing] = []

    def children(self, kind: Kind, service: Name) -> list[Object]:
        """Objects that carry the service's label, in its namespace."""
        held = self._objects[kind]
        return [held[name] for name in sorted(self._by_service.get((kind, service), ()))]

    def count_children(self, kind: Kind, service: Name) -> int:
        return len(self._by_service.get((kind, service), ()))

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return self._objects[kind].get((namespace, name))

    def all(self, kind: Kind) -> Iterator[Object]:
        return iter(list(self._objects[kind].values()))

    def count(self, kind: Kind) -> int:
        return len(self._objects[kind])

    def count_marked(self, kind: Kind) -> int:
        return len(self._marked[kind])

    def marked(self, kind: Kind) -> list[Object]:
        """The objects of a kind that are marked, the one stored first at the front."""
        return list(self._marked[kind].values())

    def tally(self, kind: Kind) -> int:
        """How many objects of a kind are tallied."""
        return len(self._tallies[kind])

    def put(self, kind: Kind, obj: Object) -> bool:
        """Store a version of an object. False if it is not newer than the stored one."""
        if kind not in self._objects:
            return False
        name = object_name(obj)
        held = self._objects[kind].get(name)
        if held is not None and _uid(held) == _uid(obj) and not _is_newer(_version(obj), _version(held)):
            return False
        self._put(kind, name, obj)
        for listing in self._open:
            if listing.covers(kind, name):
                listing.touched.add(name)
                listing.deleted.pop(name, None)
        return True

    def remove(self, kind: Kind, obj: Object) -> bool:
        """Remove a deleted object, unless another one of the same name has taken its place. `obj` comes from the watch:
        its resource version is the deletion's. False if nothing was removed."""
        name = object_name(obj)
        for listing in self._open:
            if listing.covers(kind, name):
                listing.touched.add(name)
                listing.deleted[name] = (_uid(obj), _version(obj))
        held = self._objects[kind].get(name)
        if held is None or _uid(held) != _uid(obj) or _is_known_newer(_version(held), _version(obj)):
            return False
        self._drop(kind, name)
        return True

    def forget_namespace(self, namespace: str) -> None:
        """Remove everything of a namespace that does not exist."""
        for kind, held in self._objects.items():
            for name in [each for each in held if each[0] == namespace]:
                self._drop(kind, name)

    @contextmanager
    def listing(self, kind: Kind, namespace: str | None) -> Iterator[Listing]:
        """Track events during a list request. Enter it before the list is requested; `adopt` takes the answer."""
        listing = Listing(kind, namespace)
        self._open.append(listing)
        try:
            yield listing
        finally:
            self._open.remove(listing)

    def adopt(self, listing: Listing, objects: Iterable[Object], version: str) -> list[Object]:
        """Replace a kind's objects by a list of `version`. Returns the objects that had changed unnoticed; lists that
        were begun earlier, and are not adopted yet, say nothing about these any more."""
        kind, listed, changed = listing.kind, set(), []
        for obj in objects:
            name = object_name(obj)
            listed.add(name)
            uid, deleted_at = listing.deleted.get(name, ("", ""))
            if uid == _uid(obj) and not _is_known_newer(_version(obj), deleted_at):
                continue
            held = self._objects[kind].get(name)
            if held is None or _uid(held) != _uid(obj) or _is_newer(_version(obj), _version(held)):
                is_comparable = _number(_version(obj)) is not None
                if name in listing.touched and not is_comparable:
                    continue
                if held is not None and _is_known_newer(_version(held), version):
                    continue  # another object of this name, created after the list
                self._put(kind, name, obj)
                changed.append(obj)
        for name, held in list(self._objects[kind].items()):
            if name in listed or not listing.covers(kind, name) or _is_known_newer(_version(held), version):
                continue
            if name in listing.touched and None in (_number(version), _number(_version(held))):
                continue
            self._drop(kind, name)
            changed.append(held)
        for older in itertools.takewhile(lambda each: each is not listing, self._open):
            older.touched.update(name for name in map(object_name, changed) if older.covers(kind, name))
        return changed

    def _put(self, kind: Kind, name: Name, obj: Object) -> None:
        if name in self._objects[kind]:
            self._drop(kind, name)
        stored = self._objects[kind][name] = kept_fields(kind, obj)
        if kind in self._marks and self._marks[kind](stored):
            self._marked[kind][name] = stored
        if kind in self._tallied and self._tallied[kind](stored):
            self._tallies[kind].add(name)
        service = service_of(stored)  # by which `_drop` finds it again: a large object keeps no label
        if service is not None:
            self._by_service[kind, service].add(name)

    def _drop(self, kind: Kind, name: Name) -> None:
        if kind in self._marked:
            self._marked[kind].pop(name, None)
        if kind in self._tallies:
            self._tallies[kind].discard(name)
        service = service_of(self._objects[kind].pop(name))
        if service is not None:
            names = self._by_service[kind, service]
            names.discard(name)
            if not names:
                del self._by_service[kind, service]


def service_of(obj: Mapping[str, Any]) -> Name | None:
    """Namespace and name of the InferenceService whose label an object carries."""
    label = obj["metadata"].get("labels", {}).get(SERVICE_LABEL)
    return (obj["metadata"].get("namespace", ""), label) if label else None


def _version(obj: Object) -> str:
    version: str = obj["metadata"].get("resourceVersion", "")
    return version


def _number(version: str) -> int | None:
    return int(version) if version.isascii() and version.isdigit() else None


def _is_known_newer(version: str, other: str) -> bool:
    """Whether both versions are integers, and `version` is the later one."""
    ours, theirs = _number(version), _number(other)
    return ours is not None and theirs is not None and ours > theirs


def _is_newer(version: str, other: str) -> bool:
    """Whether `version` is later than `other`; of two that cannot be compared the one received last is."""
    if _number(version) is None or _number(other) is None:
        return version != other
    return _is_known_newer(version, other)


def _uid(obj: Object) -> str:
    return obj["metadata"].get("uid", "")
