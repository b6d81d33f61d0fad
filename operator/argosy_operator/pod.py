"""A typed view of one replica's pod, and of the pods of its further nodes.

Owns the reading of a pod's status: whether it is up, lost or unschedulable, why it does not run and how its containers
ended (one printable line of bounded length), how far the fetch of its model is; and the annotation in which a replica
says how many further nodes it has and the pod template that all of them have, with its bounds. That text is a tenant's
to write, in a pod of their own, so anything may be in it. Must not decide anything. Invariants: a view is a function of
the object alone, so that a decision on it can be repeated in a test; a node template that is returned has every field
that `desired.children` reads, and can be encoded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from hashlib import sha256
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from argosy_operator.names import (
    CANARY_TRACK,
    DEPLOYMENTS,
    LEADER_LABEL,
    MODEL_CACHED_CONDITION,
    NODE_TEMPLATE_ANNOTATION,
    REVISION_LABEL,
    ROUTABLE_GATE,
    STATEFUL_SETS,
    TRACK_LABEL,
    Object,
    controller_of,
    node_set_name,
    pod_owners,
)
from argosy_resource.engine_command import flags_as_fields
from argosy_resource.pod_fields import ENGINE_CONTAINER, FETCH_CONTAINER
from argosy_resource.resources import MAX_DEVICES
from argosy_resource.types import InferenceService

_MAX_LAST_LINE: Final = 1024
"""Characters of a container's last line; an exception's text can be as long as its input."""


def _last_line(ended: Mapping[str, Any]) -> str:
    """The last line that a container left, as its termination message or in its log; empty if it left none."""
    lines = [line.strip() for line in (ended.get("message") or "").splitlines() if line.strip()]
    if not lines:
        return ""
    return "".join(char if char.isprintable() else " " for char in lines[-1])[:_MAX_LAST_LINE]


def _describe_exit(ended: Mapping[str, Any]) -> str:
    """Reason and exit code, with the last line, which usually says why, and the fields that an engine's flags are."""
    result = f"{ended.get('reason') or 'Error'}, code {ended.get('exitCode', '?')}"
    line = _last_line(ended)
    fields = flags_as_fields(line)
    return (f"{result}: {line}" if line else result) + (f"; {fields}" if fields else "")


def seconds_between(start: str, end: str) -> float:
    """Seconds from `start` to `end`; 0 if one of them is missing, or has no zone."""
    try:
        return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
    except (ValueError, TypeError):
        return 0.0


def min_time(time: str, other: str) -> str:
    """The earlier of two times; `time` if one of them is missing, or has no zone."""
    return other if seconds_between(time, other) < 0 else time


FetchState = Literal["pending", "running", "succeeded", "failed"]
"""State of the init container. `failed` lasts until its next start."""


class ModelFetch(Struct, frozen=True, kw_only=True):
    """The fetch of one pod's model."""

    state: FetchState = "pending"
    exit_message: str = ""
    """Last line of the init container that has succeeded or failed."""
    condition_status: str = ""
    """The pod's condition ModelCached; empty if it was never written."""
    condition_reason: str = ""
    condition_message: str = ""
    last_probe_time: str = ""
    """When the condition was last written (RFC 3339)."""

    @property
    def has_failed(self) -> bool:
        """Whether the last attempt failed. The next one clears that once it reports more than its start, so that
        attempts which fail at once do not alternate between two states."""
        return self.state == "failed" or (self.state == "running" and self.condition_reason == "FetchFailed")

    @property
    def is_under_way(self) -> bool:
        return self.state == "running" and not self.has_failed

    @property
    def is_blocked(self) -> bool:
        """Whether it waits for a process that has the store's lock and makes no progress."""
        return self.is_under_way and self.condition_reason == "StoreLocked"

    @property
    def failure(self) -> str:
        """Why it failed, while it has failed."""
        return self.exit_message or self.condition_message

    @property
    def summary(self) -> str:
        """How far it is, while it is under way; empty if it has not reported."""
        return self.condition_message if self.condition_reason in ("Fetching", "StoreLocked") else ""


