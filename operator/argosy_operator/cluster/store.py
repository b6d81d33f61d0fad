"""The operator's cache of the cluster: the last version of every object it has seen, as an informer's store.

Holds resources, children and pods by kind and name; lists, events and the answers to the operator's own writes update
it. Owns which fields are kept of each kind, those that are read, and how large they may be. Must not decide anything.
Invariants: an older version never replaces a newer one; a list is the truth for its kind as of the list's resource
version, so it repairs lost events and undoes nothing that happened later; of a pod some kilobytes are kept, of a
service at most MAX_SPEC and its metadata, of an object that only has the labels of a child its metadata, because a
tenant chooses how many there are and what they contain; whatever they contain, what is kept of one takes no more than
MAX_MEMORY, or nothing but its name is; what is kept of an object that was cut already is the same.

Resource versions are compared as integers, as Kubernetes promises since 1.35 (KEP-5504) and etcd always allowed.
Versions that are not integers are compared for equality only: what events and writes say during a list request then
takes precedence over the list, since the watch continues from there.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from msgspec import Struct, field

from argosy_operator.names import (
    BUDGETS,
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    NODE_TEMPLATE_ANNOTATION,
    PODS,
    SERVICES,
    STATEFUL_SETS,
    Kind,
    Name,
    Object,
    controller_of,
    object_name,
)
from argosy_operator.pod import DELETION_COST_ANNOTATION, NODE_TEMPLATE_HASH_ENV
from argosy_resource.engine_command import SERVICE_LABEL
from argosy_resource.types import GROUP, KIND

MAX_SPEC: Final = 256 * 1024
"""Bytes of a service's spec as JSON. The pods of one with as many variables and annotations would hardly start: a
process gets 2 MiB of both arguments and variables, a pod 256 KiB of annotations."""
MAX_MEMORY: Final = 1024 * 1024
"""Bytes of memory, roughly, that one object may take; half of it for a service. Many small values take ten times as
much as their JSON."""
_OF_CONTAINER: Final = 160
"""Bytes of memory of an object or list, besides what it holds."""
_OF_VALUE: Final = 50
"""Of a text besides its characters, of a number and of a place in an object."""
_SHARED_LENGTH: Final = 128
"""Characters of texts that pods may have in common: times, images, labels, reasons."""
LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
_OVERSIZE: Final = "oversizeBytes"
"""The only field of a spec that was too large."""
_OVERSIZE_MEMORY: Final = "oversizeMemory"
"""The only field of the spec of a service that would take too much memory."""
_IDENTITY: Final = (
    *("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp"),
)
"""Fields of the metadata that are kept of what takes too much memory."""
_METADATA: Final = (*_IDENTITY, "ownerReferences", "deletionGracePeriodSeconds")
"""Fields that are kept of pods and children."""
_LABELS: Final = (f"{GROUP}/", "app.kubernetes.io/")
"""Beginnings of the labels that are kept of these."""
_CHILD_ANNOTATIONS: Final = f"{GROUP}/"
_POD_ANNOTATIONS: Final = (NODE_TEMPLATE_ANNOTATION, DELETION_COST_ANNOTATION)


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

    def adopt(
        self, listing: Listing, objects: Iterable[Object], version: str, *, are_kept: bool = False
    ) -> list[Object]:
        """Replace a kind's objects by a list of `version`. Returns the objects that had changed unnoticed; lists that
        were begun earlier, and are not adopted yet, say nothing about these any more. `are_kept`: `kept_fields` has
        made them, which takes 30 us for a pod."""
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
                self._put(kind, name, obj, is_kept=are_kept)
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

    def _put(self, kind: Kind, name: Name, obj: Object, *, is_kept: bool = False) -> None:
        if name in self._objects[kind]:
            self._drop(kind, name)
        stored = self._objects[kind][name] = obj if is_kept else kept_fields(kind, obj)
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


def kept_fields(kind: Kind, obj: Object) -> Object:
    """The object, without what nobody reads."""
    kept = _pod(obj) if kind is PODS else _service(obj) if kind is INFERENCE_SERVICES else _child(kind, obj)
    if kind is INFERENCE_SERVICES:
        if (size := len(msgspec.json.encode(obj.get("spec")))) > MAX_SPEC:
            kept["spec"] = {_OVERSIZE: size}
        memory = _memory({**kept, "status": {}})  # which is the operator's own
        if memory <= MAX_MEMORY // 2:  # its Deployment has all that it says, and more
            return kept
        kept["spec"] = {_OVERSIZE_MEMORY: memory}
    else:
        if _memory(kept) <= MAX_MEMORY:
            return kept
        kept |= {name: {} for name in ("spec", "status") if name in kept}
        if kind is PODS:
            kept.pop("spec", None)
    kept["metadata"] = {name: kept["metadata"][name] for name in _IDENTITY if name in kept["metadata"]}
    return kept


def _shared(value: Any) -> Any:
    """An equal value whose names and short texts are the same objects as those of others."""
    if isinstance(value, dict):
        return {sys.intern(name): _shared(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_shared(each) for each in value]
    return sys.intern(value) if isinstance(value, str) and len(value) <= _SHARED_LENGTH else value


def _memory(obj: Object) -> int:
    """Bytes of memory that an object takes, roughly; no exact number beyond MAX_MEMORY."""
    memory = 0
    left: list[Any] = [obj]
    while left and memory <= MAX_MEMORY:
        value = left.pop()
        if isinstance(value, dict):
            memory += _OF_CONTAINER + sum(map(_text_memory, value))
            left += value.values()
        elif isinstance(value, list | tuple):
            memory += _OF_CONTAINER
            left += value
        else:
            memory += _text_memory(value) if isinstance(value, str) else _OF_VALUE
    return memory


def _text_memory(text: str) -> int:
    """Bytes of memory of a text. Python keeps all of its characters as wide as the widest one needs: four bytes each if
    there is one emoji."""
    # With another character it is a new text: what an encoder has noted beside this one does not count.
    return _OF_VALUE + len(text) if text.isascii() else sys.getsizeof(f"{text} ")


def oversize_problem(obj: Object) -> str:
    """Why nothing is done for a service whose spec is too large to be kept; empty if it is not."""
    spec = obj.get("spec") or {}
    if _OVERSIZE_MEMORY in spec:
        return (
            "the resource has too many values, labels or annotations to be kept in memory; leave out what it does not "
            "need, or move files and variables into a ConfigMap"
        )
    size = spec.get(_OVERSIZE)
    if size is None:
        return ""
    return (
        f"spec has {size} bytes, of which the operator takes {MAX_SPEC}; move large variables and annotations into a "
        "ConfigMap that podTemplate mounts"
    )


def _pod(obj: Object) -> Object:
    """A pod as far as `pod.read_pod` and the watches of routers and fetches read it. Equal texts of pods are one in
    memory."""
    kept: Object = {name: obj[name] for name in ("apiVersion", "kind", "status") if name in obj}
    kept["metadata"] = metadata = _metadata(obj)
    if annotations := obj["metadata"].get("annotations"):
        metadata["annotations"] = {
            name: annotations[name] for name in _POD_ANNOTATIONS if name in annotations
        }
    if spec := obj.get("spec"):
        kept["spec"] = {
            "nodeName": spec.get("nodeName", ""),
            "containers": [
                {
                    "name": each["name"],
                    "env": [env for env in each.get("env") or () if env["name"] == NODE_TEMPLATE_HASH_ENV],
                }
                for each in spec.get("containers") or ()
            ],
            "initContainers": [{"name": each["name"]} for each in spec.get("initContainers") or ()],
        }
        if gates := spec.get("schedulingGates"):
            kept["spec"]["schedulingGates"] = [{"name": each["name"]} for each in gates]
    shared: Object = _shared(kept)
    return shared


def _metadata(obj: Object) -> Object:
    """The metadata of a pod or child without annotations."""
    given = obj["metadata"]
    kept: Object = {name: given[name] for name in _METADATA if name in given}
    if labels := given.get("labels"):
        kept["labels"] = {name: labels[name] for name in labels if name.startswith(_LABELS)}
    return kept


def _child(kind: Kind, obj: Object) -> Object:
    """A child of a service. What only has a child's labels is neither written nor read, so its spec is left out."""
    kept = {**obj, "metadata": _metadata(obj)}
    if annotations := obj["metadata"].get("annotations"):
        kept["metadata"]["annotations"] = {
            name: annotations[name] for name in annotations if name.startswith(_CHILD_ANNOTATIONS)
        }
    if not _is_controlled(kind, obj):
        kept |= {name: {} for name in ("spec", "status") if name in obj}
    return kept


