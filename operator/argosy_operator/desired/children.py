"""The children that a service should have: a pure function of the resource and of what is observed.

Owns Secret, Service, PodDisruptionBudget, Deployment, that of a canary while a change is tried, and for replicas that
span several nodes a StatefulSet of workers beside each leader; and why a valid service cannot be deployed in this
cluster, by the settings of the operator. `rollout` decides how a change reaches the pods. Must not talk to an API
server, look at a clock or remember anything. Invariants: equal inputs give an equal plan; in the end the plan equals
what exists; a StatefulSet belongs to its leader's pod, with which Kubernetes deletes it; that of a leader which stops
stays as it is until the leader is gone; the reason of a refusal names what to change, for the author of the resource
and for the administrator.

    a worker or the leader ends   the engines of the others end by themselves, the kubelets start all anew
    a worker cannot go            its machine is lost, say, and a StatefulSet replaces no pod that is still there: the
                                  leader is deleted, and the next one gets workers of its own
    a leader cannot go            its workers are deleted, since its successor has others
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
import xxhash
from msgspec import Struct

from argosy_operator.config import ANY_ACCOUNT, OperatorConfig
from argosy_operator.desired.pod_template import (
    MASTER_ADDR_ENV,
    Manifest,
    cache_problem,
    follows_keys,
    key_secret_name,
    node_labels,
    node_template_problem,
    pod_template,
)
from argosy_operator.desired.rollout import MIN_READY_SECONDS, RolloutPlan, key_of_trial, nudge, plan_rollout
from argosy_operator.desired.upgrades import (
    Images,
    held_annotations,
    pinned_images,
    replaced_revision,
    served_revision,
)
from argosy_operator.names import (
    CANARY_TRACK,
    DEPLOYMENTS,
    FIELD_MANAGER,
    LEADER_LABEL,
    MANAGED_BY_LABEL,
    NUDGE_ANNOTATION,
    REVISION_LABEL,
    SERVED_ANNOTATION,
    TRACK_LABEL,
    canary_name,
    child_labels,
    child_name,
    node_set_name,
)
from argosy_operator.observation import Observation
from argosy_operator.pod import NodeTemplate, Pod, Problem, decode_node_template
from argosy_protocol.headers import internal_key, node_key
from argosy_resource.engine_arguments import argument_problems
from argosy_resource.engine_command import (
    API_KEY_ENV,
    API_KEYS_FIELD,
    COMPONENT_LABEL,
    ENGINE_PORT,
    NODE_COMPONENT,
    NODE_KEY_ENV,
    SERVICE_LABEL,
    claim_name,
    selector,
    service_label,
)
from argosy_resource.schema_types import is_own_secret
from argosy_resource.types import API_VERSION, KIND, InferenceService

HELM_RELEASE_PREFIX: Final = "sh.helm.release.v1."
"""Beginning of the names of Secrets in which Helm keeps releases, with the values of each: those of the chart may have
the fleet key and keys of clients."""


class Plan(Struct, frozen=True, kw_only=True):
    """The children of one service, in the order in which they are applied."""

    revision: str
    """Revision of the pod template that the replicas should have now."""
    secret: Manifest
    service: Manifest
    budget: Manifest
    deployment: Manifest
    canary: Manifest | None
    """The canary's own Deployment; None while there is none."""
    node_sets: tuple[Manifest, ...] = ()
    """The StatefulSets of replicas that span several nodes."""
    images: Images
    rollout: RolloutPlan = RolloutPlan()
    nudge_wait_s: float = 0.0
    """While the API server refuses pods: seconds until Kubernetes is asked for them again."""
    problem: Problem | None = None
    """Why the Deployment cannot be had in this cluster: it is not applied, and one that exists stays as it is."""

    @property
    def objects(self) -> tuple[Manifest, ...]:
        return (self.secret, self.service, self.budget, *self.deployments, *self.node_sets)

    @property
    def deployments(self) -> tuple[Manifest, ...]:
        return (self.deployment,) if self.canary is None else (self.deployment, self.canary)


