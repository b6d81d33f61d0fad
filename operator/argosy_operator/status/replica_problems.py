"""Why replicas do not run, as the reason and message of a condition.

Owns the causes that Kubernetes reports: a Deployment that cannot create pods, a container that does not run, a pod
that was evicted, a lost node, a pod that no node takes. Invariant: a message names the pod, and equal inputs name the
same one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from argosy_operator.desired.blocked_surge import QUOTA
from argosy_operator.desired.model_volume import MODELS_VOLUME
from argosy_operator.names import LEADER_LABEL
from argosy_operator.observed.elapsed import seconds_between
from argosy_operator.observed.pod import Pod, Problem
from argosy_operator.status.service_view import ServiceView
from argosy_resource.engine_command import claim_name
from argosy_resource.foreign_engines import default_image_value
from argosy_resource.model_source import MODEL_MOUNT
from argosy_resource.model_spec import Model

UNSCHEDULABLE_SECONDS: Final = 300
"""A replica may wait this long for a node before the service is degraded. An autoscaler takes minutes to add one."""
UNMOUNTED_SECONDS: Final = 120
"""A replica's volumes may take this long before the status names them. Attaching a disk takes a minute."""

_HOST_PATH_REMEDY: Final = (
    "; a node cache needs hostPath: set spec.model.cache.type to claim or none, or have the administrator label the "
    "namespace pod-security.kubernetes.io/enforce=privileged"
)

_FIRST_REFUSAL: Final = "; this was refused first: the ReplicaSet's Events have what is refused now"
"""Kubernetes sets the condition when a pod is refused, and does not renew its message while others are."""
_NO_CACHE_REMEDY: Final = (
    "; node {node} may have no node cache: its DaemonSet runs where nodeCache.nodeSelector and nodeCache.tolerations "
    "of the Helm chart allow it, and spec.placement must not lead to other nodes"
)
_IMAGE_REASONS: Final = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_SIZE_LIMIT_REMEDY: Final = "; the model is larger than spec.model.cache.sizeLimit"


def failed_create(view: ServiceView) -> Problem | None:
    """Why the API server refuses pods of the service, or of its canary. A quota in which a rollout, or a pod that ends,
    makes room by itself is no problem."""
    condition = view.deployment_condition("ReplicaFailure")
    if condition.get("status") != "True":
        condition = view.canary_condition("ReplicaFailure")
    if condition.get("status") != "True":
        return None
    makes_room = view.plan.rollout.phase in ("in-place", "waiting-for-node") or view.counts.draining
    if makes_room and QUOTA in condition.get("message", ""):
        return None
    message = condition.get("message", "")
    if "PodSecurity" in message and "hostPath" in message:
        message += _HOST_PATH_REMEDY
    message += _FIRST_REFUSAL
    return Problem(condition.get("reason") or "FailedCreate", message)


def container_problem(view: ServiceView) -> Problem | None:
    """A container that does not run; pods of the planned revision first, since they show whether the change works."""
    for pod in view.judged_pods:
        if pod.problem is not None:
            return Problem(pod.problem.reason, f"pod {pod.name}: {problem_message(view, pod.problem)}")
    return None


def problem_message(view: ServiceView, problem: Problem) -> str:
    """The message of a pod's problem, with what is known of the resource and not in the pod: the Secret that a fetch
    lacks, the claim that is mounted, or the value of the chart that names an image which the manifest does not."""
    message, engine, images = problem.message or problem.reason, view.service.spec.engine, view.plan.images
    if problem.reason not in _IMAGE_REASONS:
        return message + _named(view.service.spec.model, message)
    is_fetchers = images.fetch != (engine.image or images.engine) and images.fetch in message
    if engine.image and not is_fetchers:
        return message
    value = default_image_value("argosy" if is_fetchers else engine.type)
    return f"{message}; the manifest does not name this image: it is {value} of the Helm chart"


def _named(model: Model, message: str) -> str:
    """What a message of a fetch or an engine means by a path or a field; empty if it names none."""
    if model.secret_ref is not None and "spec.model.secretRef" in message:
        return f"; spec.model.secretRef names {model.secret_ref.name}"
    claim = claim_name(model.source)
    if claim is not None and MODEL_MOUNT in message:
        return (
            f"; {MODEL_MOUNT} is the root of the PersistentVolumeClaim {claim}, which spec.model.source names"
        )
    return ""


def failed_pod(view: ServiceView) -> Problem | None:
    """The newest pod of the planned revision that failed for good (evicted, say), while its replacement is not ready:
    the same may happen to that one. Pods that are deleted end as they should."""
    if view.counts.ready >= view.counts.desired:
        return None
    failed = [
        pod
        for pod in view.observed.pods
        if pod.is_finished
        and not pod.is_terminating
        and pod.problem is not None
        and pod.revision == view.plan.revision
    ]
    if not failed:
        return None
    pod = max(failed, key=lambda pod: (pod.created, pod.name))
    assert pod.problem is not None
    message = pod.problem.message or pod.problem.reason
    if pod.problem.reason == "Evicted" and f'"{MODELS_VOLUME}" exceeds the limit' in message:
        message = message.rstrip(". ") + _SIZE_LIMIT_REMEDY
    return Problem(pod.problem.reason, f"pod {pod.name}: {message}")


