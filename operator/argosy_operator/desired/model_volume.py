"""The model's part of a pod: its volume, the container that fetches into it, and what the engine is told of it.

Owns the volumes of `spec.model`, the init container `fetch-model` and the credentials that it gets. Must not know the
rest of the pod: `pod_template` adds image and hardening. Invariants: only `fetch-model` writes to a store and has
credentials; a directory of a shared cache belongs to one namespace and one Secret, so a model that was fetched with
credentials is found only by services that name the same ones.

    pvc://                                the claim, at MODEL_MOUNT
    oci://, with image volumes (KEP-4639) the image, at MODEL_MOUNT, pulled by the kubelet
    hf://, s3://, gs://, oci://, https:// a store at MODELS_MOUNT, in an emptyDir, a claim or a directory of the node
    file://, builtin://                   nothing: the model is in the engine's container
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from argosy_operator.config import OperatorConfig
from argosy_operator.desired.manifest_fields import Manifest
from argosy_operator.observed.pod import Problem
from argosy_resource.engine_address import PROGRESS_PORT
from argosy_resource.engine_command import claim_name
from argosy_resource.model_source import LINKED_MODEL, MODEL_MOUNT, MODELS_MOUNT, image_reference, is_remote
from argosy_resource.model_spec import ModelCache
from argosy_resource.pod_overlay import FETCH_CONTAINER
from argosy_resource.schema_types import quantity_bytes, quantity_text
from argosy_resource.types import InferenceService

CREDENTIALS_DIR: Final = "/var/run/argosy/model-credentials"

_MIN_FREE: Final = "15%"
"""Of the node's disk. The kubelet evicts below 10 % of it, or 15 % where it keeps images as well."""

MODELS_VOLUME: Final = "argosy-models"
"""The volume with a store."""
_LARGEST_SIZE: Final = 10**15 - 1
"""The most that `argosy models pull --max-size` takes; no disk of a node has so much."""
_MODEL: Final = "argosy-model"
_CREDENTIALS: Final = "argosy-model-credentials"
_SCRATCH: Final = "argosy-fetch-tmp"
_SCRATCH_MOUNT: Final = "/tmp"  # noqa: S108 - a path in the pod


class ModelVolume(Struct, frozen=True, kw_only=True):
    """What the place of the model adds to a pod."""

    volumes: tuple[Manifest, ...] = ()
    mounts: tuple[Manifest, ...] = ()
    """Mounts of the engine container."""
    env: Mapping[str, str] = {}
    """Variables of the engine container."""
    model: str | None = None
    """Where the engine finds the model, if not at its source."""
    download_dir: str | None = None
    """The store that the engine finds the model in."""
    fetch: Manifest | None = None
    """The init container, without what all containers of the pod have in common."""
    image_pull_secrets: tuple[str, ...] = ()
    node_selector: Mapping[str, str] = {}


