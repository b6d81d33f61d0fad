"""What the operator keeps of an object in memory: what it reads.

Owns the fields that are kept of each kind, and how large they may be. Must not know the cache. Invariants: of a pod
some kilobytes are kept, of a service at most MAX_SPEC and its metadata, of an object that only has the labels of a
child its metadata, because a tenant chooses how many there are and what they contain; whatever they contain, what is
kept of one takes no more than MAX_MEMORY, or nothing but its name is; what is kept of an object that was cut already is
the same.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import msgspec

from argosy_operator.kinds import INFERENCE_SERVICES, PODS, STATEFUL_SETS, Kind, Object, controller_of
from argosy_operator.names import NODE_TEMPLATE_ANNOTATION
from argosy_operator.observed.pod import DELETION_COST_ANNOTATION, NODE_TEMPLATE_HASH_ENV
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
    """A pod as far as `observed.pod` and the watches of routers and fetches read it. Equal texts of pods are one in
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
