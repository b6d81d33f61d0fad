"""Limits of ejection: how many replicas of a service may be ejected, and when ejections are ignored.

Invariants: failures eject at most half of a service's routable replicas and never the last one; when replicas leave so
that more than half of those left are ejected, ejections are ignored (panic).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from argosy_router.fleet.health.replica_health import ReplicaHealth

PANIC_SHARE: Final = 0.5
"""Above this share of ejected replicas, failures say more about requests or the network than about replicas, and the
replicas that are left would break down under the load of all. Envoy's panic threshold counts the healthy ones."""


def may_eject(replicas: Sequence[ReplicaHealth]) -> bool:
    """Return whether one more of a service's routable replicas may be ejected: at most half, never the last one."""
    ejected = sum(health.is_ejected for health in replicas)
    return ejected + 1 <= len(replicas) // 2


def panics(replicas: Sequence[ReplicaHealth]) -> bool:
    """Return whether so many of a service's routable replicas are ejected that ejections are ignored."""
    ejected = sum(health.is_ejected for health in replicas)
    return ejected > PANIC_SHARE * len(replicas)
