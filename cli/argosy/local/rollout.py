"""The next step of a rolling update in the local fleet, as a pure function.

Owns: the arithmetic of replicas, surge and unavailability, and what counts as a change: the revision. Must not know:
processes, ports, time. `argosy_resource.rollout_policy` sets the bounds and decides what halts a rollout, as it does
for the operator. Within the bounds the rules are those of a Deployment's rolling update, with one difference: a replica
that still drains counts against the surge, since it holds its memory until it is gone.

Invariants: no step takes the available replicas below `replicas - unavailable` (or below their present number), nor,
until a new one is available, those that are available or will soon be so again; none
takes the processes above `replicas + surge` (or above their present number), and as long as new replicas become
available, the steps end with exactly the desired replicas. While a rollout is halted, no replica is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import xxhash

from argosy_resource.engine_command import engine_args, engine_env
from argosy_resource.rollout_policy import (
    RolloutReplica,
    halting_replica,
    may_replace_in_place,
    rollout_bounds,
)
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
    halted_by: str = ""
    """Name of the new replica whose failure halts the rollout; empty if it is not halted."""

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
    is_unreported: bool = False
    """Whether its engine is ready, but the router has not reported yet whether it serves."""
    has_failed: bool = False
    """Whether its process ended, and no later one has been ready for `min_ready_s`."""
    has_served: bool = False
    """Whether one of its processes has been ready."""
    is_recovering: bool = False
    """Whether it served until a moment ago, and restarts."""


class Step(NamedTuple):
    """Number of replicas to start and names of replicas to retire now. The next step follows from its effects."""

    start: int
    retire: tuple[str, ...]


def revision_of(service: InferenceService) -> str:
    """Hash of what determines a replica's process; an edit that does not change it restarts nothing."""
    process = (engine_args(service, host="", port=0), engine_env(service), service.spec.gpus)
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(process, order="sorted"))[:8]


def goal(service: InferenceService, members: Sequence[Member] = (), *, capacity: int | None = None) -> Goal:
    """The service's goal.

    If there is no GPU for a surge, a change replaces replicas in place, or waits if that would take the last routable
    replica and the manifest does not allow it.

    Args:
        members: the service's present replicas.
        capacity: number of replicas that fit on the GPUs that no other service holds; None if replicas need no GPU.
    """
    wanted = revision_of(service)
    replicas = [_as_the_policy_sees(member, wanted) for member in members if not member.is_leaving]
    free = None if capacity is None else max(0, capacity - service.spec.replicas)
    bounds = rollout_bounds(
        service.spec.rollout,
        replicas,
        is_in_place=free == 0 and may_replace_in_place(service),
        free=free,
    )
    halting = halting_replica(replicas)
    return Goal(
        replicas=service.spec.replicas,
        revision=wanted,
        surge=bounds.surge,
        unavailable=bounds.unavailable,
        most=capacity,
        halted_by="" if halting is None else halting.name,
    )


def _as_the_policy_sees(member: Member, revision: str) -> RolloutReplica:
    """Describe a member to the policy. An old one that the router has not reported on, or that has served and fails for
    a moment, counts as serving: there is still something to lose."""
    is_new = member.revision == revision
    return RolloutReplica(
        member.name,
        is_new=is_new,
        is_serving=member.is_available or (not is_new and (member.is_unreported or member.has_served)),
        has_failed=member.has_failed,
    )


def next_step(goal: Goal, members: Sequence[Member]) -> Step:
    """Compute which replicas to start and to retire now."""
    staying = [member for member in members if not member.is_leaving]
    current = [member for member in staying if member.revision == goal.revision]
    old = [member for member in staying if member.revision != goal.revision]

    if goal.halted_by:  # only scale down
        return Step(0, (*_surplus(current, goal.replicas), *_surplus(old, goal.replicas)))

    # An old replica that fails for a moment may be the last one that works, until a new one has proved itself.
    is_new_proved = any(member.is_available for member in current)
    down = [member for member in old if not (member.is_available or member.is_unreported)]
    kept = [
        member
        for member in down
        if not is_new_proved and (member.is_recovering or (member.has_served and current))
    ]
    retire = [member.name for member in down if member not in kept]
    retire += _surplus(current, goal.replicas)
    available = sum(member.is_available for member in staying if member.name not in retire)
    floor = max(0, goal.replicas - goal.unavailable)
    if not current:
        retire += [member.name for member in kept[: max(0, available + len(kept) - floor)]]
    if available >= floor:
        retire += [member.name for member in old if member.is_unreported]
    retire += [member.name for member in old if member.is_available][: max(0, available - floor)]

    missing = max(0, goal.replicas - len(current))
    most = goal.replicas + goal.surge
    if goal.most is not None:
        most = min(most, goal.most)
    room = max(0, most - len(members))
    return Step(min(missing, room), tuple(retire))


def _surplus(members: Sequence[Member], replicas: int) -> list[str]:
    """Names of the members beyond `replicas`: unavailable ones first, then the youngest, whose caches are the
    smallest."""
    ranked = sorted(enumerate(members), key=lambda pair: (pair[1].is_available, -pair[0]))
    return [member.name for _, member in ranked[: max(0, len(members) - replicas)]]


def threads_per_replica(services: Sequence[InferenceService], cores: int) -> int:
    """Default CPU threads of a replica: the cores divided among all replicas, at least 1."""
    replicas = sum(service.spec.replicas for service in services)
    return max(1, cores // max(1, replicas))
