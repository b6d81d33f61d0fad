"""A typed view of one replica's pod.

Owns the reading of a pod's status: whether it is up, lost or unschedulable, and why it does not run. Must not decide
anything. Invariant: a view is a function of the object alone, so that a decision on it can be repeated in a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from argosy_operator.kinds import DEPLOYMENTS, STATEFUL_SETS, controller_of
from argosy_operator.names import (
    CANARY_TRACK,
    LEADER_LABEL,
    NODE_TEMPLATE_ANNOTATION,
    REVISION_LABEL,
    ROUTABLE_GATE,
    TRACK_LABEL,
    node_set_name,
    pod_owners,
)
from argosy_operator.observed.container_exit import describe_exit
from argosy_operator.observed.elapsed import seconds_between
from argosy_operator.observed.model_fetch import ModelFetch, fetch_container, read_fetch
from argosy_operator.observed.node_template import decode_node_template, digest
from argosy_resource.pod_overlay import ENGINE_CONTAINER
from argosy_resource.types import InferenceService

Object = Mapping[str, Any]

DELETION_COST_ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"
"""The ReplicaSet controller removes pods of lower cost first."""
NODE_TEMPLATE_HASH_ENV: Final = "ARGOSY_NODE_TEMPLATE_HASH"
"""Variable of the container of a replica that has further nodes."""
OVERDUE_SECONDS: Final = 60
"""A kubelet that answers has removed a pod this long after its time to stop has passed."""


class Problem(Struct, frozen=True):
    """Why something does not run: a CamelCase reason, as Kubernetes gives it, and a message."""

    reason: str
    message: str


class Pod(Struct, frozen=True, kw_only=True):
    """One replica's pod."""

    name: str
    uid: str
    revision: str = ""
    is_canary: bool = False
    """Whether it belongs to a canary rollout's own Deployment."""
    created: str = ""
    """When it was created (RFC 3339)."""
    node: str = ""
    is_terminating: bool = False
    is_finished: bool = False
    """Failed or succeeded: it never serves again (evicted, say)."""
    containers_ready: bool = False
    gate: str = ""
    """Status of the condition `routable`; empty if it was never written."""
    gate_since: str = ""
    """When that status was written (RFC 3339); empty if it never was."""
    is_ready: bool = False
    """The pod's condition Ready: containers ready, gate open, and the node answers."""
    unready_since: str = ""
    """Since when that is false (RFC 3339); empty while it is true, and before the kubelet has said so."""
    is_lost: bool = False
    """Its node does not answer: the node controller set Ready to False, and the kubelet reports nothing any more."""
    unschedulable: str = ""
    """Message of the scheduler, while no node takes the pod; else empty."""
    unschedulable_since: str = ""
    """Time since which the scheduler finds no node, or may not look for one (RFC 3339); else empty."""
    gate_words: str = ""
    """What keeps the scheduler from looking for a node (`spec.schedulingGates`), such as Kueue; else empty."""
    unmounted_since: str = ""
    """Time since which it has a node (RFC 3339), while the node has not prepared it for its containers: volumes are
    mounted first, then the network is set up. Else empty."""
    problem: Problem | None = None
    fetch: ModelFetch | None = None
    """None if the pod does not fetch its model."""
    restarts: int = 0
    is_backing_off: bool = False
    """Whether the kubelet waits before it starts the engine, or the model's fetch, again, or pulls the image again."""
    deletion_cost: int = 0
    """What the ReplicaSet controller compares among ready pods."""
    address: str = ""
    """Its address in the cluster's network; empty while it has none."""
    deadline: str = ""
    """When it should have stopped (RFC 3339), while it is terminating; else empty."""
    grace_s: int = 0
    """Seconds that it had to stop."""
    stopping_since: str = ""
    """When this operator saw first that it is terminating, by its own clock (RFC 3339); empty if that is not known."""
    leader: str = ""
    """UID of the replica that it says to be a further node of; empty for a replica."""
    stateful_set: str = ""
    """Name of the StatefulSet that controls it; empty if none does."""
    replica_set: str = ""
    """Name of the ReplicaSet that controls it; empty if none does."""
    node_template: str = ""
    """What the replica says of its further nodes (`desired.engine_nodes`); empty if it has none."""
    workers: tuple[Pod, ...] = ()
    """Its further nodes."""

    @property
    def is_alive(self) -> bool:
        return not self.is_terminating and not self.is_finished

    @property
    def is_routable(self) -> bool:
        return self.is_alive and self.is_ready and self.gate == "True"

    @property
    def has_served(self) -> bool:
        """Whether it was ever sent requests: until then nobody writes its gate."""
        return bool(self.gate)

    @property
    def is_up(self) -> bool:
        """Its containers are ready, and its node answers."""
        return self.is_alive and self.containers_ready and not self.is_lost

    def is_overdue(self, time: str) -> bool:
        """Whether it should have been gone for a while: its machine does not answer, say."""
        return self.is_terminating and self.seconds_until_overdue(time) <= 0

    def seconds_until_overdue(self, time: str) -> float:
        """Seconds until a pod that is terminating is overdue; 0 or less if it is. The deadline is of the API server's
        clock, which may be behind: so much time has to have passed by the operator's own one as well."""
        left = seconds_between(time, self.deadline)
        if self.stopping_since:
            left = max(left, self.grace_s + seconds_between(time, self.stopping_since))
        return OVERDUE_SECONDS + left


