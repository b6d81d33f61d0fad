"""The pod template of a service's replicas, and its revision.

Owns every field of the pods: command, probes, drain, hardening, volumes, and the merge with the user's overlay. Must
not know Deployments or rollouts. Invariants: the pod satisfies the restricted Pod Security profile whatever the
resource says; the revision is a hash of the template, so pods are replaced if, and only if, the template changes.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import xxhash

from argosy_operator.config import OperatorConfig
from argosy_operator.names import (
    KEY_ANNOTATION,
    REVISION_LABEL,
    ROUTABLE_GATE,
    child_labels,
    child_name,
)
from argosy_resource.engine_address import API_KEY_ENV, ENGINE_PORT
from argosy_resource.engine_command import claim_name, engine_args
from argosy_resource.model_source import MODEL_MOUNT
from argosy_resource.overlay import ENGINE_CONTAINER
from argosy_resource.types import InferenceService

Manifest = dict[str, Any]

USER_ID: Final = 10001
"""User of the images. Numeric, because the kubelet cannot check a user name for runAsNonRoot."""
HOME: Final = "/home/argosy"

_TERMINATION_MARGIN_S: Final = 15
"""Seconds between the engine's own deadline and the kubelet's kill, to close streams and free device memory."""
_STARTUP_SECONDS: Final = 3600
"""Longest time that loading weights from a slow volume may take; until then no other probe runs."""


def key_secret_name(service: InferenceService) -> str:
    """Name of the Secret with the engines' internal key."""
    return child_name(service, "engine-key")


def pod_template(
    service: InferenceService, config: OperatorConfig, *, key_digest: str
) -> tuple[Manifest, str]:
    """The template, labelled with its revision, and the revision."""
    overlay = service.spec.pod_template
    metadata = {
        "labels": {**overlay.metadata.labels, **child_labels(service)},
        "annotations": {**overlay.metadata.annotations, KEY_ANNOTATION: key_digest},
    }
    template: Manifest = {"metadata": metadata, "spec": _pod_spec(service, config)}
    digest = xxhash.xxh3_64_hexdigest(msgspec.json.encode(template, order="deterministic"))
    revision = digest[:10]
    metadata["labels"][REVISION_LABEL] = revision
    return template, revision


def _pod_spec(service: InferenceService, config: OperatorConfig) -> Manifest:
    spec = service.spec
    placement = spec.placement
    grace = spec.rollout.drain_seconds + spec.engine.shutdown_timeout_seconds + _TERMINATION_MARGIN_S
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "readinessGates": [{"conditionType": ROUTABLE_GATE}],
        "terminationGracePeriodSeconds": grace,
        "containers": [_container(service, config)],
        "volumes": _volumes(service),
        **_present(
            nodeSelector=dict(placement.node_selector),
            tolerations=[_builtins(toleration) for toleration in placement.tolerations],
            priorityClassName=placement.priority_class_name,
            imagePullSecrets=_image_pull_secrets(service, config),
        ),
    }


def _image_pull_secrets(service: InferenceService, config: OperatorConfig) -> list[Manifest]:
    own = [secret.name for secret in service.spec.pod_template.spec.image_pull_secrets]
    return [{"name": name} for name in dict.fromkeys((*config.image_pull_secrets, *own))]


def _container(service: InferenceService, config: OperatorConfig) -> Manifest:
    spec = service.spec
    drain = spec.rollout.drain_seconds
    return {
        "name": ENGINE_CONTAINER,
        "image": spec.engine.image or config.engine_image,
        "imagePullPolicy": config.image_pull_policy,
        "args": engine_args(service),
        "env": _env(service),
        "ports": [{"name": "http", "containerPort": ENGINE_PORT, "protocol": "TCP"}],
        "startupProbe": _probe("/ready", period=1, failures=_STARTUP_SECONDS),
        "readinessProbe": _probe("/ready", period=2, failures=3),
        # Generous: a long prefill on a loaded node must not be mistaken for a dead engine.
        "livenessProbe": _probe("/health", period=10, failures=6),
        "resources": _resources(service),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
        },
        # The last lines of a failed engine become its termination message, and so the message of our conditions.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _volume_mounts(service),
        # The sleep action of the kubelet needs no shell in the image; zero seconds are not allowed
        # everywhere.
        **_present(lifecycle={"preStop": {"sleep": {"seconds": drain}}} if drain else None),
    }


def _probe(path: str, *, period: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _env(service: InferenceService) -> list[Manifest]:
    """The operator's variables, then the user's, merged by name: the overlay wins over spec.engine.env."""
    secret = {"secretKeyRef": {"name": key_secret_name(service), "key": API_KEY_ENV}}
    own = [
        {"name": API_KEY_ENV, "valueFrom": secret},
        {"name": "HOME", "value": HOME},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]
    users = {variable.name: _builtins(variable) for variable in service.spec.engine.env}
    for container in service.spec.pod_template.spec.containers:
        users |= {variable.name: _builtins(variable) for variable in container.env}
    return [*own, *users.values()]


def _volumes(service: InferenceService) -> list[Manifest]:
    own: list[Manifest] = [
        {"name": "argosy-tmp", "emptyDir": {}},
        {"name": "argosy-home", "emptyDir": {}},
        {"name": "argosy-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
    ]
    claim = claim_name(service.spec.model.source)
    if claim is not None:
        own.append({"name": "argosy-model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    return [*own, *(_builtins(volume) for volume in service.spec.pod_template.spec.volumes)]


def _volume_mounts(service: InferenceService) -> list[Manifest]:
    own: list[Manifest] = [
        {"name": "argosy-tmp", "mountPath": "/tmp"},  # noqa: S108 - a path in the pod
        {"name": "argosy-home", "mountPath": HOME},
        {"name": "argosy-shm", "mountPath": "/dev/shm"},  # noqa: S108 - a path in the pod
    ]
    if claim_name(service.spec.model.source) is not None:
        own.append({"name": "argosy-model", "mountPath": MODEL_MOUNT, "readOnly": True})
    containers = service.spec.pod_template.spec.containers
    return [*own, *(_builtins(mount) for container in containers for mount in container.volume_mounts)]


def _resources(service: InferenceService) -> Manifest:
    resources = service.spec.resources
    requests = _present(cpu=resources.cpu, memory=resources.memory)
    limits = _present(memory=resources.memory)
    if resources.gpu is not None:
        requests[resources.gpu.resource_name] = limits[resources.gpu.resource_name] = str(resources.gpu.count)
    return _present(requests=requests, limits=limits)


def _present(**fields: Any) -> Manifest:
    """The fields that are not empty."""
    return {name: value for name, value in fields.items() if value not in (None, {}, [])}


def _builtins(value: Any) -> Any:
    """Convert a struct to the Kubernetes field of the same shape, without the fields that the user left out."""
    return _without_none(msgspec.to_builtins(value))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: _without_none(nested) for name, nested in value.items() if nested is not None}
        return {name: nested for name, nested in kept.items() if nested != []}
    if isinstance(value, list):
        return [_without_none(nested) for nested in value]
    return value
