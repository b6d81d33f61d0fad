"""Nodes are drained or die: R25."""

from __future__ import annotations

import asyncio

from chaos.api import Refused, until
from chaos.fault import Fault, require
from chaos.faults.rollouts import LeastRoutable
from chaos.rig import PATIENCE, Rig, condition, is_settled

SPREAD = [
    {
        "maxSkew": 1,
        "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "ScheduleAnyway",
    }
]


async def _spread(rig: Rig, namespace: str) -> None:
    """A service of four replicas, spread over both zones."""
    await rig.apply(namespace, replicas=4, placement={"topologySpreadConstraints": SPREAD})
    await rig.ready(namespace)


async def _drain(rig: Rig, namespace: str) -> str:
    await _spread(rig, namespace)
    refused = 0
    async with LeastRoutable(rig, namespace) as watched:
        drained = rig.nodes.zone("b")
        for name in drained:
            await rig.api.merge("nodes", "", name, {"spec": {"unschedulable": True}})
        try:
            for pod in await rig.pods(namespace):
                if pod["spec"]["nodeName"] not in drained:
                    continue
                metadata = {"name": pod["metadata"]["name"], "namespace": namespace}
                eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}

                async def evict(eviction: dict = eviction) -> bool:
                    nonlocal refused
                    path = f"api/v1/namespaces/{namespace}/pods/{eviction['metadata']['name']}/eviction"
                    try:
                        await rig.api.request("POST", path, eviction)
                    except Refused as error:
                        if error.status != 429:
                            raise
                        refused += 1
                        return False
                    return True

                await until("the budget to allow an eviction", evict, PATIENCE)

            async def empty() -> bool:
                return not [p for p in await rig.pods(namespace) if p["spec"].get("nodeName") in drained]

            await until("the nodes to be empty", empty, PATIENCE)
            await rig.ready(namespace)
        finally:
            for name in drained:
                await rig.api.merge("nodes", "", name, {"spec": {"unschedulable": None}})
    require(watched.least >= 3, f"{watched.least} of 4 replicas routable")
    return f"never fewer than {watched.least} of 4 routable; {refused} evictions refused by the budget first"


async def _die(rig: Rig, namespace: str, victims: list[str]) -> str:
    loop = asyncio.get_running_loop()
    async with LeastRoutable(rig, namespace) as watched:
        rig.nodes.kill(*victims)
        began = loop.time()
        told = await rig.wait_for(
            "to say that a node is lost",
            namespace,
            "tiny",
            lambda obj: condition(obj, "Ready").get("status") == "False",
        )
        noticed = loop.time() - began
        reason = condition(told, "Ready")["reason"]

        async def replaced() -> bool:
            found = await rig.api.get("inferenceservices", namespace, "tiny")
            pods = [pod for pod in await rig.pods(namespace) if pod["spec"].get("nodeName") not in victims]
            return is_settled(found) and len(pods) == 4

        await until("four replicas on living nodes", replaced, PATIENCE)
        took = loop.time() - began
    await rig.nodes.revive(*victims)
    require(watched.least >= 1, "no replica was left")
    return (
        f"Ready False ({reason}) after {noticed:.1f} s, four replicas elsewhere after {took:.1f} s; "
        f"{watched.least} of 4 routable meanwhile"
    )


async def _node_dies(rig: Rig, namespace: str) -> str:
    await _spread(rig, namespace)
    hosts = [pod["spec"]["nodeName"] for pod in await rig.pods(namespace)]
    victim = next(name for name in hosts if name != rig.nodes.names[0])
    return await _die(rig, namespace, [victim])


async def _zone_dies(rig: Rig, namespace: str) -> str:
    await _spread(rig, namespace)
    return await _die(rig, namespace, rig.nodes.zone("b"))


FAULTS = (
    Fault(
        "R25 nodes drained",
        "The budget lets one replica go at a time: of four, three are routable at any moment",
        _drain,
        400,
    ),
    Fault(
        "R25 node dies",
        "The status says so, the other replicas stay, and the lost ones come back on other nodes",
        _node_dies,
        400,
    ),
    Fault(
        "R25 zone dies",
        "The same with half of the nodes at once",
        _zone_dies,
        400,
    ),
)
