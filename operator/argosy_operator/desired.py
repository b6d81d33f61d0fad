"""The objects a service should consist of: a pure function of the resource and of what is observed.

Owns Secret, Service, PodDisruptionBudget and Deployment, and the decision to replace in place when no GPU is
free for a surge. Must not talk to an API server, look at a clock or remember anything. Invariant: the same
inputs give the same plan; at rest the plan equals what exists.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import xxhash
from msgspec import Struct

from argosy_engine.protocol.keys import internal_key
from argosy_operator.config import OperatorConfig
from argosy_operator.names import (
    API_KEY_ENV,
    ENGINE_PORT,
    REVISION_LABEL,
    child_labels,
    child_name,
    selector,
)
from argosy_operator.observed import Observed
from argosy_operator.pods import Manifest, key_secret_name, pod_template
from argosy_operator.spec import API_VERSION, KIND, InferenceService


class Plan(Struct, frozen=True, kw_only=True):
    """What should exist for one service, in the order in which it is applied."""

    revision: str
    secret: Manifest
    service: Manifest
    budget: Manifest
    deployment: Manifest
    replaces_in_place: bool = False
    """The rollout goes on without a surge, because no GPU is free for one (`NoGPUForSurge`)."""

    @property
    def objects(self) -> tuple[Manifest, ...]:
        return (self.secret, self.service, self.budget, self.deployment)


def desired(service: InferenceService, observed: Observed, config: OperatorConfig) -> Plan:
    """What should exist now."""
    secret = _secret(service, config)
    template, revision = pod_template(service, config, key_digest=digest(secret["data"]))
    in_place = no_gpu_for_surge(service, observed, revision)
    return Plan(
        revision=revision,
        secret=secret,
        service=_service(service),
        budget=_budget(service),
        deployment=_deployment(service, template, in_place=in_place),
        replaces_in_place=in_place,
    )


def digest(value: Any) -> str:
    """Short hash of any JSON value."""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(value, order="deterministic"))


def no_gpu_for_surge(service: InferenceService, observed: Observed, revision: str) -> bool:
    """Whether this rollout must free a GPU before it can take one.

    It starts when a pod of the new revision cannot be scheduled for want of GPUs while living pods of an old
    one hold some. It then lasts until no old pod is left, which the live Deployment tells (this revision, no
    surge): the starved pod is scheduled as soon as the first old one is gone, and a decision on that pod
    alone would flap.
    """
    gpu, rollout = service.spec.resources.gpu, service.spec.rollout
    if gpu is None or rollout.surge == 0:
        return False
    holders = [pod for pod in observed.pods if pod.is_alive and pod.node and pod.revision != revision]
    if not holders:
        return False
    wanting = f"Insufficient {gpu.resource_name}"
    starved = sum(
        pod.is_alive and pod.revision == revision and wanting in pod.unschedulable for pod in observed.pods
    )
    leaving = sum(pod.is_terminating and bool(pod.node) for pod in observed.pods)
    return starved > leaving or _is_without_surge(observed, revision)


def _is_without_surge(observed: Observed, revision: str) -> bool:
    if observed.deployment is None:
        return False
    spec = observed.deployment["spec"]
    labels = spec["template"]["metadata"].get("labels", {})
    surge = spec.get("strategy", {}).get("rollingUpdate", {}).get("maxSurge")
    return labels.get(REVISION_LABEL) == revision and surge == 0


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


def _secret(service: InferenceService, config: OperatorConfig) -> Manifest:
    key = internal_key(config.fleet_key, service.metadata.uid)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(service, key_secret_name(service)),
        "type": "Opaque",
        "data": {API_KEY_ENV: base64.b64encode(key.encode()).decode()},
    }


def _service(service: InferenceService) -> Manifest:
    port = {"name": "http", "port": ENGINE_PORT, "targetPort": "http", "protocol": "TCP"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(service, child_name(service)),
        "spec": {"type": "ClusterIP", "selector": selector(service), "ports": [port]},
    }


def _budget(service: InferenceService) -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(service, child_name(service)),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": selector(service)},
            # A replica that never became ready must not keep a node from being drained.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _deployment(service: InferenceService, template: Manifest, *, in_place: bool) -> Manifest:
    rollout = service.spec.rollout
    surge = 0 if in_place else rollout.surge
    unavailable = max(1, rollout.unavailable) if in_place else rollout.unavailable
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(service, child_name(service)),
        "spec": {
            "replicas": service.spec.replicas,
            "revisionHistoryLimit": 3,
            "progressDeadlineSeconds": rollout.progress_deadline_seconds,
            "selector": {"matchLabels": selector(service)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable},
            },
            "template": template,
        },
    }