def model_volume(service: InferenceService, config: OperatorConfig) -> ModelVolume:
    """The model's part of the service's pods."""
    model = service.spec.model
    claim = claim_name(model.source)
    if claim is not None:
        return _mounted({"persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    image = image_reference(model.source)
    if image is not None and config.image_volumes and _cache(service).type == "none":
        return _mounted(
            {"image": {"reference": image, "pullPolicy": "IfNotPresent"}},
            model=MODEL_MOUNT,
            image_pull_secrets=() if model.secret_ref is None else (model.secret_ref.name,),
        )
    return _store(service, config) if is_remote(model.source) else ModelVolume()


def cache_problem(service: InferenceService, config: OperatorConfig) -> Problem | None:
    """Why the service's cache cannot be provided here; None if it can."""
    if _cache(service).type != "node":
        return None
    if not config.node_cache_path:
        return Problem(
            "NodeCacheDisabled",
            "spec.model.cache.type is node, and this cluster has no node cache; set it to claim or none, or have the "
            "administrator set nodeCache.enabled in the Helm chart",
        )
    asked = service.spec.placement.node_selector
    elsewhere = [
        f"{label} is {value!r} there and {asked[label]!r} in spec.placement.nodeSelector"
        for label, value in sorted(config.node_cache_selector.items())
        if asked.get(label, value) != value
    ]
    if elsewhere:
        return Problem(
            "NodeCacheElsewhere",
            "spec.model.cache.type is node, and no node with the node cache fits spec.placement.nodeSelector: label "
            f"{', '.join(elsewhere)}; change the selector or the cache's type, or have the administrator set "
            "nodeCache.nodeSelector in the Helm chart",
        )
    return None


def _cache(service: InferenceService) -> ModelCache:
    return service.spec.model.cache or ModelCache()


def _mounted(volume: Manifest, **more: Any) -> ModelVolume:
    """A volume that is the model."""
    return ModelVolume(
        volumes=({"name": _MODEL, **volume},),
        mounts=({"name": _MODEL, "mountPath": MODEL_MOUNT, "readOnly": True},),
        **more,
    )


def _store(service: InferenceService, config: OperatorConfig) -> ModelVolume:
    """A store that `fetch-model` writes and the engine reads."""
    cache, secret = _cache(service), service.spec.model.secret_ref
    scope = "public" if secret is None else f"secret-{secret.name}"
    volume: Manifest
    mount: Manifest = {"name": MODELS_VOLUME, "mountPath": MODELS_MOUNT}
    match cache.type:
        case "none":
            limit = {} if cache.size_limit is None else {"sizeLimit": quantity_text(cache.size_limit)}
            volume = {"emptyDir": limit}
        case "claim":
            volume = {"persistentVolumeClaim": {"claimName": cache.claim_name}}
            mount["subPath"] = f"argosy/{scope}"
        case "node":
            # The directory exists where the chart's DaemonSet runs. Without it the pod waits, and says for what.
            volume = {"hostPath": {"path": f"{config.node_cache_path}/models", "type": "Directory"}}
            mount["subPath"] = f"{service.metadata.namespace}/{scope}"
    volumes = [{"name": MODELS_VOLUME, **volume}, {"name": _SCRATCH, "emptyDir": {}}]
    if secret is not None:
        # Optional, so that a pod starts without it and the fetcher tells which Secret is missing.
        projected = {"secretName": secret.name, "optional": True, "defaultMode": 0o440}
        volumes.append({"name": _CREDENTIALS, "secret": projected})
    mounts, link = [{**mount, "readOnly": True}], None
    if service.spec.engine.foreign is not None:
        link = {"name": _MODEL, "mountPath": MODEL_MOUNT}
        volumes.append({"name": _MODEL, "emptyDir": {}})
        mounts.append({**link, "readOnly": True})
    return ModelVolume(
        volumes=tuple(volumes),
        mounts=tuple(mounts),
        env={"ARGOSY_OFFLINE": "1"} if link is None else {},
        model=None if link is None else LINKED_MODEL,
        download_dir=MODELS_MOUNT,
        fetch=_fetch_container(service, config, mount, link),
        node_selector=config.node_cache_selector if cache.type == "node" else {},
    )


def _fetch_container(
    service: InferenceService, config: OperatorConfig, store: Manifest, link: Manifest | None
) -> Manifest:
    """The container that fetches the model unless the store has it. Its temporary directory is its own: what an
    engine has left in one must not configure the fetcher of a restarted pod. `link`: a mount in which it makes a link
    to the model."""
    model, cache = service.spec.model, _cache(service)
    # The kubelet evicts pods of a node whose disk is nearly full. A claim has a disk of its own.
    min_free = {} if cache.type == "claim" else {"ARGOSY_MIN_FREE": _MIN_FREE}
    # It evicts those as well that exceed their limit, and the next pod would fetch the model again.
    limit = () if cache.size_limit is None else ("--max-size", _max_size(cache.size_limit))
    env = {**min_free, **config.fetch_env, "HOME": _SCRATCH_MOUNT}
    linked = () if link is None else ("--any-architecture", "--link", LINKED_MODEL)
    mounts = [store, *([] if link is None else [link]), {"name": _SCRATCH, "mountPath": _SCRATCH_MOUNT}]
    if model.secret_ref is not None:
        env["ARGOSY_CREDENTIALS_DIR"] = CREDENTIALS_DIR
        mounts.append({"name": _CREDENTIALS, "mountPath": CREDENTIALS_DIR, "readOnly": True})
    return {
        "name": FETCH_CONTAINER,
        "args": [
            *("models", "pull", model.source, "--download-dir", MODELS_MOUNT),
            *("--progress-port", str(PROGRESS_PORT), "--make-room", *limit, *linked),
        ],
        "env": [{"name": name, "value": value} for name, value in env.items()],
        "ports": [{"name": "progress", "containerPort": PROGRESS_PORT, "protocol": "TCP"}],
        "volumeMounts": mounts,
    }


def _max_size(limit: int | str) -> str:
    """A limit in the digits that the fetcher takes."""
    return str(min(quantity_bytes(limit), _LARGEST_SIZE))
