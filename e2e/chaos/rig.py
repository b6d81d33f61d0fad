"""All parts of a run, started and ended together, and what faults do with them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.api import Api, Object, TooLate, until
from chaos.faulty_proxy import FaultyProxy
from chaos.operator_process import SYSTEM, OperatorProcess, install, rendered
from chaos.plane import Plane
from chaos.simulated_nodes import SimulatedNodes
from chaos.simulated_router import SimulatedRouter
from cluster.shell import say
from processes import free_port

ROOT = Path(__file__).parents[2]
PATIENCE = 180.0
"""Seconds for a fleet to become as it should: a bound for a busy machine, not a promise."""
VALUES = ("engine.image.repository=argosy-engine", "engine.image.tag=n")


@dataclass
class Rig:
    """A running control plane, simulated nodes and router, the proxy, and the operator behind it."""

    plane: Plane | Any
    api: Api
    nodes: SimulatedNodes | Any
    router: SimulatedRouter
    proxy: FaultyProxy
    operator: OperatorProcess
    folder: Path
    chart: list[Object]

    async def namespace(self, name: str) -> None:
        metadata = {"name": name, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
        await self.api.apply(
            "namespaces", "", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
        )

    async def apply(self, namespace: str, name: str = "tiny", **spec: Any) -> Object:
        return await self.api.apply("inferenceservices", namespace, manifest(namespace, name, **spec))

    async def edit(self, namespace: str, name: str, **spec: Any) -> Object:
        return await self.api.merge("inferenceservices", namespace, name, {"spec": spec})

    async def wait_for(
        self,
        what: str,
        namespace: str,
        name: str,
        accept: Callable[[Object], bool],
        seconds: float = PATIENCE,
    ) -> Object:
        """Wait until a service is as it should be, and return it."""

        last: list[str] = []

        async def probe() -> Object | None:
            found = await self.api.find("inferenceservices", namespace, name)
            last[:] = [_told(found)]
            return found if found is not None and accept(found) else None

        try:
            return await until(f"{namespace}/{name} {what}", probe, seconds)
        except TooLate as error:
            raise TooLate(f"{error}; {''.join(last)}") from None

    async def ready(self, namespace: str, name: str = "tiny", seconds: float = PATIENCE) -> Object:
        """Wait until a service is Ready as its present generation describes it, and its rollout has ended."""
        return await self.wait_for("Ready", namespace, name, is_settled, seconds)

    async def pods(self, namespace: str, name: str = "") -> list[Object]:
        """Replicas that are not being deleted."""
        labels = "app.kubernetes.io/component=engine"
        if name:
            labels += f",inference.argosy.dev/service={name}"
        found = await self.api.list("pods", namespace, labels)
        return [each for each in found if not each["metadata"].get("deletionTimestamp")]

    async def fleet(self) -> set[str]:
        """Services of the fleet document, which the routers follow, as `namespace/name`."""
        found = await self.api.find("configmaps", SYSTEM, "argosy-fleet")
        document = json.loads((found or {}).get("data", {}).get("fleet.json") or "{}")
        return {f"{each['namespace']}/{each['name']}" for each in document.get("services", ())}

    async def idle(self, seconds: float = PATIENCE) -> None:
        """Wait until the operator has nothing to do."""

        async def probe() -> bool:
            return await self.operator.queued() == 0

        await until("the operator to be idle", probe, seconds)

    async def delete_namespace(self, name: str, seconds: float = PATIENCE) -> None:
        await self.api.delete("namespaces", "", name)

        async def gone() -> bool:
            return await self.api.find("namespaces", "", name) is None

        await until(f"namespace {name} to be gone", gone, seconds)

    async def start_operator(self, *, wait: bool = True) -> None:
        await self.operator.start(self.proxy.url, wait=wait)

    async def mend(self) -> None:
        """End every fault, and have an operator that works."""
        self.proxy.heal()
        self.operator.use(self.chart)
        await self.nodes.revive(*self.nodes.names)
        if not self.operator.is_running:
            await self.start_operator()


def manifest(namespace: str, name: str, **spec: Any) -> Object:
    return {
        "apiVersion": "inference.argosy.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": "builtin://tiny", "servedName": f"{namespace}-{name}"},
            "replicas": 2,
            **spec,
        },
    }


def condition(obj: Object, kind: str) -> Object:
    for each in obj.get("status", {}).get("conditions", ()):
        if each["type"] == kind:
            return each
    return {}


def _told(obj: Object | None) -> str:
    """What the status says, in a line."""
    if obj is None:
        return "there is no such service"
    status = obj.get("status", {})
    conditions = ", ".join(
        f"{each['type']} {each['status']} {each.get('reason', '')}" for each in status.get("conditions", ())
    )
    observed = status.get("observedGeneration")
    return f"generation {obj['metadata']['generation']}, observed {observed}: {conditions}"


def is_settled(obj: Object) -> bool:
    status = obj.get("status", {})
    return (
        status.get("observedGeneration") == obj["metadata"]["generation"]
        and condition(obj, "Ready").get("status") == "True"
        and condition(obj, "Reconciling").get("status", "False") == "False"
        and status.get("routableReplicas") == obj["spec"]["replicas"]
    )


@asynccontextmanager
async def running(
    folder: Path, *, nodes: int, gpus: int = 8, notices_dead_nodes: bool, through_proxy: bool = True
) -> AsyncIterator[Rig]:
    """Everything up on a real control plane, with the operator ready; everything ended and removed afterwards, logs
    aside."""
    plane = Plane(folder / "plane", notices_dead_nodes=notices_dead_nodes)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(plane.close, keep=False)
        await plane.start()
        api = await stack.enter_async_context(plane.connect())
        simulated = SimulatedNodes(api, nodes, gpus=gpus, lease_seconds=1.5 if notices_dead_nodes else 10.0)
        stack.push_async_callback(simulated.close)
        chart = rendered(plane, ROOT, *VALUES)
        yield await _assembled(stack, folder, plane, api, simulated, chart, through_proxy=through_proxy)


@asynccontextmanager
async def rehearsing(
    folder: Path, *, is_large: bool = False, through_proxy: bool = True
) -> AsyncIterator[Rig]:
    """The same on a Kubernetes in memory; a large one only runs pods."""
    from chaos import rehearsal

    plane = rehearsal.Rehearsal(folder / "plane", is_large=is_large)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(plane.close, keep=False)
        await plane.start()
        stack.push_async_callback(plane.end)
        api = await stack.enter_async_context(plane.connect())
        nodes = rehearsal.RehearsedNodes(plane.cluster)
        chart = rehearsal.chart()
        yield await _assembled(stack, folder, plane, api, nodes, chart, through_proxy=through_proxy)


async def _assembled(
    stack: contextlib.AsyncExitStack,
    folder: Path,
    plane: Any,
    api: Api,
    nodes: Any,
    chart: list[Object],
    *,
    through_proxy: bool,
) -> Rig:
    await install(api, chart)
    await nodes.start()
    router = SimulatedRouter(api, nodes, SYSTEM)
    stack.push_async_callback(router.close)
    await router.start()
    proxy = FaultyProxy(plane.url, plane.tls())
    stack.push_async_callback(proxy.close)
    await proxy.start(free_port())
    operator = OperatorProcess(plane, api, chart, folder)

    async def end() -> None:
        if operator.is_running:
            await operator.kill()

    stack.push_async_callback(end)
    await operator.start(proxy.url if through_proxy else plane.url)
    say("operator ready")
    return Rig(plane, api, nodes, router, proxy, operator, folder, chart)
