"""Takes an observation of one service from the store and from the reports of routers and model fetches.

Must not decide anything, nor ask the API server. Invariant: an observation is taken without an await, so that all of
it is of one moment. Remembers since when pods stop, as their own times are of another clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from msgspec import structs

from argosy_operator.cluster.store import Store
from argosy_operator.kinds import DEPLOYMENTS, INFERENCE_SERVICES, PODS, Kind, Name, Object, object_name
from argosy_operator.names import child_name
from argosy_operator.observed.elapsed import min_time
from argosy_operator.observed.observation import CHILD_KINDS, Observation, Routers, is_owned
from argosy_operator.observed.pod import Pod, own_pods, with_workers
from argosy_operator.observed.scaler import Scalers
from argosy_operator.observed.service_load import ServiceLoad
from argosy_operator.reconcile.rollout_lock import RolloutLock
from argosy_protocol.model_progress import ModelProgress
from argosy_resource.name_claims import LostName
from argosy_resource.types import InferenceService


class Observer:
    """Observes single services."""

    def __init__(
        self,
        store: Store,
        turn: RolloutLock,
        *,
        routers: Callable[[], Routers],
        fetches: Callable[[], Mapping[str, ModelProgress]],
        unpolled: Callable[[], Set[str]],
        loads: Callable[[], Mapping[str, ServiceLoad]],
        now: Callable[[], str],
    ) -> None:
        self._store = store
        self._turn = turn
        self._routers = routers
        self._fetches = fetches
        self._unpolled = unpolled
        self._loads = loads
        self._now = now
        self.began = now()
        """When the operator began to lead."""
        self._stopping: dict[Name, dict[str, str]] = {}
        """When each pod that is terminating was first seen so, by service and UID."""

    def observe(
        self,
        service: InferenceService,
        lost_names: tuple[LostName, ...],
        published: str,
        scalers: Scalers,
    ) -> Observation:
        """Take an observation of the service, as of now."""
        key = (service.metadata.namespace, service.metadata.name)
        children = self._children(service, key)
        pods = with_workers(service, own_pods(service, self._store.children(PODS, key)))
        pods = self._with_their_ends(key, pods)
        reports, unpolled = self._fetches(), self._unpolled()
        deployment = children.get((DEPLOYMENTS, (service.metadata.namespace, child_name(service))))
        return Observation(
            deployment=deployment if deployment is not None and is_owned(deployment, service) else None,
            children=children,
            pods=pods,
            routers=self._routers(),
            fetches={pod.uid: reports[pod.uid] for pod in pods if pod.uid in reports},
            unpolled_fetches=frozenset(pod.uid for pod in pods if pod.uid in unpolled),
            lost_names=lost_names,
            rolling_elsewhere=self._turn.holder(besides=key),
            lacks_canary=self._lacks_canary(service),
            published_canary=published,
            load=self._loads().get(service.key) if service.spec.rollout.canary is not None else None,
            scalers=scalers
            if service.spec.scaling is not None
            else Scalers(of_deployment=scalers.of_deployment),
            began=self.began,
            time=self._now(),
        )

    def forget(self, key: Name) -> None:
        """Forget a service that is deleted."""
        self._stopping.pop(key, None)

    def _with_their_ends(self, key: Name, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        before, now = self._stopping.pop(key, {}), self._now()
        stopping = {
            each.uid: min_time(before.get(each.uid, now), now)
            for pod in pods
            for each in (pod, *pod.workers)
            if each.is_terminating
        }
        if not stopping:
            return pods
        self._stopping[key] = stopping

        def with_its_end(pod: Pod) -> Pod:
            workers = tuple(map(with_its_end, pod.workers))
            return structs.replace(pod, stopping_since=stopping.get(pod.uid, ""), workers=workers)

        return tuple(map(with_its_end, pods))

    def _children(self, service: InferenceService, key: Name) -> dict[tuple[Kind, Name], Object]:
        """Children by label, and by name, because a child may have lost its label."""
        found = {}
        for kind in CHILD_KINDS:
            named = self._store.get(kind, service.metadata.namespace, child_name(service))
            for obj in (*self._store.children(kind, key), *([named] if named is not None else ())):
                found[kind, object_name(obj)] = obj
        return found

    def _lacks_canary(self, service: InferenceService) -> bool:
        canary = service.spec.router.canary
        if canary is None:
            return False
        obj = self._store.get(INFERENCE_SERVICES, service.metadata.namespace, canary.service)
        return obj is None or bool(obj["metadata"].get("deletionTimestamp"))
