"""Staged rollout of the operator's own changes: records which services have a turn, and wakes those that are next.

Few services at a time roll out such a change (`OperatorConfig.max_concurrent_rollouts`); which one has to wait,
`desired.staged_rollout` decides. An annotation of the Deployment records a turn and what became of it; this module
covers the time from the decision to the write. A service whose Deployment is left alone keeps the annotation, but holds
up no other one; nor does a Deployment that is no service's, such as one that was left behind when its service was
deleted, or one that somebody else made for it.

A turn that ends in no healthy service is not kept for ever. One that lacks room in the cluster counts no more after its
deadline. One that is older than MAX_TURN_S has failed, whatever its Deployment says: nobody writes that of a service
that is paused meanwhile, or refused by the API server. Of those that have failed as many count no more as may be had at
once: one service that fails for reasons of its own holds up nobody, and a change that fails everywhere stops at twice
that number.
Must not know: what halts a rollout (`argosy_resource.rollout_policy`).
Invariants: no more services are given a turn than may have one, because a claim is made without an await after the
observation that found one free, and is kept until it is known what became of the write. What is remembered, who waits
in which order, each reconcile tells again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from argosy_operator.cluster.store import Store, service_of
from argosy_operator.config import RolloutShare
from argosy_operator.errors import ApiError
from argosy_operator.kinds import DEPLOYMENTS, INFERENCE_SERVICES, Name
from argosy_operator.names import deployment_name
from argosy_operator.observed.deployment import Turn, read_turn
from argosy_operator.observed.elapsed import min_time, seconds_between
from argosy_operator.observed.observation import controller_uid

MAX_TURN_S: Final = 7200.0
"""The longest that a turn holds up others. A service's own deadline may be a day."""


class RolloutLock:
    """Knows which services have a turn. Deployments that have one are marked in `store` (`has_the_turn`), and those of
    services that have a ready replica are tallied (`serves`).
    `wake(service)` has one that waits reconciled again; `is_left_alone(service)`: whether its Deployment is not applied
    at present."""

    def __init__(
        self,
        store: Store,
        share: RolloutShare,
        wake: Callable[[Name], None],
        *,
        now: Callable[[], str],
        is_left_alone: Callable[[Name], bool],
    ) -> None:
        self._store = store
        self._share = share
        self._is_left_alone = is_left_alone
        self._wake = wake
        self._now = now
        self._seen: dict[Name, tuple[str, str]] = {}
        """When a turn began by its Deployment, which another operator's clock may have said, and when it was first
        seen."""
        self._claimed: set[Name] = set()
        self._unclear: set[Name] = set()
        """Those of which it is not known whether their Deployment says that they have a turn: the answer to the write
        is missing, and the watch may lag behind."""
        self._waiting: dict[Name, None] = {}
        """Services that wait for a turn, and for nothing else, the one that began first at the front."""
        self._woken: set[Name] = set()
        """Those that were told of a free turn, until they are reconciled."""

    def holder(self, *, besides: Name) -> str:
        """If no turn is free: another service that has one, or is about to (`namespace/name`). Otherwise empty."""
        if not self._claimed and not self._store.count_marked(DEPLOYMENTS):
            return ""
        holders, limit = self._holders(besides=besides), self._limit
        return "/".join(holders[0]) if len(holders) >= limit else ""

    @contextmanager
    def claim(self, service: Name) -> Iterator[None]:
        """Hold a turn for a service until its Deployment says that it has it, or could not be written. If that is not
        clear, the turn is held until `note_read`."""
        self._claimed.add(service)
        try:
            yield
        except ApiError as error:
            if error.is_unclear:
                self._unclear.add(service)
            raise
        finally:
            if service not in self._unclear:
                self._claimed.discard(service)

    def is_unclear(self, service: Name) -> bool:
        """Whether it is not known if the service's Deployment says that it has a turn: it has to be read."""
        return service in self._unclear

    def note_read(self, service: Name) -> None:
        """Note that the store has the service's Deployment as it is."""
        self._unclear.discard(service)
        self._claimed.discard(service)

    def begin(self, service: Name) -> None:
        """Note that a service is being reconciled: it tells anew whether it waits."""
        self._woken.discard(service)

    def wait(self, service: Name) -> None:
        """Note that a service waits for a turn."""
        self._waiting.setdefault(service)

    def leave(self, service: Name) -> None:
        """Note that a service waits for no turn, at least not for that alone."""
        self._waiting.pop(service, None)

    def wake_next(self) -> None:
        """Have as many services reconciled as there are free turns."""
        if not self._waiting:
            return
        self._woken = {each for each in self._woken if not self._is_left_alone(each)}
        free = self._limit - len(self._woken) - len(self._holders())
        for service in [*self._waiting]:
            if free <= 0:
                return
            self._waiting.pop(service)
            if not self._is_left_alone(service):
                free -= 1
                self._woken.add(service)
                self._wake(service)

    @property
    def _limit(self) -> int:
        """Services of which no replica is ready are left out: their namespace would have others change at once."""
        return self._share.of(self._store.tally(DEPLOYMENTS))

    def _holders(self, *, besides: Name | None = None) -> list[Name]:
        """The services whose turn counts, those that have failed first."""
        claimed = self._claimed - {each for each in self._unclear if self._is_left_alone(each)}
        rolling, failed = dict.fromkeys(claimed), []
        turns = list(self._turns())
        self._seen = {service: self._times_of(service, turn) for service, turn in turns}
        now = self._now()
        for service, turn in turns:
            has_passed = seconds_between(min_time(*self._seen[service]), now) >= MAX_TURN_S
            if turn.state == "failed" or (has_passed and not turn.state):
                failed.append(service)
            elif not turn.state:
                rolling.setdefault(service)
        found = (*failed[self._limit :], *rolling)
        return [each for each in found if each != besides]

    def _times_of(self, service: Name, turn: Turn) -> tuple[str, str]:
        known = self._seen.get(service)
        seen = known[1] if known is not None and known[0] == turn.since else self._now()
        return turn.since or seen, seen

    def _turns(self) -> Iterator[tuple[Name, Turn]]:
        for obj in self._store.marked(DEPLOYMENTS):
            service, turn = service_of(obj), read_turn(obj)
            owner = None if service is None else self._store.get(INFERENCE_SERVICES, *service)
            if service is None or turn is None or owner is None or service in self._claimed:
                continue
            is_its_own = controller_uid(obj) == owner["metadata"]["uid"]
            if (
                is_its_own
                and obj["metadata"]["name"] == deployment_name(service[1])
                and not self._is_left_alone(service)
            ):
                yield service, turn
