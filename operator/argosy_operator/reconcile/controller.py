"""The controller: events and timers queue keys, workers reconcile them.

Owns the queue, the workers and when a resync is due. Must not know kopf (`event_source` hands events over), nor what
reconciling a resource means, nor how a lease is taken, nor what a refused list means (`lister`). Invariants: no service
is reconciled before everything was listed once in its namespace, and the fleet document keeps what it had of a
namespace whose services were not, so that one of a half-read cluster is never published; one worker per key; a lost
event costs at most one resync period.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from argosy_operator.cluster.api import Api, ApiError, HistoryLost, OperatorError
from argosy_operator.cluster.fetch_watch import AskProgress, FetchWatch, read_fetching_pod
from argosy_operator.cluster.router_watch import (
    LoadFetch,
    LoadWatch,
    RoutableFetch,
    RouterWatch,
    read_router_pod,
)
from argosy_operator.cluster.store import Store, service_of
from argosy_operator.cluster.watches import NamespaceWatch, ScalerWatch
from argosy_operator.config import OperatorConfig
from argosy_operator.desired.rollout import has_canary_steps
from argosy_operator.desired.scaling import INTERVAL
from argosy_operator.names import (
    BUDGETS,
    DEPLOYMENTS,
    FIELD_MANAGER,
    INFERENCE_SERVICES,
    MANAGED_BY_LABEL,
    NAME_LABEL,
    PODS,
    SERVICES,
    STATEFUL_SETS,
    Kind,
    Name,
    Object,
    object_name,
)
from argosy_operator.observation import has_the_turn, serves
from argosy_operator.reconcile.autoscaler import Autoscaler
from argosy_operator.reconcile.fleet_publisher import FleetPublisher
from argosy_operator.reconcile.leadership import Leadership, fenced
from argosy_operator.reconcile.lister import Lister, with_kind
from argosy_operator.reconcile.metrics import OperatorMetrics
from argosy_operator.reconcile.reconciler import Reconciler
from argosy_operator.reconcile.workqueue import Allowance, WorkQueue
from argosy_resource.engine_command import COMPONENT_LABEL, NODE_COMPONENT

logger = logging.getLogger(__name__)

POD_SELECTOR: Final = f"{NAME_LABEL}=argosy,{COMPONENT_LABEL} in (engine,{NODE_COMPONENT},router)"
CHILD_SELECTOR: Final = f"{MANAGED_BY_LABEL}={FIELD_MANAGER}"
WATCHED: Final[Mapping[Kind, str]] = {
    INFERENCE_SERVICES: "",
    DEPLOYMENTS: CHILD_SELECTOR,
    STATEFUL_SETS: CHILD_SELECTOR,
    SERVICES: CHILD_SELECTOR,
    BUDGETS: CHILD_SELECTOR,
    PODS: POD_SELECTOR,
}
"""Kinds that are watched and listed, and the label selectors by which the API server filters them."""

FLEET: Final[Name] = ("", "")
"""The key that stands for the fleet document."""

PUBLISH_BURST: Final = 10.0
"""Times that the fleet document may be written at once."""
PUBLISH_INTERVAL: Final = 1.0
"""Seconds between two writes of it after that. Whoever may edit one service may have all of the document written."""
STAGE_INTERVAL: Final = 5.0
"""Seconds for which stages of model fetches are gathered, before the fleet document is written with them."""
CLOCK_STEP: Final = 1.0
"""Seconds between two times that the operator's clock can tell apart."""
GATHER_S: Final = 0.001
"""Seconds for each pod of a service for which changes of its pods are gathered, at least."""
GATHER_FACTOR: Final = 7.0
"""Changes of a service's pods are gathered for so many times the CPU time of its last reconcile, which reads all of
them: many pods that change one after the other, as in a rollout or when a node goes, leave seven eighths of a core to
other services."""
GATHER_FAILED_S: Final = 2.0
"""Seconds for which they are gathered at least after a failure: a Deployment that the API server refuses is not sent
with each change of a pod."""
GATHER_MAX_S: Final = 5.0
"""The longest such time. Who may create pods can label any number as a service's."""
_RESYNC_RETRY: Final = 5.0
RELIST_PAUSE: Final = 5.0
"""Seconds between a new list by the event source (its watch had expired, say) and one of ours: after an outage the
source lists every kind again, and one list of its namespace is enough for all of them."""
_START_RETRY: Final = 1.0
_START_TIMEOUT: Final = 60.0
"""Seconds. A chart installs the CRD and the operator together, and the API server takes a moment to serve the CRD."""


