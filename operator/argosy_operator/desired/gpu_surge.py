"""Whether a rollout finds no GPU for its surge, and how long it waits for a cluster autoscaler to bring one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from argosy_operator.observed.deployment import rolling_update, template_revision
from argosy_operator.observed.elapsed import seconds_between
from argosy_operator.observed.observation import Observation
from argosy_operator.observed.pod import Pod
from argosy_resource.resources import Resources
from argosy_resource.types import InferenceService

NO_DEVICE: Final = "cannot allocate all claims"
"""The scheduler's words (plugin DynamicResources)."""


def no_gpu_for_surge(
    service: InferenceService, observed: Observation, revision: str, failed: Collection[Pod] = ()
) -> bool:
    """Whether this rollout must free a GPU before it can take one. The replicas in `failed` are removed in any case.

    This begins when a pod of the new revision cannot be scheduled for lack of GPUs while pods of an old revision hold
    some, and ends when no old pod is left. The live Deployment (this revision, no surge) keeps that state: the pending
    pod is scheduled as soon as the first old one is gone, and a decision on that pod alone would flap.
    """
    lacking = _lacking(service.spec.resources)
    if not lacking or service.spec.rollout.surge == 0:
        return False
    holders = [pod for pod in observed.pods if pod.is_alive and pod.node and pod.revision != revision]
    if all(pod in failed for pod in holders):
        return False
    pending = sum(_lacks_gpu(pod, revision, lacking) for pod in observed.pods)
    leaving = sum(bool(pod.node) and (pod.is_terminating or pod in failed) for pod in observed.pods)
    return pending > leaving or _is_without_surge(observed, revision)


def seconds_until_in_place(service: InferenceService, observed: Observation, revision: str) -> float:
    """Seconds that a rollout without a GPU for its surge still waits for one, before it replaces replicas in place; 0
    if it waits no more. A rollout that replaces in place already does not wait again."""
    if _is_without_surge(observed, revision):
        return 0.0
    lacking = _lacking(service.spec.resources)
    waited = [
        seconds_between(pod.unschedulable_since, observed.time)
        for pod in observed.pods
        if _lacks_gpu(pod, revision, lacking)
    ]
    return max(0.0, service.spec.rollout.in_place_after_seconds - max(waited, default=0.0))


def _lacks_gpu(pod: Pod, revision: str, lacking: list[str]) -> bool:
    return pod.is_alive and pod.revision == revision and any(text in pod.unschedulable for text in lacking)


def _lacking(resources: Resources) -> list[str]:
    """What the scheduler says of a pod for which no GPU is free, or no device of a claim that is the replica's own."""
    found = [] if resources.gpu is None else [f"Insufficient {resources.gpu.resource_name}"]
    is_own = any(claim.resource_claim_template_name is not None for claim in resources.claims)
    return [*found, NO_DEVICE] if is_own else found


def _is_without_surge(observed: Observation, revision: str) -> bool:
    live = observed.deployment
    if live is None:
        return False
    return template_revision(live) == revision and rolling_update(live).get("maxSurge") == 0
