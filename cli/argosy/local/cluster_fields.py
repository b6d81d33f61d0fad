"""Fields of a resource that have no effect in a local fleet, and those without which its engines would not be the same.

Owns which fields these are. Must not know processes. Invariant: a field is named if, and only if, it differs from its
default and nothing of the local fleet reads it. An engine, and the fetch of its model, read the variables and files
that they are given, so these fields are refused; the others concern where and how pods run.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from argosy_resource.model_spec import Model
from argosy_resource.resources import Gpu, Resources
from argosy_resource.types import InferenceService, InferenceServiceSpec

_FIELDS: Final[dict[str, str]] = {
    "model.cache": "this machine's store is used",
    "engine.image": "",
    "engine.upgradePolicy": "",
    "resources.gpu.resourceName": "",
    "resources.cpu": "",
    "resources.cpuLimit": "",
    "resources.memory": "",
    "resources.sharedMemory": "",
    "resources.claims": "",
    "placement.nodeSelector": "",
    "placement.tolerations": "",
    "placement.affinity": "",
    "placement.topologySpreadConstraints": "",
    "placement.priorityClassName": "",
    "placement.runtimeClassName": "",
    "placement.schedulerName": "",
    "placement.serviceAccountName": "",
    "podDisruptionBudget.maxUnavailable": "",
    "scaling": "spec.replicas is used",
    "rollout.canary": "a change is rolled out at once",
    "rollout.drainSeconds": "",
    "rollout.inPlaceAfterSeconds": "",
    "rollout.progressDeadlineSeconds": "",
    "podTemplate.metadata.labels": "",
    "podTemplate.metadata.annotations": "",
    "podTemplate.spec.volumes": "",
    "podTemplate.spec.imagePullSecrets": "",
}
"""Paths below `spec`, each with what applies instead, if anything does."""
_ENGINE: Final = "spec.podTemplate.spec.containers[engine]"


def cluster_fields(service: InferenceService) -> tuple[str, ...]:
    """The fields that the resource sets and a local fleet ignores, with what applies instead."""
    spec = msgspec.to_builtins(service.spec)
    defaults = msgspec.to_builtins(
        InferenceServiceSpec(model=Model(source=service.spec.model.source), resources=Resources(gpu=Gpu()))
    )
    found = [path for path in _FIELDS if _value(spec, path) not in (None, _value(defaults, path))]
    return tuple(_with_note(path) for path in found)


def missing_here(service: InferenceService) -> tuple[str, ...]:
    """What the resource gives its engines, and the fetch of its model, that a local fleet has not: files of volumes,
    a token, and values of Secrets and ConfigMaps, unless these are optional. Each with the remedy."""
    found: list[str] = []
    if secret := service.spec.model.secret_ref:
        found.append(
            f"spec.model.secretRef: this machine has no Secret {secret.name!r}; leave it out here, and set the "
            "variables that are its keys, such as HF_TOKEN, in the environment of `argosy up`"
        )
    if service.spec.placement.automount_service_account_token:
        found.append(
            "spec.placement.automountServiceAccountToken: this machine has no account and no token; leave it out here"
        )
    for container in service.spec.pod_template.spec.containers:
        found += [
            f"{_ENGINE}.volumeMounts: {mount.name} at {mount.mount_path}: no volume is mounted on this machine; "
            "leave the mount out here, and name a path of this machine where the engine reads it"
            for mount in container.volume_mounts
        ]
        for variable in container.env:
            source = variable.value_from
            if source is None:
                continue
            key, kind = source.secret_key_ref or source.config_map_key_ref, "ConfigMap"
            if source.secret_key_ref is not None:
                kind = "Secret"
            if key is not None and not key.optional:
                found.append(
                    f"{_ENGINE}.env: {variable.name} comes from the {kind} {key.name!r}, which this machine has not; "
                    "give it as `value` here, or make it `optional: true`"
                )
    return tuple(found)


def _with_note(path: str) -> str:
    note = _FIELDS.get(path)
    return f"spec.{path} ({note})" if note else f"spec.{path}"


def _value(spec: dict[str, Any], path: str) -> object:
    """The value at a path, None if there is none."""
    value: Any = spec
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
