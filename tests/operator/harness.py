"""The operator without kopf, in virtual time, against the fake cluster and a fake router."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
from builders import CONFIG
from fake_kubernetes import FakeKubernetes, Object, is_pod_ready, selects

from argosy_operator.config import OperatorConfig
from argosy_operator.names import DEPLOYMENTS, Kind
from argosy_operator.reconcile.controller import WATCHED, Controller, utc_now
from argosy_protocol.fleet import decode_fleet
from argosy_protocol.reports import (
    LOAD_PATH,
    REPORT_PATH,
    LoadReport,
    ModelProgress,
    ReplicaLoadReport,
    ReplicaReport,
    RolloutReport,
    RoutableReport,
    ServiceLoadReport,
    SideReport,
)
from argosy_resource.engine_command import SERVICE_LABEL

_ROUNDING = 1e-6
"""Seconds by which virtual time may fall short of a timer. It stands still while a wait for less is repeated."""

ROUTER_POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "argosy-router-0",
        "namespace": "argosy-system",
        "labels": {"app.kubernetes.io/name": "argosy", "app.kubernetes.io/component": "router"},
        "annotations": {"template": ""},
    },
    "spec": {"nodeName": "node-a", "containers": [{"name": "router", "image": "router"}]},
    "status": {"phase": "Running", "podIP": "10.0.0.9"},
}


class FakeRouter:
    """Routes to every pod of the published fleet whose containers are ready, and reports so."""

    def __init__(self, cluster: FakeKubernetes) -> None:
        self._cluster = cluster
        self._last: tuple[ReplicaReport, ...] = ()
        self._revision = 0
        self.changed = asyncio.Event()
        cluster.listeners.append(lambda kind, event, obj: self.changed.set())
        self.synced = True
        self.reachable = True
        self.load = ServiceLoadReport(service="team/tiny")
        """What it reports of its one service, but for the replicas' own figures."""
        self.each = ReplicaLoadReport(name="", uid="")
        """What it reports of each replica."""
        self.cache_values: dict[str, float] = {}
        """By name of the pod."""
        self.stable, self.canary = SideReport(), SideReport()
        """What it reports of the two sides while the fleet document divides the service."""
        self.asked_for_load = 0
        self._load_revision = 0
        self._held = asyncio.Event()

    def hold(self, requests: int) -> None:
        """Hold requests for want of a replica."""
        self.load = msgspec.structs.replace(self.load, held=requests, queued=requests, idle_s=0.0)
        self._load_revision += 1
        self._held.set()

    def set(self, *, synced: bool = True, reachable: bool = True) -> None:
        """Set whether it is synced with its replicas, and whether the operator reaches it."""
        self.synced, self.reachable = synced, reachable
        self.changed.set()

    async def fetch(self, address: str, seen: int | None, epoch: str = "") -> RoutableReport:
        deadline = asyncio.get_running_loop().time() + 25
        while True:
            if not self.reachable:
                raise TimeoutError
            replicas = self.replicas()
            if replicas != self._last:
                self._last, self._revision = replicas, self._revision + 1
            left = deadline - asyncio.get_running_loop().time()
            if self._revision != seen or left < _ROUNDING:
                break
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), left)
        return RoutableReport(router="r", revision=self._revision, replicas=self._last)

    async def fetch_load(self, address: str, seen: int | None) -> LoadReport:
        self.asked_for_load += 1
        if seen == self._load_revision:
            self._held.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._held.wait(), 5)
        if not self.reachable:
            raise TimeoutError
        replicas = tuple(
            msgspec.structs.replace(
                self.each,
                name=each.name,
                uid=each.uid,
                routable=each.routable,
                cache_value=self.cache_values.get(each.name, 0.0),
            )
            for each in self.replicas()
        )
        service = msgspec.structs.replace(self.load, replicas=replicas, rollout=self._rollout())
        return LoadReport(router="r", revision=self._load_revision, services=(service,))

    def _rollout(self) -> RolloutReport | None:
        services = decode_fleet(self._cluster.fleet() or "{}").services
        split = next((each.split for each in services if each.qualified_name == self.load.service), None)
        if split is None:
            return None
        return RolloutReport(
            canary_revision=split.canary,
            weight=split.weight,
            stable=self.stable,
            canary=self.canary,
            stable_total=self.stable,
            canary_total=self.canary,
        )

    def replicas(self) -> tuple[ReplicaReport, ...]:
        services = decode_fleet(self._cluster.fleet() or "{}").services
        return tuple(
            ReplicaReport(
                service=service.qualified_name,
                name=pod["metadata"]["name"],
                uid=pod["metadata"]["uid"],
                url="http://10.0.0.1:8000",
                state="synced" if self.synced else "connecting",
                routable=self.synced and not pod["metadata"].get("deletionTimestamp"),
            )
            for service in services
            for pod in self._cluster.pods(namespace=service.namespace)
            if service.selector.items() <= pod["metadata"]["labels"].items() and _containers_ready(pod)
        )


def _containers_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(each["type"] == "ContainersReady" and each["status"] == "True" for each in conditions)


