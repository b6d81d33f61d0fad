"""The rollout policy: what a change may do to the replicas, in a cluster and on a laptop alike.

A pure function of `spec.rollout` and of what is known about each replica. Must not know: pods, Deployments, processes.

    no capacity for a surge  replicas are replaced in place, one at a time, if another one keeps serving; otherwise the
                             rollout waits
    the first new replica    is created alone, whatever maxSurge and maxUnavailable allow, to show that the change works
    a new replica fails      the rollout halts until that replica serves or the spec changes

Invariant: a change that does not work costs at most one replica.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from argosy_resource.types import InferenceService, Rollout


class RolloutReplica(NamedTuple):
    """A replica that is not being removed, as far as the policy needs to know it."""

    name: str
    is_new: bool
    """Whether it is of the revision that the spec asks for."""
    is_serving: bool
    """Whether routers send it requests."""
    has_failed: bool
    """Whether its process or its pod's container ended, or could not start."""


class RolloutBounds(NamedTuple):
    """The numbers of replicas by which a rollout may exceed or miss the desired number now."""

    surge: int
    """Replicas that may exist beyond the desired number."""
    unavailable: int
    """Replicas that may be missing from the desired number."""


def may_replace_in_place(service: InferenceService) -> bool:
    """Whether a replica may be removed before its successor exists, although the rollout was to surge. With an
    unavailability of 1 and two or more replicas, the last available one is never removed."""
    explicit = service.spec.rollout.max_unavailable
    return service.spec.replicas > 1 if explicit is None else explicit > 0


def rollout_bounds(
    rollout: Rollout,
    replicas: Collection[RolloutReplica],
    *,
    is_in_place: bool,
    free: int | None = None,
) -> RolloutBounds:
    """Compute the surge and the unavailability that the rollout may use now.

    Args:
        is_in_place: replace replicas without a surge, for lack of capacity.
        free: further replicas that the hardware can hold; None if that is not known.
    """
    surge = rollout.surge if free is None else min(rollout.surge, free)
    unavailable = rollout.unavailable
    if is_in_place:
        surge, unavailable = 0, max(1, unavailable)
    if not _is_first(replicas):
        return RolloutBounds(surge, unavailable)
    return RolloutBounds(1, 0) if surge else RolloutBounds(0, min(unavailable, 1))


def halting_replica(replicas: Collection[RolloutReplica]) -> RolloutReplica | None:
    """The new replica whose failure halts the rollout; None if the rollout may go on.

    Without an old replica that serves there is nothing to protect, and a rollout never halts.
    """
    if not any(replica.is_serving for replica in replicas if not replica.is_new):
        return None
    failed = [
        replica for replica in replicas if replica.is_new and replica.has_failed and not replica.is_serving
    ]
    return min(failed, key=lambda replica: replica.name, default=None)


def _is_first(replicas: Collection[RolloutReplica]) -> bool:
    """Whether the first new replica still has to show that the change works. The second one is created once the first
    has been ready for a while (Kubernetes: minReadySeconds)."""
    new = [replica for replica in replicas if replica.is_new]
    return len(new) < len(replicas) and (len(new) < 2 or not any(replica.is_serving for replica in new))