def plan_children(service: InferenceService, observed: Observation, config: OperatorConfig) -> Plan:
    secret = _secret(service, observed, config)
    images = pinned_images(service, observed, config)
    key_digest = _key_digest(service, config, images)
    if key_digest:
        key_digest = key_of_trial(service, observed.deployment) or key_digest
    template, revision = pod_template(service, config, images, key_digest=key_digest)
    rollout = plan_rollout(service, observed, revision, key_digest=key_digest)
    held = rollout.held_revision or replaced_revision(service, observed, config, revision, images)
    asked_again, nudge_wait_s = nudge(observed.deployment, observed.time)
    canary, canary_wait_s = _canary(service, template, rollout, observed)
    return Plan(
        revision=revision if rollout.canary is not None else rollout.held_revision or revision,
        secret=secret,
        service=_service(service),
        budget=_budget(service, observed),
        deployment=_deployment(
            service,
            template,
            rollout,
            images,
            served=served_revision(observed, revision),
            held={**held_annotations(observed.deployment, held), **_nudged(asked_again)},
        ),
        canary=canary,
        node_sets=node_sets(service, observed.pods),
        images=images,
        rollout=rollout,
        nudge_wait_s=min((each for each in (nudge_wait_s, canary_wait_s) if each), default=0.0),
        problem=deployment_problem(service, config) or node_template_problem(service, template),
    )


def digest(value: Any) -> str:
    """Short hash of any JSON value."""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(value, order="deterministic"))


def _metadata(service: InferenceService, name: str) -> Manifest:
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": service.metadata.name,
        "uid": service.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "name": name,
        "namespace": service.metadata.namespace,
        "labels": child_labels(service),
        "ownerReferences": [owner],
    }


def _key_digest(service: InferenceService, config: OperatorConfig, images: Images) -> str:
    """Digest of the key without which the service's oldest engines cannot be reached; empty for engines that follow
    their keys. While two keys are valid nothing has to be replaced: routers find out which one a replica has."""
    if follows_keys(service, images):
        return ""
    oldest = (config.fleet_key, *config.previous_fleet_keys, *config.lingering_fleet_keys)[-1]
    return digest({API_KEY_ENV: _base64(internal_key(oldest, service.metadata.uid))})


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _secret(service: InferenceService, observed: Observation, config: OperatorConfig) -> Manifest:
    valid = (config.fleet_key, *config.previous_fleet_keys)
    keys = [internal_key(key, service.metadata.uid) for key in valid]
    data = {API_KEY_ENV: keys[0], API_KEYS_FIELD: "".join(f"{key}\n" for key in keys)}
    if _spans_nodes(service, observed):
        # Nodes read it when they start, so one that starts during a rotation needs the key of those before it.
        data[NODE_KEY_ENV] = "\n".join(node_key(key, service.metadata.uid) for key in valid)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(service, key_secret_name(service)),
        "type": "Opaque",
        "data": {name: _base64(text) for name, text in data.items()},
    }


def _service(service: InferenceService) -> Manifest:
    port = {"name": "http", "port": ENGINE_PORT, "targetPort": "http", "protocol": "TCP"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(service, child_name(service)),
        "spec": {"type": "ClusterIP", "selector": selector(service), "ports": [port]},
    }


def _spans_nodes(service: InferenceService, observed: Observation) -> bool:
    """Whether a replica has further nodes: one to come, or one of an older revision that still serves."""
    return service.spec.parallelism.nodes > 1 or any(pod.node_template for pod in observed.pods)


def _budget(service: InferenceService, observed: Observation) -> Manifest:
    # All pods of a replica fail together: one that is evicted takes its replica with it.
    pods = {SERVICE_LABEL: service_label(service)} if _spans_nodes(service, observed) else selector(service)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(service, child_name(service)),
        "spec": {
            # A number, since a percentage would be of the pods, of which a replica has several.
            "maxUnavailable": service.spec.pod_disruption_budget.of(service.spec.replicas),
            "selector": {"matchLabels": pods},
            # A replica that never became ready must not block the drain of a node.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _deployment(
    service: InferenceService,
    template: Manifest,
    rollout: RolloutPlan,
    images: Images,
    *,
    served: str,
    held: Mapping[str, str],
) -> Manifest:
    annotations = {**rollout.annotations, **images.annotations, **held}
    if served:
        annotations[SERVED_ANNOTATION] = served
    metadata = {**_metadata(service, child_name(service)), "annotations": annotations}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": service.spec.replicas,
            "paused": rollout.is_paused,
            "minReadySeconds": MIN_READY_SECONDS,
            "revisionHistoryLimit": 3,
            "progressDeadlineSeconds": service.spec.rollout.progress_deadline_seconds,
            "selector": {"matchLabels": selector(service)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": rollout.surge, "maxUnavailable": rollout.unavailable},
            },
            "template": template,
        },
    }