def own_pods(service: InferenceService, objects: Iterable[Object]) -> Iterator[Pod]:
    """Read the pods that carry the service's label, without those that only copy the labels of its replicas: a replica
    is controlled by a ReplicaSet of its Deployments. (Routers pass the others by as well.)"""
    owners = pod_owners(service)
    for obj in objects:
        pod = read_pod(obj)
        if pod.leader or pod.replica_set.startswith(owners):
            yield pod


def with_workers(service: InferenceService, pods: Iterable[Pod]) -> tuple[Pod, ...]:
    """The replicas among the pods, each with its further nodes, and with their troubles if it has none of its own: a
    replica waits for its nodes without one.

    Whoever may create pods can label one as a worker of any replica. So one counts only if the replica asks for workers
    and the pod has the place of one: the name that the replica's StatefulSet gives to it, and that StatefulSet as its
    controller. No two pods have one name, and a pod of an earlier StatefulSet keeps a new one from creating its own, so
    UIDs are not compared."""
    pods = tuple(pods)
    workers: dict[str, list[Pod]] = {}
    for pod in pods:
        if pod.leader:
            workers.setdefault(pod.leader, []).append(pod)
    return tuple(
        _with_workers(pod, _in_place(service, pod, workers.get(pod.uid, [])))
        for pod in pods
        if not pod.leader
    )


def _in_place(service: InferenceService, leader: Pod, candidates: list[Pod]) -> list[Pod]:
    wanted = decode_node_template(leader.node_template) if candidates else None
    if wanted is None:
        return []
    owner = node_set_name(service, leader.uid)
    places = {f"{owner}-{rank}" for rank in range(1, wanted.workers + 1)}
    return [each for each in candidates if each.stateful_set == owner and each.name in places]


def _with_workers(leader: Pod, workers: list[Pod]) -> Pod:
    if not workers:
        return leader
    problem, waiting, unmounted = leader.problem, leader, leader.unmounted_since
    for worker in workers:
        if not worker.is_alive:
            continue
        if problem is None and worker.problem is not None:
            message = worker.problem.message or worker.problem.reason
            problem = Problem(worker.problem.reason, f"its node {worker.name}: {message}")
        if not (waiting.unschedulable or waiting.gate_words) and (worker.unschedulable or worker.gate_words):
            waiting = worker
        unmounted = unmounted or worker.unmounted_since
    return msgspec.structs.replace(
        leader,
        workers=tuple(workers),
        problem=problem,
        unschedulable=waiting.unschedulable,
        unschedulable_since=waiting.unschedulable_since,
        gate_words=waiting.gate_words,
        unmounted_since=unmounted,
    )


def read_pod(obj: Object) -> Pod:
    """Read a pod."""
    metadata, spec, status = obj["metadata"], obj.get("spec", {}), obj.get("status", {})
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    scheduled = conditions.get("PodScheduled", {})
    containers = {each["name"]: each for each in status.get("containerStatuses", ())}
    container: Object = containers.get(ENGINE_CONTAINER, {})
    fetch = read_fetch(spec, status)
    created = metadata.get("creationTimestamp") or ""
    gated = _gate_words(spec) if scheduled.get("reason") == "SchedulingGated" else ""
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        revision=metadata.get("labels", {}).get(REVISION_LABEL, ""),
        is_canary=metadata.get("labels", {}).get(TRACK_LABEL) == CANARY_TRACK,
        created=created,
        node=spec.get("nodeName") or "",
        is_terminating=bool(metadata.get("deletionTimestamp")),
        is_finished=status.get("phase") in ("Failed", "Succeeded"),
        containers_ready=conditions.get("ContainersReady", {}).get("status") == "True",
        gate=conditions.get(ROUTABLE_GATE, {}).get("status", ""),
        gate_since=conditions.get(ROUTABLE_GATE, {}).get("lastTransitionTime") or "",
        is_ready=conditions.get("Ready", {}).get("status") == "True",
        unready_since=_unready_since(conditions),
        is_lost=_is_lost(conditions),
        unschedulable=scheduled.get("message", "") if scheduled.get("reason") == "Unschedulable" else "",
        unschedulable_since=scheduled.get("lastTransitionTime") or (created if gated else ""),
        gate_words=gated,
        unmounted_since=_unmounted_since(conditions),
        problem=_problem(status, container, fetch),
        fetch=fetch,
        restarts=container.get("restartCount", 0),
        is_backing_off=_backs_off(container) or _backs_off(fetch_container(status)),
        deletion_cost=_deletion_cost(metadata),
        address=status.get("podIP") or "",
        deadline=metadata.get("deletionTimestamp") or "",
        grace_s=metadata.get("deletionGracePeriodSeconds") or 0,
        leader=metadata.get("labels", {}).get(LEADER_LABEL, ""),
        stateful_set=_controller(obj, STATEFUL_SETS.api_version, STATEFUL_SETS.name),
        replica_set=_controller(obj, DEPLOYMENTS.api_version, "ReplicaSet"),
        node_template=_node_template(metadata, spec),
    )


