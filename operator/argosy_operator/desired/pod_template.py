"""The pod template of a service's replicas, and its revision.

Owns every field of the pods: command, probes, drain, hardening, the volumes of `spec.model` with the init container
`fetch-model`, what `spec.placement` fills, the merge with the user's overlay, and the template of a replica's further
nodes. Must not know Deployments or rollouts. Where the model is:

    pvc://                                the claim, at MODEL_MOUNT
    oci://, with image volumes (KEP-4639) the image, at MODEL_MOUNT, pulled by the kubelet
    hf://, s3://, gs://, oci://, https:// a store at MODELS_MOUNT, in an emptyDir, a claim or a directory of the node
    file://, builtin://                   nothing: the model is in the engine's container

A replica that spans nodes is a pod of the Deployment, as of any service: it is node 0, has the API server, and is all
that routers, gates, rollouts and scaling know of. Each such leader carries the pod template of its workers in an
annotation, so that one of an older revision gets the workers that fit it (`children`). Annotations can be changed by
who may not create pods, so its hash is in the leader's environment, which nobody can change (`argosy_operator.pod`
compares them).

Invariants: the pod satisfies the restricted Pod Security profile whatever the resource says, except for the hostPath
volume of a node cache, which an administrator has to enable; the revision is a hash of the template, so pods are
replaced if, and only if, the template changes; only `fetch-model` writes to a store and has credentials; a directory of
a shared cache belongs to one namespace and one Secret, so a model that was fetched with credentials is found only by
services that name the same ones; a field that the user leaves out does not appear, so that Kubernetes' own default
applies; without a named account the pod gets no token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, Final

import msgspec
import xxhash
from msgspec import Struct

from argosy_operator.config import OperatorConfig
from argosy_operator.desired.upgrades import Images
from argosy_operator.names import (
    KEY_ANNOTATION,
    NODE_TEMPLATE_ANNOTATION,
    REVISION_LABEL,
    REVISION_LENGTH,
    ROUTABLE_GATE,
    child_labels,
    child_name,
)
from argosy_operator.pod import (
    MAX_CHARS,
    MAX_VALUES,
    NODE_TEMPLATE_HASH_ENV,
    NodeTemplate,
    Problem,
    decode_node_template,
    num_values,
)
from argosy_resource.engine_arguments import READY_PATH
from argosy_resource.engine_command import (
    API_KEY_ENV,
    API_KEYS_FIELD,
    COMPONENT_LABEL,
    ENGINE_PORT,
    INTERNAL_KEYS_ENV,
    NODE_COMPONENT,
    NODE_KEY_ENV,
    PROGRESS_PORT,
    SERVICE_LABEL,
    claim_name,
    engine_args,
    foreign_args,
    selector,
    service_label,
)
from argosy_resource.model import (
    LINKED_MODEL,
    MODEL_MOUNT,
    MODELS_MOUNT,
    ModelCache,
    image_reference,
    is_remote,
)
from argosy_resource.pod_fields import (
    CONFINING_ANNOTATIONS,
    ENGINE_CONTAINER,
    FETCH_CONTAINER,
    KEY_VOLUME,
    VOLUME_PREFIX,
    LabelSelector,
    PodAffinity,
    PodAffinityTerm,
    PodTemplate,
    TopologySpreadConstraint,
    Volume,
)
from argosy_resource.resources import SHARED_MEMORY, ResourceClaim
from argosy_resource.schema_types import ENGINE_KEY_SUFFIX, quantity_bytes, quantity_text
from argosy_resource.types import InferenceService

Manifest = dict[str, Any]
USER_ID: Final = 10001
"""User of the images. Numeric, because the kubelet cannot check a user name for runAsNonRoot."""
HOME: Final = "/home/argosy"
KEY_DIR: Final = "/etc/argosy-key"
"""Where the service's Secret is mounted."""
WARM_UP_ENV: Final = "ARGOSY_WARM_UP_FROM"
"""A variable rather than a flag, because engines of other versions ignore what they do not know."""
_TERMINATION_MARGIN_S: Final = 15
"""Seconds between the engine's own deadline and the kubelet's kill, to close streams and free device memory."""
_STARTUP_SECONDS: Final = 7 * 24 * 3600
"""Until it is ready no other probe runs, and nothing ends an engine that loads but itself, once its load stalls
(`--load-stall-timeout`). Kubernetes has no word for `never`."""
_STARTUP_WAIT_S: Final = 3
"""For so long an engine that starts may hold its answer to the startup probe back, which it gives when it is ready:
Kubernetes asks every second at most, so a replica would be noticed half a second late, and up to a second."""
_FOREIGN_STARTUP_SECONDS: Final = 3600
"""Longest time that an engine may load that does not notice when it stalls."""
CREDENTIALS_DIR: Final = "/var/run/argosy/model-credentials"
MODELS_VOLUME: Final = "argosy-models"
"""The volume with a store."""
_MIN_FREE: Final = "15%"
"""Of the node's disk. The kubelet evicts below 10 % of it, or 15 % where it keeps images as well."""
_LARGEST_SIZE: Final = 10**15 - 1
"""The most that `argosy models pull --max-size` takes; no disk of a node has so much."""
_MODEL: Final = "argosy-model"
_CREDENTIALS: Final = "argosy-model-credentials"
_SCRATCH: Final = "argosy-fetch-tmp"
_SCRATCH_MOUNT: Final = "/tmp"  # noqa: S108 - a path in the pod
MASTER_ADDR_ENV: Final = "ARGOSY_MASTER_ADDR"
"""Address of the leader's pod."""
NODE_RANK_ENV: Final = "ARGOSY_NODE_RANK"
INDEX_LABEL: Final = "apps.kubernetes.io/pod-index"
"""Where the StatefulSet controller writes a pod's ordinal."""
_OF_THE_API_SERVER: Final = ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle")
"""Fields of the container that mean its API server, which workers lack."""


