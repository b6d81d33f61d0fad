"""The input of a service's conditions: its resource, one observation, the plan, and counts of replicas.

Must not judge what a view means: `conditions` does.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from argosy_operator.config import OperatorConfig
from argosy_operator.desired.children import Plan
from argosy_operator.desired.scaling import lower_bound
from argosy_operator.kinds import DEPLOYMENTS, object_name
from argosy_operator.observed.deployment import deployment_condition, serving_revision
from argosy_operator.observed.observation import Observation
from argosy_operator.observed.pod import Pod, Problem
from argosy_resource.name_claims import LostName
from argosy_resource.pod_overlay import FETCH_CONTAINER
from argosy_resource.types import InferenceService


class Counts(Struct, frozen=True, kw_only=True):
    """Replicas by state."""

    desired: int
    alive: int
    updated: int
    ready: int
    """Updated, containers ready."""
    routable: int
    """Updated or not."""
    old_routable: int
    draining: int

    @classmethod
    def of(cls, pods: Iterable[Pod], *, desired: int, revision: str) -> Counts:
        pods = tuple(pods)
        alive = [pod for pod in pods if pod.is_alive]
        updated = [pod for pod in alive if pod.revision == revision]
        return cls(
            desired=desired,
            alive=len(alive),
            updated=len(updated),
            ready=sum(pod.is_up for pod in updated),
            routable=sum(pod.is_routable for pod in alive),
            old_routable=sum(pod.is_routable for pod in alive if pod.revision != revision),
            draining=sum(pod.is_terminating for pod in pods),
        )


class ServiceView(Struct, frozen=True, kw_only=True):
    """Everything that a condition may depend on."""

    service: InferenceService
    observed: Observation
    plan: Plan
    config: OperatorConfig
    counts: Counts
    failure: Problem | None
    now: str
    contested: tuple[str, ...] = ()
    """Children, such as `Deployment tiny-engine`, that another writer changes each time and that are left alone."""

    @property
    def is_current(self) -> bool:
        """Whether the Deployment is as planned, and its controller has observed that."""
        deployment = self.observed.deployment
        if deployment is None:
            return False
        seen = deployment.get("status", {}).get("observedGeneration", 0)
        return (
            serving_revision(deployment) == self.plan.revision
            and deployment["spec"].get("replicas") == self.counts.desired
            and seen >= deployment["metadata"].get("generation", 0)
        )

    @property
    def is_complete(self) -> bool:
        """Whether exactly the wanted pods exist, ready or not."""
        return self.is_current and self.counts.updated == self.counts.alive == self.counts.desired

    @property
    def is_kept_from_plan(self) -> bool:
        """Whether another writer keeps the Deployment from what brings the wanted pods about. A webhook that merely
        takes images from a mirror does not."""
        live = self.observed.deployment
        if live is None or not self.contested or self.is_complete:
            return False
        asked, found = self.plan.deployment["spec"], live["spec"]
        return (
            serving_revision(live) != self.plan.revision
            or found.get("replicas", 1) != asked["replicas"]
            or bool(found.get("paused")) != asked["paused"]
        )

    @property
    def wanted_routable(self) -> int:
        """Number of routable replicas that Ready requires: at least one, unless none is desired. With spec.scaling the
        lower bound counts, since clients are served while replicas are added for the load."""
        desired, scaling = self.counts.desired, self.service.spec.scaling
        least = desired
        if scaling is not None:
            least, _ = lower_bound(scaling, datetime.datetime.fromisoformat(self.now))
        return min(desired, max(1, least - self.service.spec.rollout.unavailable))

    @property
    def is_scaling(self) -> bool:
        """Whether spec.scaling changes nothing but the number of replicas now, and enough of them are up."""
        deployment = self.observed.deployment
        return (
            self.service.spec.scaling is not None
            and deployment is not None
            and serving_revision(deployment) == self.plan.revision
            and self.counts.updated == self.counts.alive
            and self.counts.ready >= self.wanted_routable
        )

    @property
    def judged_pods(self) -> list[Pod]:
        """The living replicas whose problems the conditions tell, those of the planned revision first. Once there is
        one of these, others do not count: they are being replaced, and what was wrong with them may have been mended.
        While an older revision is kept, for a canary or until it is this service's turn, its replicas count as well."""
        alive = [pod for pod in self.observed.pods if pod.is_alive]
        planned = [pod for pod in alive if pod.revision == self.plan.revision]
        judged = planned if planned and not self.plan.rollout.held_revision else alive
        return sorted(judged, key=lambda pod: (pod.revision != self.plan.revision, pod.name))

    @property
    def fetches_model(self) -> bool:
        """Whether the planned replicas fetch their model before the engine starts."""
        containers = self.plan.deployment["spec"]["template"]["spec"].get("initContainers", ())
        return any(container["name"] == FETCH_CONTAINER for container in containers)

    @property
    def has_no_router(self) -> bool:
        routers = self.observed.routers
        return bool(self.config.router_url) and routers.known and routers.alive == 0

    @property
    def gets_no_requests(self) -> bool:
        """Whether routers know the replicas and send them nothing, though they were routable once: gates stay open."""
        return self._is_unsent and not self.observed.routers.unreachable

    @property
    def may_get_requests(self) -> bool:
        """Whether that is so of the routers that answer, and one that does not may serve clients all the same."""
        return self._is_unsent and bool(self.observed.routers.unreachable)

    @property
    def _is_unsent(self) -> bool:
        return (
            bool(self.config.router_url)
            and self.counts.routable > 0
            and self.service.key in self.observed.routers.unsent
        )

    @property
    def lost_names(self) -> tuple[LostName, ...]:
        """Names that the service claims and does not have, its main one first."""
        main = self.service.served_name
        return tuple(sorted(self.observed.lost_names, key=lambda lost: lost.name != main))

    @property
    def is_main_name_lost(self) -> bool:
        return any(lost.name == self.service.served_name for lost in self.observed.lost_names)

    def deployment_condition(self, kind: str) -> Mapping[str, Any]:
        return deployment_condition(self.observed.deployment, kind)

    def canary_condition(self, kind: str) -> Mapping[str, Any]:
        """A condition of the canary's own Deployment, while there is one."""
        if self.plan.canary is None:
            return {}
        return deployment_condition(
            self.observed.children.get((DEPLOYMENTS, object_name(self.plan.canary))), kind
        )