def _canary(
    service: InferenceService, template: Manifest, rollout: RolloutPlan, observed: Observation
) -> tuple[Manifest | None, float]:
    """The Deployment of a canary's replicas. It is named after the revision, so that the next canary never has pods of
    the one before. The selector of the service's own Deployment matches its pods as well; each controller goes by the
    owner of a pod. It is created once the routers are told to divide the service: a replica of which they know
    nothing would get an ordinary share. With it the seconds until Kubernetes is asked again for pods that were
    refused."""
    plan = rollout.canary
    if plan is None or not plan.state.size:
        return None, 0.0
    name = canary_name(service, plan.state.revision)
    live = observed.children.get((DEPLOYMENTS, (service.metadata.namespace, name)))
    if live is None and observed.published_canary != plan.state.revision:
        return None, 0.0
    asked_again, wait_s = nudge(live, observed.time)
    labels = {TRACK_LABEL: CANARY_TRACK}
    metadata = template["metadata"]
    manifest: Manifest = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {**_metadata(service, name), "annotations": _nudged(asked_again)},
        "spec": {
            "replicas": plan.state.size,
            "minReadySeconds": MIN_READY_SECONDS,
            "revisionHistoryLimit": 0,
            "progressDeadlineSeconds": service.spec.rollout.progress_deadline_seconds,
            "selector": {"matchLabels": {**selector(service), REVISION_LABEL: plan.state.revision, **labels}},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "template": {**template, "metadata": {**metadata, "labels": {**metadata["labels"], **labels}}},
        },
    }
    return manifest, wait_s


def _nudged(time: str) -> dict[str, str]:
    return {NUDGE_ANNOTATION: time} if time else {}


def node_sets(service: InferenceService, replicas: Iterable[Pod]) -> tuple[Manifest, ...]:
    """The StatefulSets that are to be as described: those of leaders that live and have an address."""
    found = []
    for leader in replicas:
        if not leader.is_alive or not leader.address:
            continue
        template = decode_node_template(leader.node_template)
        if template is not None:
            found.append(_node_set(service, leader, template))
    return tuple(found)


def kept_sets(service: InferenceService, replicas: Iterable[Pod], time: str) -> frozenset[str]:
    """Names of the StatefulSets that must not be deleted: those of leaders that live, or stop in time."""
    return frozenset(
        node_set_name(service, leader.uid)
        for leader in replicas
        if not leader.is_finished and not leader.is_overdue(time)
    )


def broken_leaders(replicas: Iterable[Pod], time: str) -> tuple[Pod, ...]:
    """The leaders to delete, because a worker of theirs cannot go, and so cannot be replaced."""
    return tuple(
        leader
        for leader in replicas
        if leader.is_alive and any(worker.is_overdue(time) for worker in leader.workers)
    )


def is_node_set(obj: Mapping[str, Any]) -> bool:
    """Whether a StatefulSet is one of a leader's: its pod is the controller, and we wrote it."""
    metadata = obj["metadata"]
    labels = metadata.get("labels", {})
    owners = metadata.get("ownerReferences", ())
    return labels.get(MANAGED_BY_LABEL) == FIELD_MANAGER and any(
        owner.get("controller") and owner.get("kind") == "Pod" and owner["uid"] == labels.get(LEADER_LABEL)
        for owner in owners
    )


