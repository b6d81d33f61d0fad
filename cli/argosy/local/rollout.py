"""Rollout plan: the next step of a rolling update, as a pure function.

Owns: the arithmetic of replicas, surge and unavailability, and what counts as a change: the revision. Must not know:
processes, ports, time. The rules are those of a Deployment's rolling update, with one difference: a replica that still
drains counts against the surge, since it holds its memory until it is gone.

Invariants: no step takes the routable replicas below `replicas - unavailable` (or below their present number), none
takes the processes above `replicas + surge` (or above their present number), and as long as new replicas become
routable, the steps end with exactly the desired replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import xxhash

from argosy_resource.engine_command import engine_args, engine_env
from argosy_resource.rollout_policy import may_replace_in_place
from argosy_resource.types import InferenceService


@dataclass(frozen=True)
class Goal:
    """Desired state of one service."""

    replicas: int
    revision: str
    surge: int
    unavailable: int
    most: int | None = None
    """Replicas that the hardware can hold, including draining ones; None for no bound."""

    @property
    def waits_for_capacity(self) -> bool:
        """Whether no replica can be replaced now: there is no room for a surge, and none may be unavailable."""
        return self.surge == 0 and self.unavailable == 0


class Member(NamedTuple):
    """A replica as the plan sees it. Members are ordered oldest first."""

    name: str
    revision: str
    is_available: bool
    """Whether the router may send it requests; for a new replica, only once it has been ready for `min_ready_s`."""
    is_leaving: bool
    """Whether it is draining or stopping."""


class Step(NamedTuple):
    """Number of replicas to start and names of replicas to retire now. The next step follows from its effects."""

    start: int
    retire: tuple[str, ...]


def revision(service: InferenceService) -> str:
    """Hash of what determines a replica's process; an edit that does not change it restarts nothing."""
    process = (engine_args(service, host="", port=0), engine_env(service), service.spec.resources.gpu)
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(process, order="sorted"))[:8]


def goal(service: InferenceService, *, capacity: int | None = None) -> Goal:
    """The service's goal.

    If there is no GPU for a surge, a change replaces replicas in place, or waits if that would take the last routable
    replica and the manifest does not allow it.

    Args:
        capacity: number of replicas that fit on the GPUs that no other service holds; None if replicas need no GPU.
    """
    rollout = service.spec.rollout
    surge, unavailable = rollout.surge, rollout.unavailable
    if capacity is not None:
        surge = max(0, min(surge, capacity - service.spec.replicas))
        if surge == 0 and may_replace_in_place(service):
            unavailable = max(unavailable, 1)
    return Goal(
        replicas=service.spec.replicas,
        revision=revision(service),
        surge=surge,
        unavailable=unavailable,
        most=capacity,
    )


def next_step(goal: Goal, members: Sequence[Member]) -> Step:
    """Compute which replicas to start and to retire now."""
    staying = [member for member in members if not member.is_leaving]
    current = [member for member in staying if member.revision == goal.revision]
    old = [member for member in staying if member.revision != goal.revision]

    retire = [member.name for member in old if not member.is_available]  # they serve no requests
    surplus = len(current) - goal.replicas
    if surplus > 0:  # retire unavailable ones first, then the youngest, whose caches are the smallest
        ranked = sorted(enumerate(current), key=lambda pair: (pair[1].is_available, -pair[0]))
        retire += [member.name for _, member in ranked[:surplus]]
    available = sum(member.is_available for member in staying if member.name not in retire)
    spare = max(0, available - max(0, goal.replicas - goal.unavailable))
    retire += [member.name for member in old if member.is_available][:spare]

    missing = max(0, goal.replicas - len(current))
    most = goal.replicas + goal.surge
    if goal.most is not None:
        most = min(most, goal.most)
    room = max(0, most - len(members))
    return Step(min(missing, room), tuple(retire))


def threads_per_replica(services: Sequence[InferenceService], cores: int) -> int:
    """Default CPU threads of a replica: the cores divided among all replicas, at least 1."""
    replicas = sum(service.spec.replicas for service in services)
    return max(1, cores // max(1, replicas))
