"""Staged rollout of the operator's own changes: records which service has the turn.

Only one service at a time rolls out such a change; which one has to wait, `desired.staged_rollout` decides. An
annotation of the Deployment records the turn; this module covers the time from the decision to the write. A service
whose Deployment is left alone keeps the annotation, but holds up no other one; nor does a Deployment that is no
service's, such as one that was left behind when its service was deleted, or one that somebody else made for it.
Must not know: what halts a rollout (`argosy_resource.rollout_policy`).
Invariant: no two services are given the turn, because a claim is made without an await after the observation that
found no other holder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from argosy_operator.cluster.store import Store, service_of
from argosy_operator.kinds import DEPLOYMENTS, INFERENCE_SERVICES, Name
from argosy_operator.names import deployment_name
from argosy_operator.observed.deployment import has_the_turn
from argosy_operator.observed.observation import controller_uid


class RolloutLock:
    """Knows which service has the turn. Deployments that have it are marked in `store` (`has_the_turn`). Calls
    `on_ended` when services that wait should be reconciled again.
    `is_left_alone(service)`: whether the service's Deployment is not applied at present."""

    def __init__(
        self, store: Store, on_ended: Callable[[], None], *, is_left_alone: Callable[[Name], bool]
    ) -> None:
        self._store = store
        self._is_left_alone = is_left_alone
        self._on_ended = on_ended
        self._claimed: Name | None = None

    def holder(self, *, besides: Name) -> str:
        """Another service that has the turn (`namespace/name`), or is about to; empty if there is none."""
        if self._claimed is not None and self._claimed != besides:
            return "/".join(self._claimed)
        for service in self._by_deployment():
            if service != besides and not self._is_left_alone(service):
                return "/".join(service)
        return ""

    @contextmanager
    def claim(self, service: Name) -> Iterator[None]:
        """Hold the turn for a service until its Deployment says that it has it, or could not be written."""
        assert self._claimed is None
        self._claimed = service
        try:
            yield
        finally:
            self._claimed = None
            if service not in self._by_deployment():
                self._on_ended()

    def note(self, before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> None:
        """Note the write of a child: a Deployment that gave the turn back lets another service have it."""
        if has_the_turn(before) and not has_the_turn(after):
            self._on_ended()

    def skip(self) -> None:
        """Note that a service which has the turn is left alone: another one may have it."""
        self._on_ended()

    def _by_deployment(self) -> Iterator[Name]:
        for obj in self._store.marked(DEPLOYMENTS):
            service = service_of(obj)
            owner = None if service is None else self._store.get(INFERENCE_SERVICES, *service)
            if service is None or owner is None or obj["metadata"]["name"] != deployment_name(service[1]):
                continue
            if controller_uid(obj) == owner["metadata"]["uid"]:
                yield service
