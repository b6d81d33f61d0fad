"""What a rollout does next, as a pure function.

Owns the arithmetic of replicas, surge and unavailability, and what counts as a change: the revision. Must not
know processes, ports or time. The rules are a Deployment's (rolling update), with one difference: a replica that
still drains counts against the surge, since it holds its memory until it is gone.

Invariants: no step takes the routable replicas below `replicas - unavailable` (or below what there was), none
takes the processes above `replicas + surge` (or above what there was), and as long as new replicas become
routable the steps end with exactly the wanted ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import xxhash

from argosy_operator.desired.engine_command import engine_args, engine_env
from argosy_operator.desired.rollout import may_replace_in_place
from argosy_operator.resource.types import InferenceService


@dataclass(frozen=True)
class Goal:
    """What one service should have."""

    replicas: int
    revision: str
    surge: int
    unavailable: int
    most: int | None = None
    """Replicas the hardware can hold, those that drain included; None for no bound."""

    @property
    def waits_for_capacity(self) -> bool:
        """Whether no replica may be replaced: nothing to surge to, and nothing may be missing."""
        return self.surge == 0 and self.unavailable == 0


class Member(NamedTuple):
    """A replica as the plan sees it; members come oldest first."""

    name: str
    revision: str
    is_available: bool
    """Routable: the router sends it requests. A new one counts once it has been so for a while (`min_ready_s`)."""
    is_leaving: bool
    """It drains or stops already."""


class Step(NamedTuple):
    """What to do now. The next step follows from what comes of it."""

    start: int
    retire: tuple[str, ...]


def revision(service: InferenceService) -> str:
    """Hash of what makes a replica's process: an edit that leaves it alone restarts nothing."""
    process = (engine_args(service, host="", port=0), engine_env(service), service.spec.resources.gpu)
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(process, order="sorted"))[:8]


def goal(service: InferenceService, *, capacity: int | None = None) -> Goal:
    """The service's goal. `capacity`: how many replicas the GPUs that no other service holds could carry, None if
    replicas need none. Where a surge has no GPU, a change replaces in place, or waits if that would take the last
    routable replica and the manifest does not allow it."""
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
    """The replicas to start and to retire now."""
    staying = [member for member in members if not member.is_leaving]
    current = [member for member in staying if member.revision == goal.revision]
    old = [member for member in staying if member.revision != goal.revision]

    retire = [member.name for member in old if not member.is_available]  # they serve nobody
    surplus = len(current) - goal.replicas
    if surplus > 0:  # the unavailable go first, then the youngest: their caches are the smallest
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
    """CPU threads of a replica whose manifest does not say: the cores divided among all replicas, at least 1."""
    replicas = sum(service.spec.replicas for service in services)
    return max(1, cores // max(1, replicas))
