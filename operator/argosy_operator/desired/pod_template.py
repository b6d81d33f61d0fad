"""The pod template of a service's replicas, and its revision.

Owns every field of the pods but those of the model (`model_volume`): command, probes, drain, hardening, volumes, and
the merge with the user's overlay. Must not know Deployments or rollouts. Invariants: the pod satisfies the restricted
Pod Security profile whatever the resource says, except for the hostPath volume of a node cache, which an administrator
has to enable; the revision is a hash of the template, so pods are replaced if, and only if, the template changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
import xxhash

from argosy_operator.config import OperatorConfig
from argosy_operator.desired.model_volume import Manifest, ModelVolume, model_volume
from argosy_operator.names import (
    KEY_ANNOTATION,
    REVISION_LABEL,
    ROUTABLE_GATE,
    child_labels,
    child_name,
)
from argosy_resource.engine_address import API_KEY_ENV, ENGINE_PORT
from argosy_resource.engine_command import engine_args
from argosy_resource.pod_overlay import ENGINE_CONTAINER, VOLUME_PREFIX, Volume
from argosy_resource.schema_types import quantity_text
from argosy_resource.types import InferenceService

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
    spec, model = service.spec, model_volume(service, config)
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
        "containers": [_engine_container(service, config, model)],
        "volumes": _volumes(service, model),
        **_present(
            initContainers=_init_containers(service, config, model),
            nodeSelector={**model.node_selector, **placement.node_selector},
            tolerations=[_builtins(toleration) for toleration in placement.tolerations],
            priorityClassName=placement.priority_class_name,
            imagePullSecrets=_image_pull_secrets(service, config, model),
        ),
    }


def _image_pull_secrets(
    service: InferenceService, config: OperatorConfig, model: ModelVolume
) -> list[Manifest]:
    own = [secret.name for secret in service.spec.pod_template.spec.image_pull_secrets]
    names = dict.fromkeys((*config.image_pull_secrets, *own, *model.image_pull_secrets))
    return [{"name": name} for name in names]


def _init_containers(service: InferenceService, config: OperatorConfig, model: ModelVolume) -> list[Manifest]:
    """Never `spec.engine.image`: `fetch-model` writes to a store that other services read, and has a Secret that the
    author of a resource need not be able to read."""
    if model.fetch is None:
        return []
    common = _any_container(config.engine_image, config)
    resources = _resources(service, gpu=False)
    return [{**common, "resources": resources, **model.fetch, "args": _literal(model.fetch["args"])}]


def _any_container(image: str, config: OperatorConfig) -> Manifest:
    """What all containers of the pod have in common."""
    return {
        "image": image,
        "imagePullPolicy": config.image_pull_policy,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
        },
        # The last lines of a failed program become its termination message, and so the message of our conditions.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _engine_container(service: InferenceService, config: OperatorConfig, model: ModelVolume) -> Manifest:
    drain = service.spec.rollout.drain_seconds
    return {
        **_any_container(service.spec.engine.image or config.engine_image, config),
        "name": ENGINE_CONTAINER,
        "args": _literal(engine_args(service, model=model.model, download_dir=model.download_dir)),
        "env": _env(service, model),
        "ports": [{"name": "http", "containerPort": ENGINE_PORT, "protocol": "TCP"}],
        "startupProbe": _probe("/ready", period=1, failures=_STARTUP_SECONDS),
        "readinessProbe": _probe("/ready", period=2, failures=3),
        # Generous: a long prefill on a loaded node must not be mistaken for a dead engine.
        "livenessProbe": _probe("/health", period=10, failures=6),
        "resources": _resources(service, gpu=True),
        "volumeMounts": _volume_mounts(service, model),
        # The sleep action of the kubelet needs no shell in the image; zero seconds are not allowed
        # everywhere.
        **_present(lifecycle={"preStop": {"sleep": {"seconds": drain}}} if drain else None),
    }


def _literal(args: Iterable[str]) -> list[str]:
    """Arguments that Kubernetes passes on as they are. It expands $(NAME), so that a source could name a variable with
    a key in it; $$ is one $."""
    return [arg.replace("$", "$$") for arg in args]


def _probe(path: str, *, period: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _env(service: InferenceService, model: ModelVolume) -> list[Manifest]:
    """The operator's variables, then the user's, merged by name: the overlay wins over spec.engine.env."""
    secret = {"secretKeyRef": {"name": key_secret_name(service), "key": API_KEY_ENV}}
    own = [
        {"name": API_KEY_ENV, "valueFrom": secret},
        {"name": "HOME", "value": HOME},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        *({"name": name, "value": value} for name, value in model.env.items()),
    ]
    users = {variable.name: _builtins(variable) for variable in service.spec.engine.env}
    for container in service.spec.pod_template.spec.containers:
        users |= {variable.name: _builtins(variable) for variable in container.env}
    return [*own, *users.values()]


def _volumes(service: InferenceService, model: ModelVolume) -> list[Manifest]:
    own: list[Manifest] = [
        {"name": "argosy-tmp", "emptyDir": {}},
        {"name": "argosy-home", "emptyDir": {}},
        {"name": "argosy-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
    ]
    return [*own, *model.volumes, *map(_volume, service.spec.pod_template.spec.volumes)]


def _volume(volume: Volume) -> Manifest:
    """A volume of the overlay."""
    manifest: Manifest = _builtins(volume)
    if volume.empty_dir is not None and volume.empty_dir.size_limit is not None:
        manifest["emptyDir"]["sizeLimit"] = quantity_text(volume.empty_dir.size_limit)
    return manifest


def _volume_mounts(service: InferenceService, model: ModelVolume) -> list[Manifest]:
    """The engine's mounts. The CRD refuses mounts of our volumes in the overlay; a resource that was stored before it
    did so must not get them either."""
    own: list[Manifest] = [
        {"name": "argosy-tmp", "mountPath": "/tmp"},  # noqa: S108 - a path in the pod
        {"name": "argosy-home", "mountPath": HOME},
        {"name": "argosy-shm", "mountPath": "/dev/shm"},  # noqa: S108 - a path in the pod
    ]
    users = [
        _builtins(mount)
        for container in service.spec.pod_template.spec.containers
        for mount in container.volume_mounts
        if not mount.name.startswith(VOLUME_PREFIX)
    ]
    return [*own, *model.mounts, *users]


def _resources(service: InferenceService, *, gpu: bool) -> Manifest:
    resources = service.spec.resources
    memory = quantity_text(resources.memory)
    requests = _present(cpu=quantity_text(resources.cpu), memory=memory)
    limits = _present(memory=memory)
    if gpu and resources.gpu is not None:
        requests[resources.gpu.resource_name] = limits[resources.gpu.resource_name] = str(service.spec.gpus)
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
