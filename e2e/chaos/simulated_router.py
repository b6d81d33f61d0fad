"""A stand-in for a router: a pod that runs nowhere, and the report that the operator asks it for.

It reports every replica whose containers are ready as one that it sends requests to, which is what a router does once
it has connected to it, and of the load what `report_load` was told.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable

import msgspec
from aiohttp import web

from argosy_operator.names import NAME_LABEL, ROUTER_ADMIN_PORT
from argosy_protocol.reports import (
    LOAD_PATH,
    REPORT_PATH,
    LoadReport,
    ReplicaReport,
    RoutableReport,
    ServiceLoadReport,
)
from argosy_resource.engine_command import COMPONENT_LABEL, SERVICE_LABEL
from chaos.api import Api, Object
from chaos.simulated_nodes import ADDRESS_ANNOTATION, SimulatedNodes
from processes import free_port

EPOCH = "simulated"
SHARE = 4
"""It rests so many times as long as it has looked at all pods: in a large fleet others want the processor too."""


class SimulatedRouter:
    """Serves the report. `start` comes first."""

    def __init__(self, api: Api, nodes: SimulatedNodes, namespace: str) -> None:
        # The operator chooses the port, so runs beside each other need an address each of the loopback network.
        high, low = divmod(free_port(), 256)
        self._address = f"127.83.{high}.{low}"
        self._api = api
        self._nodes = nodes
        self._namespace = namespace
        self._runner: web.AppRunner | None = None
        self.revision = 1
        self._replicas: dict[str, list[ReplicaReport]] = {}
        """By service."""
        self._changed_in: dict[str, int] = {}
        """Service -> the revision in which its replicas changed last."""
        self._load = LoadReport(router="simulated")
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get(REPORT_PATH, self._answer)
        app.router.add_get(LOAD_PATH, self._answer_load)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._address, ROUTER_ADMIN_PORT).start()
        self._task = asyncio.create_task(self.follow(), name="router")
        labels = {NAME_LABEL: "argosy", COMPONENT_LABEL: "router"}
        metadata = {
            "name": "argosy-router-0",
            "namespace": self._namespace,
            "labels": labels,
            "annotations": {ADDRESS_ANNOTATION: self._address},
        }
        spec = {
            "containers": [{"name": "router", "image": "argosy-router:simulated"}],
            "automountServiceAccountToken": False,
            "nodeName": self._nodes.names[0],
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        await self._api.apply("pods", self._namespace, pod)
        self._nodes.changed.set()

    async def report_load(self, *services: ServiceLoadReport) -> None:
        """Report this load of services from now on. A request that is held ends the long poll, as a router's does."""
        async with self._changed:
            held = any(each.held for each in services)
            revision = self._load.revision + held
            self._load = LoadReport(router="simulated", revision=revision, services=services)
            self._changed.notify_all()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()

    async def follow(self) -> None:
        """Report what becomes of the pods."""
        while True:
            await self._nodes.changed.wait()
            self._nodes.changed.clear()
            began = time.monotonic()
            found: dict[str, list[ReplicaReport]] = defaultdict(list)
            for pod in self._nodes.pods:
                if _answers(pod):
                    replica = _replica(pod)
                    found[replica.service].append(replica)
            for replicas in found.values():
                replicas.sort(key=lambda each: each.uid)
            names = {*found, *self._replicas}
            if changed := [name for name in names if found.get(name) != self._replicas.get(name)]:
                async with self._changed:
                    self._replicas = dict(found)
                    self.revision += 1
                    self._changed_in |= dict.fromkeys(changed, self.revision)
                    self._changed.notify_all()
            await asyncio.sleep(SHARE * (time.monotonic() - began))

    def report(self, seen: int, epoch: str) -> RoutableReport:
        """Of all services, or of those that have changed since the report `seen` of this router."""
        base = seen if epoch == EPOCH and 0 <= seen <= self.revision else None
        names = [name for name, revision in self._changed_in.items() if base is None or revision > base]
        return RoutableReport(
            router="simulated",
            revision=self.revision,
            epoch=EPOCH,
            base=base,
            services=() if base is None else tuple(names),
            replicas=tuple(replica for name in names for replica in self._replicas.get(name, ())),
        )

    async def _answer(self, request: web.Request) -> web.Response:
        seen = await self._wait(request, lambda: self.revision)
        return _json(self.report(seen, request.query.get("epoch", "")))

    async def _answer_load(self, request: web.Request) -> web.Response:
        await self._wait(request, lambda: self._load.revision)
        return _json(self._load)

    async def _wait(self, request: web.Request, revision: Callable[[], int]) -> int:
        """Wait for a report that the client has not seen, or for the end of its wait; returns what it has seen."""
        seen = int(request.query.get("after", -1))
        wait = min(60.0, float(request.query.get("wait", 0)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait), self._changed:
                await self._changed.wait_for(lambda: revision() != seen)
        return seen


def _json(report: RoutableReport | LoadReport) -> web.Response:
    return web.Response(body=msgspec.json.encode(report), content_type="application/json")


def _answers(pod: Object) -> bool:
    conditions = {each["type"]: each["status"] for each in pod.get("status", {}).get("conditions", ())}
    return (
        pod["metadata"].get("labels", {}).get(COMPONENT_LABEL) == "engine"
        and not pod["metadata"].get("deletionTimestamp")
        and conditions.get("ContainersReady") == "True"
    )


def _replica(pod: Object) -> ReplicaReport:
    metadata = pod["metadata"]
    return ReplicaReport(
        service=f"{metadata['namespace']}/{metadata['labels'][SERVICE_LABEL]}",
        name=metadata["name"],
        uid=metadata["uid"],
        url=f"http://{pod['status'].get('podIP', '')}:8000",
        state="synced",
        routable=True,
    )
