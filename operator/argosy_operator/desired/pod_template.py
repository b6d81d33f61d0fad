"""The pod template of a service's replicas, and its revision.

Owns every field of the pods but those of the model (`model_volume`) and of the nodes (`pod_placement`): command,
probes, drain, hardening, volumes, and the merge with the user's overlay. Must not know Deployments or rollouts.
Invariants: the pod satisfies the restricted Pod Security profile whatever the resource says, except for the hostPath
volume of a node cache, which an administrator has to enable; the revision is a hash of the template, so pods are
replaced if, and only if, the template changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
import xxhash

from argosy_operator.config import OperatorConfig
from argosy_operator.desired.engine_nodes import (
    encode_node_template,
    leader_args,
    leader_env,
    template_hash,
)
from argosy_operator.desired.manifest_fields import Manifest, as_manifest, as_stored_manifest, present
from argosy_operator.desired.model_volume import ModelVolume, model_volume
from argosy_operator.desired.pinned_images import Images
from argosy_operator.desired.pod_placement import placement_fields
from argosy_operator.names import (
    KEY_ANNOTATION,
    NODE_TEMPLATE_ANNOTATION,
    REVISION_LABEL,
    REVISION_LENGTH,
    ROUTABLE_GATE,
    child_labels,
    child_name,
)
from argosy_resource.engine_address import API_KEY_ENV, API_KEYS_FIELD, ENGINE_PORT, INTERNAL_KEYS_ENV
from argosy_resource.engine_command import engine_args, foreign_args
from argosy_resource.foreign_engines import READY_PATH
from argosy_resource.pod_overlay import (
    CONFINING_ANNOTATIONS,
    ENGINE_CONTAINER,
    KEY_VOLUME,
    VOLUME_PREFIX,
    PodTemplate,
    Volume,
)
from argosy_resource.resources import SHARED_MEMORY, ResourceClaim
from argosy_resource.schema_types import ENGINE_KEY_SUFFIX, quantity_text
from argosy_resource.types import InferenceService

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


def key_secret_name(service: InferenceService) -> str:
    """Name of the Secret with the engines' internal key."""
    return child_name(service, ENGINE_KEY_SUFFIX)


def follows_keys(service: InferenceService, images: Images) -> bool:
    """Whether the engines read a new internal key while they run."""
    return service.spec.engine.foreign is None and images.has_key_file


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
        nodes = encode_node_template(service, template, not_for_workers=(WARM_UP_ENV,), key_volume=KEY_VOLUME)
        metadata["annotations"][NODE_TEMPLATE_ANNOTATION] = nodes
        template["spec"]["containers"][0]["env"].append(template_hash(nodes))
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
        **placement_fields(service),
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
        return {"args": own if service.spec.parallelism.nodes == 1 else [*own, *leader_args()]}
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
        own += leader_env(key_secret_name(service))
    users = {variable.name: as_manifest(variable) for variable in service.spec.engine.env}
    if (foreign := service.spec.engine.foreign) is not None:
        # Without a name torch looks the user up, whom the image does not know by the number.
        users = {"USER": {"name": "USER", "value": "argosy"}, **users}
    for container in service.spec.pod_template.spec.containers:
        users |= {variable.name: as_manifest(variable) for variable in container.env}
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
    manifest: Manifest = as_stored_manifest(volume)
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
        as_manifest(mount)
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