def lost_node(view: ServiceView) -> Problem | None:
    for pod in sorted(view.observed.pods, key=lambda pod: pod.name):
        if pod.is_alive and pod.is_lost:
            return Problem("NodeLost", f"pod {pod.name}: node {pod.node} does not answer")
    return None


def unschedulable(view: ServiceView) -> Problem | None:
    for pod in view.judged_pods:
        if pod.gate_words:
            return Problem("SchedulingGated", f"pod {pod.name}: {pod.gate_words}")
        if pod.unschedulable:
            reason = "ClaimNotFound" if _lacks_claim(pod) else "Unschedulable"
            return Problem(reason, f"pod {pod.name}: {pod.unschedulable}")
    return None


def missing_claim(name: str) -> str:
    """The scheduler's words for a PersistentVolumeClaim of this name that does not exist."""
    return f'persistentvolumeclaim "{name}" not found'


def _lacks_claim(pod: Pod) -> bool:
    """Whether the scheduler misses a PersistentVolumeClaim: waiting alone does not change that."""
    return "persistentvolumeclaim" in pod.unschedulable and "not found" in pod.unschedulable


def unmounted(view: ServiceView) -> str:
    """The replica whose node has not prepared it for UNMOUNTED_SECONDS, and where Kubernetes says why; empty if none
    is."""
    for pod in view.judged_pods:
        if pod.unmounted_since and seconds_until_unmounted(pod, view.now) <= 0:
            remedy = ""
            cache = view.service.spec.model.cache
            if cache is not None and cache.type == "node":
                remedy = _NO_CACHE_REMEDY.format(node=pod.node)
            return (
                f"pod {pod.name}: its volumes are not mounted yet, or its network is not set up: "
                f"kubectl describe pod {pod.name}{remedy}"
            )
    return ""


def without_workers(view: ServiceView) -> str:
    """The replica that has an address and not all of its further nodes, and where Kubernetes says why; empty if there
    is none."""
    wanted = view.service.spec.parallelism.nodes - 1
    for pod in sorted(view.observed.pods, key=lambda pod: pod.name):
        is_waiting = pod.is_alive and not pod.is_up and pod.address and pod.revision == view.plan.revision
        present = sum(worker.is_alive for worker in pod.workers)
        if is_waiting and present < wanted:
            return (
                f"pod {pod.name}: {present} of its {wanted} workers exist: "
                f"kubectl describe statefulset -l {LEADER_LABEL}={pod.uid}"
            )
    return ""


def unmounted_pods(replicas: Iterable[Pod], now: str) -> frozenset[tuple[str, bool]]:
    """UIDs of the pods whose nodes have not prepared them, each with whether that takes UNMOUNTED_SECONDS or more."""
    return frozenset(
        (pod.uid, seconds_until_unmounted(pod, now) <= 0)
        for replica in replicas
        for pod in (replica, *replica.workers)
        if pod.is_alive and pod.unmounted_since
    )


def seconds_until_unmounted(pod: Pod, now: str) -> float:
    """Seconds until the status says that a pod's volumes are not mounted; 0 or less if it does now."""
    return UNMOUNTED_SECONDS - seconds_between(pod.unmounted_since, now)


def unschedulable_too_long(view: ServiceView) -> Problem | None:
    """A replica that no node has taken for UNSCHEDULABLE_SECONDS, or ever can. A rollout that waits for a GPU does not
    count: it has a deadline of its own."""
    if view.plan.rollout.phase in ("in-place", "waiting-for-capacity", "waiting-for-node"):
        return None
    left = [seconds_until_degraded(pod, view.now) for pod in view.judged_pods if pod.unschedulable]
    return unschedulable(view) if left and min(left) <= 0 else None


def unready_too_long(view: ServiceView) -> str:
    """The replica that has not been ready for as long as a rollout may go without progress, which Kubernetes watches
    during rollouts only; empty if there is none."""
    deadline = view.service.spec.rollout.progress_deadline_seconds
    for pod in view.judged_pods:
        if pod.unready_since and seconds_until_unready_too_long(pod, view.now, deadline) <= 0:
            return f"pod {pod.name} has not been ready for {deadline} s"
    return ""


def seconds_until_unready_too_long(pod: Pod, now: str, deadline: int) -> float:
    """Seconds until a replica has not been ready for `deadline` seconds; 0 or less if it has, or is ready."""
    return deadline - seconds_between(pod.unready_since, now) if pod.unready_since else 0.0


def seconds_until_degraded(pod: Pod, now: str) -> float:
    """Seconds until a pod that cannot be scheduled makes its service degraded; 0 or less if it does now."""
    if _lacks_claim(pod):
        return 0.0
    return UNSCHEDULABLE_SECONDS - seconds_between(pod.unschedulable_since, now)