def http_fetch_of(router: FakeRouter) -> Callable[..., Any]:
    """In place of `main.http_fetch`: the router's answers without HTTP."""
    fetches = {REPORT_PATH: router.fetch, LOAD_PATH: router.fetch_load}
    return lambda session, key, path, report, *, wait, is_tls: fetches[path]


class FakeFetchers:
    """Reports by pod address. A pod without one does not answer."""

    def __init__(self) -> None:
        self.reports: dict[str, ModelProgress] = {}
        self.asked: list[str] = []

    async def __call__(self, address: str) -> ModelProgress:
        self.asked.append(address)
        if address not in self.reports:
            raise ConnectionRefusedError
        return self.reports[address]


class Operator:
    """A running operator process; leaving the context kills it."""

    def __init__(
        self,
        cluster: FakeKubernetes,
        router: FakeRouter | None = None,
        *,
        now: Callable[[], str] = utc_now,
        **settings: Any,
    ) -> None:
        """`now` is the operator's clock (RFC 3339)."""
        self.cluster = cluster
        self.router = router or FakeRouter(cluster)
        self.fetchers = FakeFetchers()
        config: OperatorConfig = dataclasses.replace(CONFIG, **settings)
        self.controller = Controller(
            cluster,
            config,
            fetch=self.router.fetch,
            fetch_load=self.router.fetch_load,
            ask_progress=self.fetchers,
            now=now,
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.cluster.listeners.append(self._hand_over)
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        if self._hand_over in self.cluster.listeners:
            self.cluster.listeners.remove(self._hand_over)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        defects = self.controller.metrics.registry.get_sample_value(
            "argosy_operator_reconcile_seconds_count", {"outcome": "defect"}
        )
        assert not defects, "an unexpected exception was logged"

    async def _run(self) -> None:
        await self.controller.start()
        await self.controller.run()

    def _hand_over(self, kind: Kind, event: str, obj: Object) -> None:
        """Deliver a watch event: only of selected objects, and after the write has returned."""
        if kind in WATCHED and selects(WATCHED[kind], obj):
            asyncio.get_running_loop().call_soon(self.controller.handle, kind, event, obj)

    async def settle(self, *, rounds: int = 400, quiet: int = 4) -> None:
        """Let operator and cluster act in turn until nothing has happened for a while."""
        still = 0
        for _ in range(rounds):
            before = len(self.cluster.writes)
            await asyncio.sleep(1.0)
            moved = self.cluster.step()
            still = (
                0
                if moved or len(self.cluster.writes) > before or not self.controller.queue.is_idle
                else still + 1
            )
            if still >= quiet:
                return
        raise AssertionError(f"no rest after {rounds} rounds; last writes: {self.cluster.writes[-5:]}")


def first_writes(writes: Sequence[tuple[str, str, str]]) -> list[int]:
    """The places of the first write of each verb and kind, and of the last of all: to kill an operator at."""
    seen: dict[tuple[str, str], int] = {}
    for place, (verb, kind, _) in enumerate(writes):
        seen.setdefault((verb, kind), place)
    return sorted({*seen.values(), len(writes) - 1})


def new_cluster(*, gpus: int = 100, router: bool = True) -> FakeKubernetes:
    cluster = FakeKubernetes(gpus=gpus)
    if router:
        cluster.create(ROUTER_POD)
    return cluster


@contextlib.asynccontextmanager
async def settled(*resources: Object, **options: Any) -> AsyncIterator[tuple[FakeKubernetes, Operator]]:
    """A cluster with these resources and an operator, once nothing happens any more.

    Args:
        options: passed to `new_cluster`.
    """
    cluster = new_cluster(**options)
    async with Operator(cluster) as operator:
        for resource in resources:
            cluster.create(resource)
        await operator.settle()
        yield cluster, operator


# what a test asks of a cluster


def deployment(cluster: FakeKubernetes, name: str = "tiny") -> Object:
    return cluster.objects[DEPLOYMENTS, "team", f"{name}-engine"]


def condition(cluster: FakeKubernetes, kind: str, name: str = "tiny") -> tuple[str, str]:
    """Status and reason of a condition."""
    found = cluster.condition(kind, name)
    return found["status"], found["reason"]


def is_ready(cluster: FakeKubernetes, name: str = "tiny") -> bool:
    return cluster.condition("Ready", name).get("status") == "True"


def living_pods(cluster: FakeKubernetes, name: str = "tiny") -> list[Object]:
    """A service's pods that are not being deleted."""
    return [
        pod
        for pod in cluster.pods()
        if pod["metadata"]["labels"].get(SERVICE_LABEL) == name
        and not pod["metadata"].get("deletionTimestamp")
    ]


def num_routable(cluster: FakeKubernetes, name: str = "tiny") -> int:
    return sum(map(is_pod_ready, living_pods(cluster, name)))


def watch_routable(cluster: FakeKubernetes, name: str = "tiny") -> list[int]:
    """A list that gets the number of routable replicas with each event from now on."""
    counts: list[int] = []
    cluster.listeners.append(lambda kind, event, obj: counts.append(num_routable(cluster, name)))
    return counts


def edit_engine(cluster: FakeKubernetes, **engine: Any) -> None:
    """Change fields of `spec.engine` of the service `tiny`."""
    cluster.edit("tiny", lambda spec: spec["engine"].update(engine))
