"""Old replicas that a rollout removes without waiting for their successors, since no request is lost with them.

Owns which these are, and by how many replicas the Deployment may fall short for them. A replica that never served and
cannot start would keep CPUs, GPUs and quota from the correction of its own fault. One that has served may recover, and
is removed as a last resort only: it backs off, no replica serves, and no node takes a new one. Invariant: a replica
that serves, or that merely starts, does not count as failed.
"""

from __future__ import annotations

from collections.abc import Collection

from argosy_operator.observed.observation import Observation
from argosy_operator.observed.pod import Pod


def failed_replicas(observed: Observation, revision: str) -> tuple[Pod, ...]:
    """The living replicas of other revisions than this one that need not be kept."""
    alive = [pod for pod in observed.pods if pod.is_alive]
    is_served = any(pod.is_routable for pod in alive)
    is_stuck = not is_served and any(pod.unschedulable for pod in alive if pod.revision == revision)
    return tuple(
        pod
        for pod in alive
        if pod.revision != revision
        and not pod.is_up
        and (
            pod.is_backing_off and is_stuck
            if pod.has_served
            else pod.problem is not None or pod.unschedulable != ""
        )
    )


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
