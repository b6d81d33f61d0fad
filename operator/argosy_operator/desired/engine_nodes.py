"""The further nodes of a replica whose engine spans several: a StatefulSet of workers beside each leader.

The replica is a pod of the Deployment, as of any service: it is node 0, has the API server, and is all that routers,
gates, rollouts and scaling know of. Each such leader carries the pod template of its workers in an annotation, so that
one of an older revision gets the workers that fit it. Annotations can be changed by who may not create pods, so its
hash is in the leader's environment, which nobody can change (`observed.pod` compares them). Owns that template, the
StatefulSets, and which of them are surplus. Must not know rollouts. Invariants: a StatefulSet belongs to its leader's
pod, with which Kubernetes deletes it; that of a leader which stops stays as it is until the leader is gone.

    a worker or the leader ends   the engines of the others end by themselves, the kubelets start all anew
    a worker cannot go            its machine is lost, say, and a StatefulSet replaces no pod that is still there: the
                                  leader is deleted, and the next one gets workers of its own
    a leader cannot go            its workers are deleted, since its successor has others
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, Final

import msgspec

from argosy_operator.desired.manifest_fields import Manifest, present
from argosy_operator.names import (
    FIELD_MANAGER,
    LEADER_LABEL,
    MANAGED_BY_LABEL,
    NODE_TEMPLATE_ANNOTATION,
    REVISION_LABEL,
    child_labels,
    node_set_name,
)
from argosy_operator.observed.node_template import (
    MAX_CHARS,
    MAX_VALUES,
    NodeTemplate,
    decode_node_template,
    num_values,
)
from argosy_operator.observed.pod import NODE_TEMPLATE_HASH_ENV, Pod, Problem
from argosy_resource.engine_address import (
    API_KEY_ENV,
    COMPONENT_LABEL,
    INTERNAL_KEYS_ENV,
    NODE_COMPONENT,
    NODE_KEY_ENV,
    SERVICE_LABEL,
    service_label,
)
from argosy_resource.types import InferenceService

MASTER_ADDR_ENV: Final = "ARGOSY_MASTER_ADDR"
"""Address of the leader's pod."""
NODE_RANK_ENV: Final = "ARGOSY_NODE_RANK"
INDEX_LABEL: Final = "apps.kubernetes.io/pod-index"
"""Where the StatefulSet controller writes a pod's ordinal."""

_OF_THE_API_SERVER: Final = ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle")
"""Fields of the container that mean its API server, which workers lack."""


def leader_args() -> list[str]:
    """Further arguments of an engine that spans nodes. Kubernetes fills in the variables."""
    return ["--master-addr", f"$({MASTER_ADDR_ENV})"]


def leader_env(secret_name: str) -> list[Manifest]:
    """Further variables of the leader's container."""
    secret = {"secretKeyRef": {"name": secret_name, "key": NODE_KEY_ENV}}
    return [
        {"name": NODE_KEY_ENV, "valueFrom": secret},
        {"name": MASTER_ADDR_ENV, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]


def template_hash(text: str) -> Manifest:
    """The variable of the leader's container that vouches for its annotation."""
    return {"name": NODE_TEMPLATE_HASH_ENV, "value": sha256(text.encode()).hexdigest()}


def encode_node_template(
    service: InferenceService, leader: Manifest, *, not_for_workers: Iterable[str], key_volume: str
) -> str:
    """The annotation of a leader.

    Args:
        leader: the leader's pod template, complete but for this annotation, its hash and its revision.
        not_for_workers: names of variables that only the leader's container has, besides the keys of its API.
        key_volume: name of the volume with these keys, which workers do not get either.
    """
    spec = {name: value for name, value in leader["spec"].items() if name != "readinessGates"}
    spec["volumes"] = [each for each in spec["volumes"] if each["name"] != key_volume]
    (engine,) = spec["containers"]
    left_out = {API_KEY_ENV, INTERNAL_KEYS_ENV, MASTER_ADDR_ENV, *not_for_workers}
    index = {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX_LABEL}']"}}
    worker = {name: value for name, value in engine.items() if name not in _OF_THE_API_SERVER}
    worker["args"] = [*engine["args"], "--headless", "--node-rank", f"$({NODE_RANK_ENV})"]
    worker["env"] = [each for each in engine["env"] if each["name"] not in left_out]
    worker["env"].append({"name": NODE_RANK_ENV, "valueFrom": index})
    worker["volumeMounts"] = [each for each in engine["volumeMounts"] if each["name"] != key_volume]
    metadata = leader["metadata"]
    template = {
        "metadata": {
            "labels": {**metadata["labels"], **_labels(service)},
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


def _labels(service: InferenceService) -> dict[str, str]:
    return {**child_labels(service), COMPONENT_LABEL: NODE_COMPONENT}


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
            "labels": {**_labels(service), **own},
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
                "matchLabels": {
                    COMPONENT_LABEL: NODE_COMPONENT,
                    SERVICE_LABEL: service_label(service),
                    **own,
                }
            },
            "template": {
                "metadata": {**metadata, "labels": labels},
                "spec": {**spec, "containers": [{**worker, "env": env}]},
            },
        },
    }