def pod_template(
    service: InferenceService, config: OperatorConfig, images: Images, *, key_digest: str
) -> tuple[Manifest, str]:
    """The template, labelled with its revision, and the revision. `key_digest` is empty for engines that follow their
    keys."""
    overlay = service.spec.pod_template
    metadata = {
        "labels": {**overlay.metadata.labels, **child_labels(service)},
        "annotations": {**_annotations(overlay), **present(**{KEY_ANNOTATION: key_digest or None})},
    }
    template: Manifest = {"metadata": metadata, "spec": _pod_spec(service, config, images)}
    if service.spec.parallelism.nodes > 1:
        nodes = _node_template(service, template)
        metadata["annotations"][NODE_TEMPLATE_ANNOTATION] = nodes
        template["spec"]["containers"][0]["env"].append(
            {"name": NODE_TEMPLATE_HASH_ENV, "value": sha256(nodes.encode()).hexdigest()}
        )
    if not metadata["annotations"]:
        del metadata["annotations"]  # the API server would, which looks like a change by somebody else
    digest = xxhash.xxh3_64_hexdigest(msgspec.json.encode(template, order="deterministic"))
    revision = digest[:REVISION_LENGTH]
    metadata["labels"][REVISION_LABEL] = revision
    return template, revision


def _annotations(overlay: PodTemplate) -> dict[str, str]:
    """The overlay's annotations. The CRD refuses those that are security settings; a resource that was stored before it
    did so must not have them in its pods either."""
    return {
        key: value
        for key, value in overlay.metadata.annotations.items()
        if not key.startswith(CONFINING_ANNOTATIONS)
    }


