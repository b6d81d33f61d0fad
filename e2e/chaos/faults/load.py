"""Many services at once, and nothing to do: R13, R14. `make scale` is the large one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence

from chaos.fault import Fault, require
from chaos.rig import PATIENCE, Rig, condition
from chaos.scale_figures import Figures, histogram_quantile, reconcile_buckets

SERVICES = int(os.environ.get("CHAOS_SERVICES") or 20)
REPLICAS = 5
REST_S = float(os.environ.get("CHAOS_REST_S") or 30)


def named(namespace: str, services: int) -> list[tuple[str, str]]:
    """Namespace and name of so many services."""
    return [(namespace, f"s{number}") for number in range(services)]


async def create_many(
    rig: Rig, services: Sequence[tuple[str, str]], replicas: int, seconds: float, *, beside: int = 0
) -> float:
    """Create services, as namespace and name, at once; seconds until they, and `beside` that were there, are Ready."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(rig.apply(namespace, name, replicas=replicas) for namespace, name in services))
    (where,) = namespaces if len(namespaces := {namespace for namespace, _ in services}) == 1 else ("",)
    total = len(services) + beside
    while True:
        found = await rig.api.list("inferenceservices", where)
        ready = sum(condition(each, "Ready").get("status") == "True" for each in found)
        if ready == total:
            return loop.time() - began
        require(loop.time() < began + seconds, f"{ready} of {total} services Ready after {seconds:.0f} s")
        await asyncio.sleep(max(1.0, total / 100))  # a list of a thousand is work for the API server


async def edit_each(rig: Rig, services: Iterable[tuple[str, str]], replicas: int, seconds: float) -> float:
    """Scale one service after another in a fleet that stands; the mean of the seconds until each has settled."""
    loop = asyncio.get_running_loop()
    took = []
    for namespace, name in services:
        began = loop.time()
        await rig.edit(namespace, name, replicas=replicas)
        await rig.ready(namespace, name, seconds=seconds)
        took.append(loop.time() - began)
    return sum(took) / len(took) if took else 0.0


def written_by_operator(rig: Rig) -> list[dict[str, str]]:
    """The operator's writes so far, by the API server's notes; those of its lease left out, and creations refused
    because the object exists: they change nothing, and are how it asks for Secrets that it may not read."""
    return [
        each
        for each in rig.plane.operator_writes()
        if each["resource"] != "leases" and (each["verb"], each["status"]) != ("create", "409")
    ]


async def writes_at_rest(rig: Rig, seconds: float) -> list[dict[str, str]]:
    """The operator's writes, by the API server's notes, in a time in which nothing changes; those that renew its lease
    left out. The time begins when it has written nothing for five seconds."""

    loop = asyncio.get_running_loop()
    limit = loop.time() + PATIENCE
    count = -1
    while count != len(written_by_operator(rig)):
        require(loop.time() < limit, f"still writing after {PATIENCE:.0f} s: {written_by_operator(rig)[-3:]}")
        count = len(written_by_operator(rig))
        await asyncio.sleep(5)
    await asyncio.sleep(seconds)
    return written_by_operator(rig)[count:]


async def _created_at_once(rig: Rig, namespace: str) -> str:
    await rig.operator.kill()  # a fresh histogram
    await rig.start_operator()
    took = await create_many(rig, named(namespace, SERVICES), REPLICAS, 600)
    metrics = await rig.operator.metrics()
    figures = Figures.of(metrics, rig.operator.memory())
    require(figures.defects == 0, f"{figures.defects:.0f} reconciles ended with a defect")
    require(figures.memory_mib < 256, f"{figures.memory_mib:.0f} MiB")
    p99 = histogram_quantile(reconcile_buckets(metrics), 0.99) * 1000
    return (
        f"{SERVICES} services of {REPLICAS} replicas Ready in {took:.1f} s; reconcile p99 {p99:.0f} ms through the "
        f"proxy; at most {figures.memory_mib:.0f} MiB"
    )


async def _at_rest(rig: Rig, namespace: str) -> str:
    await create_many(rig, named(namespace, SERVICES), 2, 600)
    written = await writes_at_rest(rig, REST_S)
    require(not written, f"{len(written)} writes at rest: {written[:3]}")
    before = len(written_by_operator(rig))
    await rig.operator.kill()
    await rig.start_operator()
    await rig.idle()
    await writes_at_rest(rig, 1)
    again = written_by_operator(rig)[before:]
    require(not again, f"{len(again)} writes after a restart: {again[:3]}")
    return f"no write in {REST_S:.0f} s, nor by an operator that started anew over {SERVICES} services"


FAULTS = (
    Fault(
        "R13 nothing to do",
        "Nothing is written, neither at rest nor by an operator that starts over a fleet that is as it should be; its "
        "lease aside",
        _at_rest,
        900,
    ),
    Fault(
        "R14 services created at once",
        "All become Ready, no reconcile fails by a defect, and the operator stays below 256 MiB",
        _created_at_once,
        900,
    ),
)