def _gate_words(spec: Object) -> str:
    names = ", ".join(gate["name"] for gate in spec.get("schedulingGates") or ()) or "a scheduling gate"
    return f"waits for {names}, which keeps it from being scheduled"


def _controller(obj: Object, api_version: str, kind: str) -> str:
    """Name of the pod's controller, if it is of this kind; else empty."""
    owner = controller_of(obj)
    is_one = (owner.get("apiVersion"), owner.get("kind")) == (api_version, kind)
    return owner["name"] if is_one else ""


def _node_template(metadata: Object, spec: Object) -> str:
    """The annotation, if it is the one with which the pod was created."""
    text = metadata.get("annotations", {}).get(NODE_TEMPLATE_ANNOTATION, "")
    if not text:
        return ""
    engines = [each for each in spec.get("containers", ()) if each["name"] == ENGINE_CONTAINER]
    variables = {each["name"]: each.get("value") for engine in engines for each in engine.get("env", ())}
    return text if variables.get(NODE_TEMPLATE_HASH_ENV) == digest(text) else ""


def _backs_off(container: Object) -> bool:
    waiting: Object = container.get("state", {}).get("waiting") or {}
    return (waiting.get("reason") or "").endswith("BackOff")


def _deletion_cost(metadata: Object) -> int:
    text = metadata.get("annotations", {}).get(DELETION_COST_ANNOTATION, "0")
    try:
        return int(text)
    except ValueError:
        return 0


def _unmounted_since(conditions: Mapping[str, Object]) -> str:
    scheduled, prepared = conditions.get("PodScheduled", {}), conditions.get("PodReadyToStartContainers", {})
    if scheduled.get("status") != "True" or prepared.get("status") != "False":
        return ""
    return scheduled.get("lastTransitionTime") or ""


def _unready_since(conditions: Mapping[str, Object]) -> str:
    ready = conditions.get("Ready", {})
    return (ready.get("lastTransitionTime") or "") if ready.get("status") == "False" else ""


def _is_lost(conditions: Mapping[str, Object]) -> bool:
    """Whether the pod stopped being ready although its containers are ready and its gate is open: only the node
    controller does that. Right after the gate opened, Ready is False as well, but since an earlier time."""
    ready, gate = conditions.get("Ready", {}), conditions.get(ROUTABLE_GATE, {})
    return (
        ready.get("status") == "False"
        and gate.get("status") == "True"
        and conditions.get("ContainersReady", {}).get("status") == "True"
        and (ready.get("lastTransitionTime") or "") > (gate.get("lastTransitionTime") or "")
    )


_STARTING_REASONS: Final = ("ContainerCreating", "PodInitializing")


def _problem(status: Object, container: Object, fetch: ModelFetch | None) -> Problem | None:
    if status.get("phase") == "Failed":
        return Problem(status.get("reason") or "PodFailed", status.get("message") or "the pod failed")
    if fetch is not None:
        if fetch.has_failed:
            return Problem("ModelFetchFailed", fetch.failure)
        blocked = _waiting(fetch_container(status))
        if blocked:
            return Problem(_waiting_reason(blocked), blocked.get("message", ""))
    return _container_problem(container)


def _container_problem(container: Object) -> Problem | None:
    ended = container.get("lastState", {}).get("terminated") or container.get("state", {}).get("terminated")
    waiting = _waiting(container)
    if waiting:
        message = waiting.get("message", "")
        if ended:
            message = f"{message} (last exit: {describe_exit(ended)})".strip()
        oom = ended is not None and ended.get("reason") == "OOMKilled"
        return Problem("OOMKilled" if oom else _waiting_reason(waiting), message)
    if ended and not container.get("ready"):
        reason = ended.get("reason") or "Error"
        return Problem(
            "OOMKilled" if reason == "OOMKilled" else "ContainerExited", f"last exit: {describe_exit(ended)}"
        )
    return None


def _waiting_reason(waiting: Object) -> str:
    """The reason of a container that waits. The kubelet alternates between the two for an image that it cannot pull."""
    reason: str = waiting.get("reason") or "Waiting"
    return "ImagePullBackOff" if reason == "ErrImagePull" else reason


def _waiting(container: Object) -> Object | None:
    """What the container waits for, unless it merely starts."""
    waiting: Object | None = container.get("state", {}).get("waiting")
    return waiting if waiting and waiting.get("reason") not in _STARTING_REASONS else None
