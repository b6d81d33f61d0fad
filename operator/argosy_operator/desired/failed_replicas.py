"""Old replicas that a rollout removes without waiting for their successors, since no request is lost with them.

Owns which these are, and by how many replicas the Deployment may fall short for them. A replica that never served and
cannot start would keep CPUs, GPUs and quota from the correction of its own fault. One that has served may recover, and
is removed as a last resort only: it backs off, no replica serves, and its place may be what a new one lacks.
Invariants: a replica that serves, or that merely starts, does not count as failed; nothing is removed while Kubernetes
might take another old replica instead.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from argosy_operator.desired.blocked_surge import NO_DEVICE
from argosy_operator.observed.observation import Observation
from argosy_operator.observed.pod import Pod

_EXITED: Final = ("ContainerExited", "OOMKilled")
_OCCUPIED: Final = (
    "Insufficient ",
    "Too many pods",
    NO_DEVICE,
    "anti-affinity",
    "topology spread",
    "in use",
    "in-use",
    "volume count",
)
"""The scheduler's words for what another pod may give back."""
_NOT_OFFERED: Final = (
    "didn't match Pod's node affinity/selector",
    "taint",
    "node(s) were unschedulable",
    "persistentvolumeclaim",
    "volume node affinity conflict",
)
"""Its words for what no pod can give back."""


def failed_replicas(observed: Observation, revision: str) -> tuple[Pod, ...]:
    """The living replicas of other revisions than this one that need not be kept. None while another old replica starts
    or may recover: of old replicas that are not ready Kubernetes takes those of the oldest ReplicaSet first, and then
    those whose phase is Pending."""
    alive = [pod for pod in observed.pods if pod.is_alive]
    old = [pod for pod in alive if pod.revision != revision]
    is_served = any(pod.is_routable for pod in alive)
    is_stuck = not is_served and any(_wants_a_place(pod) for pod in alive if pod.revision == revision)
    failed = tuple(
        pod
        for pod in old
        if not pod.is_up and (pod.is_backing_off and is_stuck if pod.has_served else _cannot_start(pod))
    )
    kept = [pod for pod in old if pod not in failed and not pod.is_routable]
    return failed if all(is_stuck and pod.problem is not None for pod in kept) else ()


def unavailable_without(
    failed: Collection[Pod], observed: Observation, revision: str, *, desired: int
) -> int:
    """The least maxUnavailable with which Kubernetes removes the failed replicas; 0 if there are none. All others that
    serve stay: it removes old replicas that are not ready first."""
    if not failed:
        return 0
    kept = sum(
        pod.is_routable or pod.revision != revision
        for pod in observed.pods
        if pod.is_alive and pod not in failed
    )
    return max(0, desired - kept)


def _cannot_start(pod: Pod) -> bool:
    """Whether a replica that never served does not come up. One whose engine has ended once, and is started again
    without delay, may."""
    if pod.unschedulable:
        return True
    if pod.problem is None:
        return False
    return pod.is_backing_off or pod.restarts > 1 or pod.problem.reason not in _EXITED


def _wants_a_place(pod: Pod) -> bool:
    """Whether no node takes the pod, and what it lacks may be what another pod has."""
    is_elsewhere = any(words in pod.unschedulable for words in _NOT_OFFERED)
    return bool(pod.unschedulable) and (
        not is_elsewhere or any(words in pod.unschedulable for words in _OCCUPIED)
    )
