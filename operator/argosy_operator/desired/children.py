"""The children that a service should have: a pure function of the resource and of what is observed.

Owns Secret, Service, PodDisruptionBudget, Deployment and, while a change is tried, that of its canary; `engine_nodes`
has those of replicas that span several nodes, and `rollout` decides how a change reaches the pods. Must not talk to an
API server, look at a clock or remember anything. Invariant: equal inputs give an equal plan; in the end the plan equals
what exists.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import msgspec
import xxhash
from msgspec import Struct

from argosy_operator.config import OperatorConfig
from argosy_operator.desired.blocked_surge import nudge
from argosy_operator.desired.canary import key_of_trial
from argosy_operator.desired.deployment_problem import deployment_problem
from argosy_operator.desired.engine_nodes import node_sets, node_template_problem
from argosy_operator.desired.manifest_fields import Manifest
from argosy_operator.desired.pinned_images import (
    Images,
    held_annotations,
    pinned_images,
    replaced_revision,
    served_revision,
)
from argosy_operator.desired.pod_template import follows_keys, key_secret_name, pod_template
from argosy_operator.desired.rollout import MIN_READY_SECONDS, RolloutPlan, plan_rollout
from argosy_operator.kinds import DEPLOYMENTS
from argosy_operator.names import (
    CANARY_TRACK,
    NUDGE_ANNOTATION,
    REVISION_LABEL,
    SERVED_ANNOTATION,
    TRACK_LABEL,
    canary_name,
    child_labels,
    child_name,
)
from argosy_operator.observed.observation import Observation
from argosy_operator.observed.pod import Problem
from argosy_protocol.bearer_keys import internal_key, node_key
from argosy_resource.engine_address import (
    API_KEY_ENV,
    API_KEYS_FIELD,
    ENGINE_PORT,
    NODE_KEY_ENV,
    SERVICE_LABEL,
    selector,
    service_label,
)
from argosy_resource.types import API_VERSION, KIND, InferenceService


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
    """Compute the children that should exist now."""
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