def _pod_spec(service: InferenceService, config: OperatorConfig, images: Images) -> Manifest:
    spec, model = service.spec, model_volume(service, config)
    grace = spec.rollout.drain_seconds + spec.engine.shutdown_timeout_seconds + _TERMINATION_MARGIN_S
    return {
        "enableServiceLinks": False,
        "securityContext": _pod_security(config),
        "readinessGates": [{"conditionType": ROUTABLE_GATE}],
        "terminationGracePeriodSeconds": grace,
        "containers": [_engine_container(service, config, images, model)],
        "volumes": _volumes(service, model, images),
        **_placement_fields(service),
        **present(
            initContainers=_init_containers(service, config, images, model),
            nodeSelector={**model.node_selector, **spec.placement.node_selector},
            resourceClaims=[_claim(claim) for claim in spec.resources.claims],
            imagePullSecrets=_image_pull_secrets(service, config, model),
        ),
    }


def _pod_security(config: OperatorConfig) -> Manifest:
    """The restricted Pod Security profile, as the images' user or as whom the cluster chooses."""
    user = {} if config.arbitrary_uids else dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), USER_ID)
    return {
        "runAsNonRoot": True,
        **user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _image_pull_secrets(
    service: InferenceService, config: OperatorConfig, model: ModelVolume
) -> list[Manifest]:
    own = [secret.name for secret in service.spec.pod_template.spec.image_pull_secrets]
    names = dict.fromkeys((*config.image_pull_secrets, *own, *model.image_pull_secrets))
    return [{"name": name} for name in names]


def _init_containers(
    service: InferenceService, config: OperatorConfig, images: Images, model: ModelVolume
) -> list[Manifest]:
    """Never `spec.engine.image`: `fetch-model` writes to a store that other services read, and has a Secret that the
    author of a resource need not be able to read."""
    if model.fetch is None:
        return []
    common = _any_container(images.fetch, config)
    resources = _resources(service, gpu=False, has_defaults=False)
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


def _engine_container(
    service: InferenceService, config: OperatorConfig, images: Images, model: ModelVolume
) -> Manifest:
    drain, foreign = service.spec.rollout.drain_seconds, service.spec.engine.foreign
    ready_path = "/ready" if foreign is None else READY_PATH
    startup_path = f"/ready?wait={_STARTUP_WAIT_S}" if foreign is None else READY_PATH
    return {
        **_any_container(service.spec.engine.image or images.engine, config),
        "name": ENGINE_CONTAINER,
        **_program(service, model),
        "env": _env(service, model, images),
        "ports": [{"name": "http", "containerPort": ENGINE_PORT, "protocol": "TCP"}],
        "startupProbe": _probe(
            startup_path, period=1, failures=_STARTUP_SECONDS if foreign is None else _FOREIGN_STARTUP_SECONDS
        ),
        "readinessProbe": _probe(ready_path, period=2, failures=3),
        # Generous: a long prefill on a loaded node must not be mistaken for a dead engine.
        "livenessProbe": _probe("/health", period=10, failures=6),
        "resources": _resources(service, gpu=True, has_defaults=images.has_requests),
        "volumeMounts": _volume_mounts(service, model, images),
        # The sleep action of the kubelet needs no shell in the image; zero seconds are not allowed
        # everywhere.
        **present(lifecycle={"preStop": {"sleep": {"seconds": drain}}} if drain else None),
    }


def _program(service: InferenceService, model: ModelVolume) -> Manifest:
    foreign = service.spec.engine.foreign
    if foreign is None:
        own = _literal(engine_args(service, model=model.model, download_dir=model.download_dir))
        # Kubernetes fills in the variable.
        leader = () if service.spec.parallelism.nodes == 1 else ("--master-addr", f"$({MASTER_ADDR_ENV})")
        return {"args": [*own, *leader]}
    args = _literal(foreign_args(service, foreign, model=model.model))
    # The kubelet puts the key in. Whoever sees the process's arguments sees its environment as well.
    key = [] if foreign.key_variable else [f"--api-key=$({API_KEY_ENV})"]
    return {"command": list(foreign.command), "args": [*args, *key]}


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


def key_secret_name(service: InferenceService) -> str:
    """Name of the Secret with the engines' internal key."""
    return child_name(service, ENGINE_KEY_SUFFIX)


def follows_keys(service: InferenceService, images: Images) -> bool:
    """Whether the engines read a new internal key while they run."""
    return service.spec.engine.foreign is None and images.has_key_file


def _env(service: InferenceService, model: ModelVolume, images: Images) -> list[Manifest]:
    """The operator's variables, then the user's, merged by name: the overlay wins over spec.engine.env."""
    secret = {"secretKeyRef": {"name": key_secret_name(service), "key": API_KEY_ENV}}
    own: list[Manifest] = [
        {"name": API_KEY_ENV, "valueFrom": secret},
        {"name": "HOME", "value": HOME},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        *({"name": name, "value": value} for name, value in model.env.items()),
    ]
    if service.spec.parallelism.nodes > 1:
        own += _leader_env(key_secret_name(service))
    users = {variable.name: _as_manifest(variable) for variable in service.spec.engine.env}
    if (foreign := service.spec.engine.foreign) is not None:
        # Without a name torch looks the user up, whom the image does not know by the number.
        users = {"USER": {"name": "USER", "value": "argosy"}, **users}
    for container in service.spec.pod_template.spec.containers:
        users |= {variable.name: _as_manifest(variable) for variable in container.env}
    if foreign is not None and foreign.key_variable:
        users.pop(foreign.key_variable, None)
        own.append({"name": foreign.key_variable, "valueFrom": secret})
    is_caching = foreign is None and service.spec.engine.enable_prefix_caching
    if follows_keys(service, images):
        users.pop(INTERNAL_KEYS_ENV, None)
        own.append({"name": INTERNAL_KEYS_ENV, "value": f"{KEY_DIR}/{API_KEYS_FIELD}"})
    if images.warms_up and is_caching and WARM_UP_ENV not in users:
        own.append({"name": WARM_UP_ENV, "value": _peers(service)})
    return [*own, *users.values()]


def _peers(service: InferenceService) -> str:
    """Address of the replicas that are ready. A new one computes their hottest prefixes before it is ready itself."""
    return f"http://{child_name(service)}.{service.metadata.namespace}.svc:{ENGINE_PORT}"


def _volumes(service: InferenceService, model: ModelVolume, images: Images) -> list[Manifest]:
    shared_memory = quantity_text(service.spec.resources.shared_memory) or SHARED_MEMORY
    own: list[Manifest] = [
        {"name": "argosy-tmp", "emptyDir": {}},
        {"name": "argosy-home", "emptyDir": {}},
        {"name": "argosy-shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}},
    ]
    if follows_keys(service, images):
        items = [{"key": API_KEYS_FIELD, "path": API_KEYS_FIELD}]
        secret = {"secretName": key_secret_name(service), "items": items, "defaultMode": 0o440}
        own.append({"name": KEY_VOLUME, "secret": secret})
    return [*own, *model.volumes, *map(_volume, service.spec.pod_template.spec.volumes)]


def _volume(volume: Volume) -> Manifest:
    """A volume of the overlay."""
    manifest: Manifest = _as_stored_manifest(volume)
    if volume.empty_dir is not None and volume.empty_dir.size_limit is not None:
        manifest["emptyDir"]["sizeLimit"] = quantity_text(volume.empty_dir.size_limit)
    return manifest


def _volume_mounts(service: InferenceService, model: ModelVolume, images: Images) -> list[Manifest]:
    """The engine's mounts. The CRD refuses mounts of our volumes in the overlay; a resource that was stored before it
    did so must not get them either."""
    own: list[Manifest] = [
        {"name": "argosy-tmp", "mountPath": "/tmp"},  # noqa: S108 - a path in the pod
        {"name": "argosy-home", "mountPath": HOME},
        {"name": "argosy-shm", "mountPath": "/dev/shm"},  # noqa: S108 - a path in the pod
    ]
    if follows_keys(service, images):
        own.append({"name": KEY_VOLUME, "mountPath": KEY_DIR, "readOnly": True})
    users = [
        _as_manifest(mount)
        for container in service.spec.pod_template.spec.containers
        for mount in container.volume_mounts
        if not mount.name.startswith(VOLUME_PREFIX)
    ]
    return [*own, *model.mounts, *users]


def _resources(service: InferenceService, *, gpu: bool, has_defaults: bool) -> Manifest:
    """Requests and limits. CPU and memory are the same for all containers, or the pod could never be Guaranteed; what
    an engine requests by default is no limit, so that such a pod is not Guaranteed anyway."""
    resources = service.spec.resources
    memory = quantity_text(resources.memory)
    requests = present(cpu=quantity_text(resources.cpu), memory=memory)
    limits = present(cpu=quantity_text(resources.cpu_limit), memory=memory)
    if has_defaults:
        requests = service.spec.default_requests | requests
    if (
        gpu and service.spec.model.widened_size is not None
    ):  # what the engine makes of a GGUF file, in its home
        requests["ephemeral-storage"] = quantity_text(service.spec.model.widened_size)
    claims = resources.claims if gpu else ()
    if gpu and resources.gpu is not None:
        requests[resources.gpu.resource_name] = limits[resources.gpu.resource_name] = str(
            service.spec.gpus_per_pod
        )
    return present(
        requests=requests,
        limits=limits,
        claims=[present(name=claim.name, request=claim.request) for claim in claims],
    )


def _claim(claim: ResourceClaim) -> Manifest:
    return present(
        name=claim.name,
        resourceClaimName=claim.resource_claim_name,
        resourceClaimTemplateName=claim.resource_claim_template_name,
    )


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


def _placement_fields(service: InferenceService) -> Manifest:
    """The fields of the pod's spec, without nodeSelector, to which the model's volume adds."""
    placement = service.spec.placement
    mounts_token = placement.service_account_name is not None and placement.automount_service_account_token
    return {
        "automountServiceAccountToken": mounts_token,
        **present(
            tolerations=[_as_manifest(toleration) for toleration in placement.tolerations],
            affinity=_affinity(service),
            topologySpreadConstraints=[
                _spread(service, constraint) for constraint in placement.topology_spread_constraints
            ],
            priorityClassName=placement.priority_class_name,
            runtimeClassName=placement.runtime_class_name,
            schedulerName=placement.scheduler_name,
            serviceAccountName=placement.service_account_name,
        ),
    }


def _affinity(service: InferenceService) -> Manifest:
    affinity = service.spec.placement.affinity
    if affinity is None:
        return {}
    return present(
        nodeAffinity=_as_manifest(affinity.node_affinity),
        podAffinity=_pod_affinity(service, affinity.pod_affinity),
        podAntiAffinity=_pod_affinity(service, affinity.pod_anti_affinity),
    )


def _pod_affinity(service: InferenceService, affinity: PodAffinity | None) -> Manifest:
    if affinity is None:
        return {}
    return present(
        requiredDuringSchedulingIgnoredDuringExecution=[
            _term(service, term) for term in affinity.required_during_scheduling_ignored_during_execution
        ],
        preferredDuringSchedulingIgnoredDuringExecution=[
            {"weight": weighted.weight, "podAffinityTerm": _term(service, weighted.pod_affinity_term)}
            for weighted in affinity.preferred_during_scheduling_ignored_during_execution
        ],
    )


def _term(service: InferenceService, term: PodAffinityTerm) -> Manifest:
    return {**_as_manifest(term), **_selectors(service, term.label_selector, term.namespace_selector)}


def _spread(service: InferenceService, constraint: TopologySpreadConstraint) -> Manifest:
    return {**_as_manifest(constraint), **_selectors(service, constraint.label_selector)}


def _selectors(
    service: InferenceService, pods: LabelSelector | None, namespaces: LabelSelector | None = None
) -> dict[str, Any]:
    """The selectors of a term. An empty one stays: it means every object, and a missing one means none."""
    is_one_node = service.spec.parallelism.nodes == 1
    own = {"matchLabels": selector(service) if is_one_node else {SERVICE_LABEL: service_label(service)}}
    found = {"labelSelector": own if pods is None else _selector(pods)}
    return found if namespaces is None else {**found, "namespaceSelector": _selector(namespaces)}


def _selector(wanted: LabelSelector) -> Manifest:
    return present(
        matchLabels=wanted.match_labels,
        matchExpressions=[_as_manifest(each) for each in wanted.match_expressions],
    )


def _leader_env(secret_name: str) -> list[Manifest]:
    """Further variables of the leader's container."""
    secret = {"secretKeyRef": {"name": secret_name, "key": NODE_KEY_ENV}}
    return [
        {"name": NODE_KEY_ENV, "valueFrom": secret},
        {"name": MASTER_ADDR_ENV, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]


def _node_template(service: InferenceService, leader: Manifest) -> str:
    """The annotation of a leader, whose pod template is complete but for this annotation, its hash and its revision.
    Workers get neither the keys of the leader's API nor its warm-up."""
    spec = {name: value for name, value in leader["spec"].items() if name != "readinessGates"}
    spec["volumes"] = [each for each in spec["volumes"] if each["name"] != KEY_VOLUME]
    (engine,) = spec["containers"]
    left_out = {API_KEY_ENV, INTERNAL_KEYS_ENV, MASTER_ADDR_ENV, WARM_UP_ENV}
    index = {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX_LABEL}']"}}
    worker = {name: value for name, value in engine.items() if name not in _OF_THE_API_SERVER}
    worker["args"] = [*engine["args"], "--headless", "--node-rank", f"$({NODE_RANK_ENV})"]
    worker["env"] = [each for each in engine["env"] if each["name"] not in left_out]
    worker["env"].append({"name": NODE_RANK_ENV, "valueFrom": index})
    worker["volumeMounts"] = [each for each in engine["volumeMounts"] if each["name"] != KEY_VOLUME]
    metadata = leader["metadata"]
    template = {
        "metadata": {
            "labels": {**metadata["labels"], **node_labels(service)},
            **present(annotations=metadata["annotations"]),
        },
        "spec": {
            **spec,
            "terminationGracePeriodSeconds": spec["terminationGracePeriodSeconds"]
            - service.spec.rollout.drain_seconds,
            "containers": [worker],
        },
    }
    found = NodeTemplate(workers=service.spec.parallelism.nodes - 1, template=template)
    return msgspec.json.encode(found, order="deterministic").decode()


def node_template_problem(service: InferenceService, leader: Manifest) -> Problem | None:
    """Why replicas of this pod template would get no workers; None if they would, or need none."""
    if service.spec.parallelism.nodes == 1:
        return None
    text = leader["metadata"]["annotations"][NODE_TEMPLATE_ANNOTATION]
    if decode_node_template(text) is not None:
        return None
    return Problem(
        "InvalidSpec",
        f"the pod template of further nodes has {len(text)} characters and {num_values(text)} values, of which the "
        f"operator takes {MAX_CHARS} and {MAX_VALUES}, as every replica carries it in an annotation; move large "
        "variables and annotations into a ConfigMap that podTemplate mounts",
    )


def node_labels(service: InferenceService) -> dict[str, str]:
    return {**child_labels(service), COMPONENT_LABEL: NODE_COMPONENT}


def present(**fields: Any) -> Manifest:
    """The fields that are not empty."""
    return {name: value for name, value in fields.items() if value not in (None, {}, [])}


def _as_manifest(value: Any) -> Any:
    """The Kubernetes field of the same shape as a struct, without what the user left out."""
    return _trimmed(msgspec.to_builtins(value))


def _as_stored_manifest(value: Any) -> Any:
    """The same, but with the empty lists, and the nulls inside lists, that are part of the revision of pods which run
    already. They mean the same to an API server, which stores neither."""
    fields = msgspec.json.decode(msgspec.json.encode(value))
    return _without_null_fields(fields)


def _trimmed(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: _trimmed(nested) for name, nested in value.items() if nested is not None}
        return {name: nested for name, nested in kept.items() if nested != []}
    if isinstance(value, list | tuple):
        return [_trimmed(nested) for nested in value]
    return value


def _without_null_fields(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without_null_fields(nested) for name, nested in value.items() if nested is not None}