def utc_now() -> str:
    """The time now, as Kubernetes writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Controller:
    """Keeps every InferenceService reconciled; the operator without its event source."""

    def __init__(
        self,
        api: Api,
        config: OperatorConfig,
        *,
        fetch: RoutableFetch,
        fetch_load: LoadFetch,
        ask_progress: AskProgress,
        metrics: OperatorMetrics | None = None,
        leadership: Leadership | None = None,
        now: Callable[[], str] = utc_now,
    ) -> None:
        """`leadership` None: no other operator runs, and this one always writes. `now` is the time (RFC 3339)."""
        if leadership is not None:
            api = fenced(api, leadership)
        self._api = api
        self._leadership = leadership
        self._may_work = asyncio.Event()
        """Set while keys are reconciled."""
        self._config = config
        self.metrics = metrics or OperatorMetrics()
        self.store = Store({DEPLOYMENTS: has_the_turn}, {DEPLOYMENTS: serves})
        self.queue: WorkQueue[Name] = WorkQueue(
            owner_of=_namespace_of, workers=config.workers, preferred=_namespace_of(FLEET)
        )
        self.lister = Lister(
            api,
            self.store,
            config,
            WATCHED,
            metrics=self.metrics,
            now=now,
            is_leading=lambda: self.is_leading,
            on_listed=self._listed,
        )
        self.routers = RouterWatch(fetch, self._routers_changed)
        self.loads = LoadWatch(fetch_load, self._requests_held)
        self.fetches = FetchWatch(ask_progress, self.queue.add)
        self.scalers = ScalerWatch(
            api,
            config.watch_namespaces,
            read_service=self._read_scaled,
            find_service=self._service_of_deployment,
            on_change=self._scalers_changed,
        )
        self._autoscaler = Autoscaler(
            self.store,
            loads=self.loads.view,
            scalers=self.scalers.of,
            now=lambda: asyncio.get_running_loop().time(),
            wall=lambda: datetime.datetime.now(datetime.UTC),
            on_change=self.queue.add,
        )
        self.namespaces = NamespaceWatch(
            api, config.watch_namespaces, on_change=lambda: self.queue.add(FLEET)
        )
        self._fleet = FleetPublisher(
            api,
            self.store,
            config,
            self.metrics,
            has_listed=self.lister.has_listed_services,
            namespaces=lambda: self.namespaces.names,
            now=now,
        )
        self._reconciler = Reconciler(
            api,
            self.store,
            config,
            metrics=self.metrics,
            now=now,
            routers=self.routers,
            fetches=self.fetches,
            loads=self.loads,
            autoscaler=self._autoscaler,
            fleet=self._fleet,
            is_known=self.lister.is_known,
            wake=self.queue.add,
            look_again=self.queue.add_after,
        )
        self._deciding_names, self._writing_fleet = asyncio.Lock(), asyncio.Lock()
        self._are_names_decided = False
        self._publishing = Allowance(PUBLISH_BURST, PUBLISH_INTERVAL, now=0.0)
        self._relisted: set[str | None] = set()
        """Namespaces in which the event source has listed a kind again: it may have missed deletions. None for all."""
        self._has_relisted = asyncio.Event()
        self.resynced_at = time.monotonic()
        """When the last resync ended (monotonic clock); the liveness probe looks at it."""

    async def start(self, timeout: float = _START_TIMEOUT) -> None:
        """List everything that can be read for the first time, waiting for the CRD to be served.

        Raises:
            ApiError: it did not work for `timeout` seconds: no CRD, no permission anywhere, no API server.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            try:
                if not await self._api.serves(INFERENCE_SERVICES):
                    raise ApiError(
                        "find InferenceServices", 404, "the CustomResourceDefinition is not served"
                    )
                await self.resync()
                return
            except ApiError as error:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                logger.info("waiting for the API server: %s", error)
                await asyncio.sleep(_START_RETRY)

    async def run(self) -> None:
        """Reconcile until cancelled; `start` comes first.

        Raises:
            ExceptionGroup: with a HistoryLost; a new process reads everything anew.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._config.workers + 1):  # one of them for the fleet document
                    tasks.create_task(self._work())
                tasks.create_task(self._resync_forever())
                tasks.create_task(self.lister.retry_forever())
                tasks.create_task(self.namespaces.run())
                tasks.create_task(self._autoscale_forever())
                tasks.create_task(self._work_while_leading())
        finally:
            self.routers.close()
            self.loads.close()
            self.scalers.close()
            self.fetches.close()
            self.queue.close()

    @property
    def unready_reason(self) -> str:
        """Why this operator can do nothing; empty if it can. The readiness probe looks at it."""
        return self.lister.unready_reason

    @property
    def is_leading(self) -> bool:
        """Whether this operator writes, rather than waiting for the lease of another one."""
        return self._leadership is None or self._leadership.is_held

    def handle(self, kind: Kind, event: str | None, obj: Object) -> None:
        """Handle one event: `ADDED`, `MODIFIED`, `DELETED`, or None for an object of a list. The event source lists a
        kind at its start, and again when its watch has expired: events may have been missed then."""
        if event is None:
            self.list_again(obj["metadata"].get("namespace"))
        if kind is INFERENCE_SERVICES and not self._is_served(obj):
            return
        if event == "DELETED":
            if kind is PODS:
                self.fetches.forget(obj["metadata"].get("uid", ""))
            if self.store.remove(kind, obj):
                self._enqueue(kind, obj, None)
                if kind is INFERENCE_SERVICES:
                    self._reconciler.wake_next()  # its Deployment may stay, and has no turn any more
            return
        before = self.store.get(kind, *object_name(obj))
        if self.store.put(kind, obj):
            if kind is PODS:
                self._follow_fetch(obj)
            self._enqueue(kind, obj, before)

    def list_again(self, namespace: str | None) -> None:
        """Have a namespace listed soon, None for all: events may have been missed."""
        self._relisted.add(namespace)
        self._has_relisted.set()

    async def resync(self) -> None:
        """List everything that can be read, and queue every resource of it.

        Raises:
            ApiError: no namespace could be read.
        """
        self._reconciler.key_secrets.check_all_again()
        self._reconciler.named_secrets.check_all_again()
        await self.lister.list_all()
        self.resynced_at = time.monotonic()
        self.metrics.resync_timestamp.set_to_current_time()

    def _listed(self, namespaces: Collection[str | None]) -> None:
        """Follow what was listed; requests of services in a namespace that is refused would be refused as well."""
        self._refresh_routers()
        fetching = (read_fetching_pod(obj) for obj in self.store.all(PODS))
        self.fetches.set_pods(pod for pod in fetching if pod is not None)
        self._queue_services(namespaces)
        self._reconciler.wake_next()

    def _queue_services(self, namespaces: Collection[str | None] = (None,)) -> None:
        """Queue the services of some namespaces, None for all, and the fleet document."""
        for obj in self.store.all(INFERENCE_SERVICES):
            if None in namespaces or obj["metadata"].get("namespace") in namespaces:
                self.queue.add(object_name(obj))
        self.queue.add(FLEET)

    def use_fleet_keys(self, given: tuple[bytes, ...], lingering: tuple[bytes, ...] = ()) -> None:
        """Have every service's Secret hold the internal keys of the `given` fleet keys, of which there is at least one;
        those that have left their Secret still count."""
        self._config = self._config.with_fleet_keys(given, lingering)
        self._reconciler.use(self._config)
        self._queue_services()

    def _is_served(self, obj: Object) -> bool:
        namespaces = self._config.watch_namespaces
        return not namespaces or obj["metadata"].get("namespace") in namespaces

    def _enqueue(self, kind: Kind, obj: Object, before: Object | None) -> None:
        if kind is INFERENCE_SERVICES:
            name, is_edit = object_name(obj), before is None or _identity(before) != _identity(obj)
            self.queue.add_after(name, self._gathering(name, is_edit=is_edit))
            if is_edit:
                self.queue.add(FLEET)
            return
        service = service_of(obj)
        if service is not None:
            self.queue.add_after(service, self._gathering(service))
        if kind is DEPLOYMENTS and has_the_turn(before or obj) and (before is None or not has_the_turn(obj)):
            self._reconciler.wake_next()
        if kind is PODS and self._is_router(obj):
            self._refresh_routers()

    def _gathering(self, service: Name, *, is_edit: bool = False) -> float:
        """Seconds for which changes of a service and of its pods and children are gathered, all of which a tenant may
        change as often as they like. An edit of the spec may correct what has failed."""
        wait = GATHER_S * self.store.count_children(PODS, service)
        wait = max(wait, GATHER_FACTOR * self._reconciler.costs.get(service, 0.0))
        if not is_edit and self.queue.has_failed(service):
            wait = max(wait, GATHER_FAILED_S)
        return min(GATHER_MAX_S, wait)

    def _follow_fetch(self, obj: Object) -> None:
        fetching = read_fetching_pod(obj)
        if fetching is not None:
            self.fetches.follow(fetching)
        else:
            self.fetches.forget(obj["metadata"].get("uid", ""))

    def _is_router(self, obj: Object) -> bool:
        """Whether a pod is a router of the installation. Tenants may label theirs as they like, and a look for routers
        goes through all pods."""
        metadata = obj["metadata"]
        return (
            metadata.get("namespace") == self._config.namespace
            and metadata.get("labels", {}).get(COMPONENT_LABEL) == "router"
        )

    def _refresh_routers(self) -> None:
        found = (read_router_pod(obj) for obj in self.store.all(PODS) if self._is_router(obj))
        pods = [pod for pod in found if pod is not None]
        self.routers.set_pods(pods)
        self.loads.set_pods(pods)

    def _routers_changed(self, affected: frozenset[str] | None) -> None:
        self.metrics.routers.set(self.routers.view.alive)
        self.metrics.unreachable_routers.set(len(self.routers.view.unreachable))
        for obj in self.store.all(INFERENCE_SERVICES):
            name = object_name(obj)
            if affected is None or "/".join(name) in affected:
                self.queue.add(name)

    def _requests_held(self, services: frozenset[str]) -> None:
        """Have a service that has no replica and holds requests scaled at once."""
        if self._may_work.is_set() and self.scalers.was_asked:
            self._autoscaler.evaluate_some(services)

    async def _read_scaled(self, name: Name) -> None:
        held = self.store.get(INFERENCE_SERVICES, *name)
        if held is None or not (held.get("spec") or {}).get("scaling"):
            return
        live = await self._api.get(INFERENCE_SERVICES, *name)
        if live is not None:
            self.store.put(INFERENCE_SERVICES, with_kind(live, INFERENCE_SERVICES))

    def _service_of_deployment(self, name: Name) -> Name | None:
        deployment = self.store.get(DEPLOYMENTS, *name)
        return None if deployment is None else service_of(deployment)

    def _scalers_changed(self, name: Name) -> None:
        """Have a service scaled by whoever scales it now."""
        self._autoscaler.forget_one(name)
        if self._may_work.is_set():
            self._autoscaler.evaluate_some({"/".join(name)})
        if self.store.get(INFERENCE_SERVICES, *name) is not None:
            self.queue.add_after(name, self._gathering(name))

    async def _look_for_scalers(self) -> None:
        """Know what else scales services, before this operator decides about their numbers."""
        self.scalers.set_needed(self.store.count(INFERENCE_SERVICES) > 0)
        await self.scalers.wait_asked()

    async def _autoscale_forever(self) -> None:
        while True:
            await self._may_work.wait()
            trying = [obj for obj in self.store.all(INFERENCE_SERVICES) if has_canary_steps(obj)]
            self.loads.set_needed(self._autoscaler.is_needed or bool(trying))
            await self._look_for_scalers()
            for _ in self._autoscaler.evaluate():
                await asyncio.sleep(0)
            for obj in trying:
                self.queue.add(object_name(obj))
            await asyncio.sleep(INTERVAL)

    async def _work(self) -> None:
        while True:
            key = await self.queue.get()
            await self._may_work.wait()
            started, outcome = time.perf_counter(), "ok"
            try:
                if key == FLEET:
                    await self._publish_fleet()
                elif self.lister.is_known(key[0]):  # otherwise it is queued once its namespace was read
                    await self._know_names()
                    await self._reconciler.reconcile(key)
                    if self._fleet.divides_differently(key):
                        self.queue.add(FLEET)
                    elif self._fleet.lags(key):
                        self.queue.add_after(FLEET, STAGE_INTERVAL)
            except OperatorError as error:
                outcome = "error"
                logger.warning("%s: %s", _shown(key), error)
            except Exception:  # a bug with one resource must not stop the others
                outcome = "defect"
                logger.exception("%s: reconcile failed", _shown(key))
            finally:
                self.queue.done(key, failed=outcome != "ok")
                self.metrics.queued.set(len(self.queue))
                self.metrics.reconcile_seconds.labels(outcome).observe(time.perf_counter() - started)

    async def _resync_forever(self) -> None:
        """List everything once in each period, and namespaces between in which events may have been missed."""
        while True:
            period = self._config.resync_seconds * random.uniform(0.9, 1.1)  # noqa: S311 - jitter
            due = asyncio.get_running_loop().time() + period
            while await self._was_relisted(due):
                await self.lister.list_some(self._take_relisted())
            self._take_relisted()
            await self._resync_until_done()
            if self.lister.lost_history:
                raise HistoryLost(
                    f"the cluster's state was replaced by an earlier one: {self.lister.lost_history}; "
                    "the operator ends, and reads everything anew"
                )

    async def _was_relisted(self, due: float) -> bool:
        """Wait until the event source has listed a kind again, and a moment more; False if `due` comes first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(due):
                await self._has_relisted.wait()
                await asyncio.sleep(RELIST_PAUSE)
                return True
        return False

    def _take_relisted(self) -> set[str | None]:
        taken, self._relisted = self._relisted, set()
        self._has_relisted.clear()
        return taken

    async def _resync_until_done(self) -> None:
        while True:
            try:
                return await self.resync()
            except OperatorError as error:
                logger.warning("resync: %s", error)
                await asyncio.sleep(_RESYNC_RETRY)

    async def _work_while_leading(self) -> None:
        """Have keys reconciled while this operator leads. It lists everything first: the last writes of the leader
        before it need not have reached its watches."""
        if self._leadership is None:
            self.scalers.set_needed(self.store.count(INFERENCE_SERVICES) > 0)
            self.metrics.leading.set(1)
            self._may_work.set()
            return
        while True:
            await self._leadership.wait_until_held()
            await self._resync_until_done()
            self.scalers.set_needed(self.store.count(INFERENCE_SERVICES) > 0)
            self._reconciler.begin()
            self.metrics.leading.set(1)
            self._may_work.set()
            await self._leadership.wait_until_lost()
            self._may_work.clear()
            self._autoscaler.forget()
            self.metrics.leading.set(0)

    async def _know_names(self) -> None:
        """Have the fleet document decided once before the first status is written, which tells what a service lost in
        it: each restart would otherwise take that back for a moment. It is tried once; what fails is queued."""
        async with self._deciding_names:
            if self._are_names_decided:
                return
            try:
                await self._publish_fleet()
            except OperatorError as error:
                logger.warning("%s: %s", _shown(FLEET), error)
                self.queue.add(FLEET)
            finally:
                self._are_names_decided = True

    async def _publish_fleet(self) -> None:
        await self.namespaces.wait_answered()
        now = asyncio.get_running_loop().time()
        if (delay := self._publishing.wait(now)) > 0:
            self.queue.add_after(FLEET, delay)
            return
        self._publishing.take()
        async with self._writing_fleet:  # an older document must not be written after a newer one
            moved = await self._fleet.publish()
        for name in moved:
            self.queue.add(name)
        if (seconds := self._fleet.changes_in_s) is not None:
            self.queue.add_after(FLEET, seconds + CLOCK_STEP)

    def count_services(self) -> None:
        """Bring the gauge of services up to date, before it is read."""
        self._fleet.count_services()


def _identity(obj: Mapping[str, Any]) -> tuple[Any, ...]:
    """The metadata on which a resource's entry in the fleet document depends."""
    metadata = obj["metadata"]
    return metadata.get("uid"), metadata.get("generation"), bool(metadata.get("deletionTimestamp"))


def _namespace_of(key: Name) -> str:
    return key[0]


def _shown(key: Name) -> str:
    return "fleet document" if key == FLEET else "/".join(key)