def _is_controlled(kind: Kind, obj: Object) -> bool:
    """Whether a service, or the pod of a replica, controls the object."""
    return bool(controller_of(obj).get("kind") == ("Pod" if kind is STATEFUL_SETS else KIND))


def _service(obj: Object) -> Object:
    """The service without the manifest that kubectl notes in it, and without managedFields, which are often larger than
    the rest; of those only who used the scale subresource is kept, and when, and when the last other edit was. Nor are
    finalizers kept: kopf takes away its own one, which a tenant may set and the operator has no permission to change,
    and asks for it until it succeeds, while what happens to the object waits in memory."""
    metadata = {
        name: value for name, value in obj["metadata"].items() if name not in ("managedFields", "finalizers")
    }
    if LAST_APPLIED in metadata.get("annotations", {}):
        metadata["annotations"] = {
            name: value for name, value in metadata["annotations"].items() if name != LAST_APPLIED
        }
    scalers = [
        {"manager": entry.get("manager", ""), "subresource": "scale", "time": entry.get("time", "")}
        for entry in obj["metadata"].get("managedFields", ())
        if entry.get("subresource") == "scale"
    ]
    if scalers:
        edits = [
            each.get("time", "") for each in obj["metadata"]["managedFields"] if not each.get("subresource")
        ]
        metadata["managedFields"] = [*scalers, *({"time": time} for time in sorted(edits)[-1:])]
    return {**obj, "metadata": metadata}