def _read_fetch(spec: Object, status: Object) -> ModelFetch | None:
    """Read the fetch from a pod; None if the pod does not fetch its model."""
    if all(each["name"] != FETCH_CONTAINER for each in spec.get("initContainers", ())):
        return None
    condition = _named(status.get("conditions", ()), "type", MODEL_CACHED_CONDITION)
    container = fetch_container(status)
    state, ended = _state(container)
    exit_message = ""
    if ended is not None:
        exit_message = _last_line(ended) or ("" if state == "succeeded" else _describe_exit(ended))
    return ModelFetch(
        state=state,
        exit_message=exit_message,
        condition_status=condition.get("status", ""),
        condition_reason=condition.get("reason") or "",
        condition_message=condition.get("message") or "",
        last_probe_time=condition.get("lastProbeTime") or "",
    )


def fetch_container(status: Object) -> Object:
    """Status of the init container that fetches; empty if the kubelet has not reported it."""
    return _named(status.get("initContainerStatuses", ()), "name", FETCH_CONTAINER)


def _state(container: Object) -> tuple[FetchState, Object | None]:
    """The state, and how the container ended if it did."""
    state = container.get("state", {})
    if "running" in state:
        return "running", None
    now, last = state.get("terminated"), container.get("lastState", {}).get("terminated")
    if now is not None:
        return ("failed" if now.get("exitCode") else "succeeded"), now
    if last is not None and last.get("exitCode"):
        return "failed", last
    return "pending", None


def _named(items: Any, key: str, name: str) -> Object:
    return next((each for each in items if each.get(key) == name), {})


MAX_DEPTH: Final = 64
"""Levels of lists and objects in a template; Kubernetes' own pod templates have about a dozen."""
MAX_CHARS: Final = 128 * 1024
"""Of the text. All annotations of a pod together may have twice as many bytes."""
MAX_VALUES: Final = 2048
"""Estimate of the values in a template: the text's commas and opening brackets. Each value takes some hundred bytes of
memory, whatever it takes in the text."""


class NodeTemplate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the annotation holds."""

    workers: Annotated[int, Meta(ge=1, le=MAX_DEVICES - 1)]
    template: dict[str, Any]
    """Pod template of the workers, without what differs from leader to leader."""


class _Container(Struct):
    env: list[dict[str, Any]]


class _Spec(Struct):
    containers: Annotated[list[_Container], Meta(min_length=1, max_length=1)]


class _Metadata(Struct):
    labels: dict[str, str]
    annotations: dict[str, str] = {}


class _PodTemplate(Struct):
    """The fields of a template that are read; others may be there."""

    metadata: _Metadata
    spec: _Spec


@functools.lru_cache(maxsize=16)
def digest(text: str) -> str:
    """The hash by which a pod's container vouches for the annotation. All replicas of a revision have the same text."""
    return sha256(text.encode()).hexdigest()


def num_values(text: str) -> int:
    """An estimate of how many values are in a template, before it is read."""
    return sum(map(text.count, ",[{"))


@functools.lru_cache(maxsize=16)
def decode_node_template(text: str) -> NodeTemplate | None:
    """Read the annotation; None if there is none, or it does not say of what form the workers are. What is returned is
    shared, and only to be read."""
    if not text or len(text) > MAX_CHARS or num_values(text) > MAX_VALUES:
        return None
    try:
        found = msgspec.json.decode(text, type=NodeTemplate)
        msgspec.convert(found.template, _PodTemplate)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return found if _is_shallow(found.template) else None


def _is_shallow(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for each in level for inner in _items(each)]
        if not level:
            return True
    return False


def _items(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


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
    """What the replica says of its further nodes (`desired.pod_template`); empty if it has none."""
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
    metadata, spec, status = obj["metadata"], obj.get("spec", {}), obj.get("status", {})
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    scheduled = conditions.get("PodScheduled", {})
    containers = {each["name"]: each for each in status.get("containerStatuses", ())}
    container: Object = containers.get(ENGINE_CONTAINER, {})
    fetch = _read_fetch(spec, status)
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
            message = f"{message} (last exit: {_describe_exit(ended)})".strip()
        oom = ended is not None and ended.get("reason") == "OOMKilled"
        return Problem("OOMKilled" if oom else _waiting_reason(waiting), message)
    if ended and not container.get("ready"):
        reason = ended.get("reason") or "Error"
        return Problem(
            "OOMKilled" if reason == "OOMKilled" else "ContainerExited", f"last exit: {_describe_exit(ended)}"
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
