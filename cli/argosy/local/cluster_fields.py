"""Fields of a resource that have no effect in a local fleet.

Owns which fields these are. Must not know processes. Invariant: a field is named if, and only if, it differs from its
default and nothing of the local fleet reads it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from argosy_resource.types import Gpu, InferenceService, InferenceServiceSpec, Model, Resources

_FIELDS: Final[dict[str, str]] = {
    "model.secretRef": "the environment's credentials are used",
    "model.cache": "this machine's store is used",
    "engine.image": "",
    "resources.gpu.resourceName": "",
    "resources.cpu": "",
    "resources.memory": "",
    "placement.nodeSelector": "",
    "placement.tolerations": "",
    "placement.priorityClassName": "",
    "rollout.drainSeconds": "",
    "rollout.progressDeadlineSeconds": "",
    "podTemplate.metadata.labels": "",
    "podTemplate.metadata.annotations": "",
    "podTemplate.spec.volumes": "",
    "podTemplate.spec.imagePullSecrets": "",
}
"""Paths below `spec`, each with what applies instead, if anything does."""
_MOUNTS: Final = "podTemplate.spec.containers[].volumeMounts"
_REFERENCES: Final = "podTemplate.spec.containers[].env[].valueFrom"


def cluster_fields(service: InferenceService) -> tuple[str, ...]:
    """The fields that the resource sets and a local fleet ignores, with what applies instead."""
    spec = msgspec.to_builtins(service.spec)
    defaults = msgspec.to_builtins(
        InferenceServiceSpec(model=Model(source=service.spec.model.source), resources=Resources(gpu=Gpu()))
    )
    found = [path for path in _FIELDS if _value(spec, path) not in (None, _value(defaults, path))]
    containers = service.spec.pod_template.spec.containers
    if any(container.volume_mounts for container in containers):
        found.append(_MOUNTS)
    if any(variable.value_from for container in containers for variable in container.env):
        found.append(_REFERENCES)
    return tuple(_with_note(path) for path in found)


def _with_note(path: str) -> str:
    note = _FIELDS.get(path)
    return f"spec.{path} ({note})" if note else f"spec.{path}"


def _value(spec: dict[str, Any], path: str) -> object:
    """The value at a path, None if there is none."""
    value: Any = spec
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