def _node_set(service: InferenceService, leader: Pod, wanted: NodeTemplate) -> Manifest:
    own = {LEADER_LABEL: leader.uid}
    metadata, spec = wanted.template["metadata"], wanted.template["spec"]
    (worker,) = spec["containers"]
    env = [*worker["env"], {"name": MASTER_ADDR_ENV, "value": leader.address}]
    labels = {**metadata["labels"], **own, REVISION_LABEL: leader.revision}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {
            "name": node_set_name(service, leader.uid),
            "namespace": service.metadata.namespace,
            "labels": {**node_labels(service), **own},
            "ownerReferences": [
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "name": leader.name,
                    "uid": leader.uid,
                    "controller": True,
                    "blockOwnerDeletion": False,
                }
            ],
        },
        "spec": {
            "replicas": wanted.workers,
            "ordinals": {"start": 1},  # the rank of a node; the leader has 0
            "podManagementPolicy": "Parallel",
            "revisionHistoryLimit": 1,
            "selector": {
                "matchLabels": {COMPONENT_LABEL: NODE_COMPONENT, SERVICE_LABEL: service_label(service), **own}
            },
            "template": {
                "metadata": {**metadata, "labels": labels},
                "spec": {**spec, "containers": [{**worker, "env": env}]},
            },
        },
    }


def deployment_problem(service: InferenceService, config: OperatorConfig) -> Problem | None:
    """Why the service's Deployment is not applied; None if it is."""
    return (
        _arguments_problem(service)
        or _account_problem(service, config)
        or _reserved_problem(service, config)
        or cache_problem(service, config)
    )


def named_secrets(service: InferenceService) -> frozenset[str]:
    """Secrets that the service's author has its pods get."""
    model, overlay = service.spec.model, service.spec.pod_template.spec
    own = () if model.secret_ref is None else (model.secret_ref.name,)
    return frozenset((*own, *overlay.read_secrets, *(each.name for each in overlay.image_pull_secrets)))


def _arguments_problem(service: InferenceService) -> Problem | None:
    """What the rules of the CRD cannot tell of the engine's arguments, such as a number out of its bounds."""
    problems = argument_problems(service.spec.engine.args, service.spec.engine.type)
    return Problem("InvalidEngineArgs", f"spec.engine.args: {'; '.join(problems)}") if problems else None


def _reserved_problem(service: InferenceService, config: OperatorConfig) -> Problem | None:
    """Who may write an InferenceService chooses the engine's image, and so reads whatever its pods get. Those of the
    installation are in the operator's namespace only. The CRD refuses most of the names; what was stored before it did
    is refused here."""
    is_home = service.metadata.namespace == config.namespace
    own = {config.fleet_key_secret, config.router_keys_secret, *config.reserved_secrets} if is_home else set()
    secrets = sorted(
        name
        for name in named_secrets(service)
        if name in own or is_own_secret(name) or (is_home and name.startswith(HELM_RELEASE_PREFIX))
    )
    claims = sorted(set(_named_claims(service)) & set(config.reserved_claims)) if is_home else []
    named = [*(f"the Secret {name}" for name in secrets), *(f"the claim {name}" for name in claims)]
    if named:
        return reserved(named)
    credentials = sorted(set(service.spec.pod_template.spec.read_secrets) & set(config.image_pull_secrets))
    if not credentials:
        return None
    return Problem(
        "ObjectReserved",
        f"{', '.join(f'the Secret {name}' for name in credentials)}: has the installation's credentials for the "
        "registry of images, with which pods may pull and which they may not read; remove it from volumes and "
        "variables of spec.podTemplate, or give a Secret of yours another name",
    )


def reserved(named: list[str]) -> Problem:
    """The problem of a service that names these objects."""
    return Problem(
        "ObjectReserved",
        f"{', '.join(named)}: has keys or data of Argosy, which no service may name; remove it from spec.podTemplate "
        "or spec.model, or give an object of yours another name",
    )


def _named_claims(service: InferenceService) -> Iterator[str]:
    yield from service.spec.pod_template.spec.claims
    model = service.spec.model
    for name in (claim_name(model.source), model.cache.claim_name if model.cache is not None else None):
        if name is not None:
            yield name


def _account_problem(service: InferenceService, config: OperatorConfig) -> Problem | None:
    """An account is a permission, which who may write an InferenceService need not have."""
    account = service.spec.placement.service_account_name
    if account is None or {account, ANY_ACCOUNT} & set(config.engine_service_accounts):
        return None
    return Problem(
        "ServiceAccountNotAllowed",
        f"spec.placement.serviceAccountName is {account!r}, which engines may not use in this cluster; leave it out, "
        "or have the administrator add it to engine.serviceAccounts in the Helm chart",
    )
