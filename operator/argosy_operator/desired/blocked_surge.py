"""Why a rollout cannot have its surge, and how long it waits for what is missing before it replaces replicas in place.

Owns what counts as missing room, and when Kubernetes is asked again for pods that were refused. Must not know a
strategy (`rollout`). Three things block a surge that a replica which is removed gives back:

    gpu      the scheduler finds no GPU, or no device of a claim, for a new pod
    room     it finds no memory, CPUs or node by the pods' own rules (anti-affinity, topology spread), or a gate of
             another controller, such as Kueue's, keeps it from looking
    quota    the API server refuses new pods for a ResourceQuota; there is no pod then

Invariants: nothing blocks a surge while no old replica holds a place; a blocked surge stays so until no old replica is
left, since a decision on the pending pod alone would flap.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, Literal

from msgspec import Struct

from argosy_operator.names import NUDGE_ANNOTATION
from argosy_operator.observed.deployment import deployment_condition, rolling_update, template_revision
from argosy_operator.observed.elapsed import seconds_between
from argosy_operator.observed.observation import Observation
from argosy_operator.observed.pod import Pod
from argosy_resource.resources import Resources
from argosy_resource.types import InferenceService

NO_DEVICE: Final = "cannot allocate all claims"
"""The scheduler's words (plugin DynamicResources)."""
_ROOM: Final = (
    *("Insufficient memory", "Insufficient cpu", "Insufficient ephemeral-storage", "Insufficient hugepages"),
    *("Too many pods", "anti-affinity", "topology spread", "free ports"),
)
"""The scheduler's words for what an old replica gives back."""
ROOM_SECONDS: Final = 300
"""A rollout waits at least so long for memory or a node, which a cluster autoscaler may add, before it replaces
replicas in place. For GPUs, which it often cannot, the resource says how long."""
NUDGE_SECONDS: Final = 20
"""How often Kubernetes is asked again. A quota that was raised, or pods that have ended, are noticed so late."""
QUOTA: Final = "exceeded quota"
"""The API server's words for a pod that a ResourceQuota has no room for."""

Missing = Literal["gpu", "room", "quota"]


class BlockedSurge(Struct, frozen=True):
    """What a rollout's surge lacks."""

    missing: Missing
    words: str = ""
    """Those of scheduler or API server; empty once replicas are replaced in place, and nothing says them any more."""
    since: str = ""
    """Since when it is missing (RFC 3339)."""


def blocked_surge(
    service: InferenceService, observed: Observation, revision: str, failed: Collection[Pod] = ()
) -> BlockedSurge | None:
    """What this rollout lacks for an additional replica while old ones hold it; None if nothing. The replicas in
    `failed` are removed in any case.

    The live Deployment (this revision, no surge) keeps the state: the pending pod is scheduled as soon as the first old
    one is gone.
    """
    if service.spec.rollout.surge == 0:
        return None
    old = [pod for pod in observed.pods if pod.is_alive and pod.revision != revision]
    refusal = quota_refusal(observed.deployment)
    if old and refusal and _is_of(observed, revision) and not all(pod in failed for pod in old):
        return BlockedSurge("quota", refusal["message"], refusal.get("lastTransitionTime") or "")
    holders = [pod for pod in old if pod.node]
    if all(pod in failed for pod in holders):
        return None
    lacking = _lacking(service.spec.resources)
    pending = [pod for pod in observed.pods if _is_pending(pod, revision, lacking)]
    leaving = sum(bool(pod.node) and (pod.is_terminating or pod in failed) for pod in observed.pods)
    if len(pending) > leaving:
        first = min(pending, key=lambda pod: (pod.unschedulable_since, pod.name))
        is_gpu = any(text in first.unschedulable for text in lacking)
        words = f"pod {first.name}: {first.unschedulable or first.gate_words}"
        return BlockedSurge("gpu" if is_gpu else "room", words, first.unschedulable_since)
    if _is_of(observed, revision) and rolling_update(observed.deployment or {}).get("maxSurge") == 0:
        return BlockedSurge("gpu" if lacking else "room")
    return None


def seconds_until_in_place(service: InferenceService, observed: Observation, blocked: BlockedSurge) -> float:
    """Seconds that a rollout with a blocked surge still waits for what is missing, before it replaces replicas in
    place; 0 if it waits no more. A rollout that replaces in place already does not wait again."""
    live = observed.deployment
    if live is not None and rolling_update(live).get("maxSurge") == 0:
        return 0.0
    return max(0.0, patience(service, blocked) - seconds_between(blocked.since, observed.time))


def patience(service: InferenceService, blocked: BlockedSurge) -> int:
    """Seconds from the beginning of the shortage until replicas are replaced in place."""
    asked = service.spec.rollout.in_place_after_seconds
    return max(asked, ROOM_SECONDS) if blocked.missing == "room" else asked


def quota_refusal(deployment: Any) -> Any:
    """The condition of a Deployment whose pods a ResourceQuota refuses; empty if it has none."""
    condition = deployment_condition(deployment, "ReplicaFailure")
    is_quota = condition.get("status") == "True" and QUOTA in condition.get("message", "")
    return condition if is_quota else {}


def nudge(deployment: Any, now: str) -> tuple[str, float]:
    """The value of the Deployment's annotation that has Kubernetes create refused pods now, and seconds until the next
    one; empty and 0 if none are refused.

    The ReplicaSet controller tries again ever later, after a quarter of an hour at last. The Deployment controller
    copies annotations to the ReplicaSet, and each change of that is tried at once.
    """
    condition = deployment_condition(deployment, "ReplicaFailure")
    if condition.get("status") != "True":
        return "", 0.0
    before = deployment["metadata"].get("annotations", {}).get(NUDGE_ANNOTATION, "")
    since = before or condition.get("lastTransitionTime") or ""
    age = seconds_between(since, now)
    if not since or not 0 <= age < NUDGE_SECONDS:
        return now, float(NUDGE_SECONDS)
    return before, NUDGE_SECONDS - age


def _is_pending(pod: Pod, revision: str, lacking: Collection[str]) -> bool:
    is_blocked = any(text in pod.unschedulable for text in (*lacking, *_ROOM)) or bool(pod.gate_words)
    return pod.is_alive and pod.revision == revision and is_blocked


def _lacking(resources: Resources) -> list[str]:
    """What the scheduler says of a pod for which no GPU is free, or no device of a claim that is the replica's own."""
    found = [] if resources.gpu is None else [f"Insufficient {resources.gpu.resource_name}"]
    is_own = any(claim.resource_claim_template_name is not None for claim in resources.claims)
    return [*found, NO_DEVICE] if is_own else found


def _is_of(observed: Observation, revision: str) -> bool:
    """Whether the Deployment has this revision's template already."""
    live = observed.deployment
    return live is not None and template_revision(live) == revision
