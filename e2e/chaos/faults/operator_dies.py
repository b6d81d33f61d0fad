"""The operator dies or is away: R6, R7."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from chaos.api import Object, TooLate, until
from chaos.fault import Fault, Violation, differences, end_state, require, uids
from chaos.faulty_proxy import Write
from chaos.rig import PATIENCE, Rig

_states: dict[str, Any] = {}
"""End states of a run without faults, by step."""
SETTLED_S = 30.0
"""Seconds that Kubernetes' controllers have to count what exists."""
RETURN_S = 30.0
"""Seconds within which an operator that returns, or whose API server returns, has caught up."""

Step = tuple[str, Callable[[Rig, str], Awaitable[None]]]


async def _create(rig: Rig, namespace: str) -> None:
    await rig.apply(namespace)
    await rig.ready(namespace, seconds=PATIENCE * 3)


async def _update(rig: Rig, namespace: str) -> None:
    await rig.edit(namespace, "tiny", engine={"maxNumSeqs": 32})
    await rig.ready(namespace, seconds=PATIENCE * 3)


async def _scale(rig: Rig, namespace: str) -> None:
    await rig.edit(namespace, "tiny", replicas=3)
    await rig.ready(namespace, seconds=PATIENCE * 3)


async def _delete(rig: Rig, namespace: str) -> None:
    await rig.api.delete("inferenceservices", namespace, "tiny")

    async def gone() -> bool:
        for kind in ("deployments", "services", "poddisruptionbudgets", "pods", "secrets"):
            if await rig.api.list(kind, namespace):
                return False
        return not any(name.startswith(f"{namespace}/") for name in await rig.fleet())

    await until("everything of the service to be gone", gone, PATIENCE)


STEPS: tuple[Step, ...] = (("create", _create), ("update", _update), ("scale", _scale), ("delete", _delete))


async def _reference(rig: Rig) -> None:
    """The same steps without a fault, once for all runs."""
    if not _states:
        await rig.namespace("no-fault")
        for name, step in STEPS:
            await step(rig, "no-fault")
            await _quiet(rig, "no-fault")
            _states[name] = await end_state(rig, "no-fault")


async def _quiet(rig: Rig, namespace: str) -> None:
    """Wait until Kubernetes' own controllers have nothing left to report of the children, no replica stops any more,
    and the operator has written nothing for two seconds. A service is Ready before its Deployment calls its replicas
    available, and before those that were replaced are gone."""

    async def reported() -> bool:
        pods = await rig.api.list("pods", namespace)
        if any(each["metadata"].get("deletionTimestamp") for each in pods):
            return False
        return all(map(_is_reported, await rig.api.list("deployments", namespace)))

    await until("Deployments to report all their replicas as available", reported, PATIENCE)
    while True:
        count = rig.proxy.changes
        await asyncio.sleep(2)
        if rig.proxy.changes == count:
            return


def _is_reported(deployment: Object) -> bool:
    status, replicas = deployment.get("status", {}), deployment["spec"]["replicas"]
    is_observed = status.get("observedGeneration") == deployment["metadata"]["generation"]
    return is_observed and status.get("replicas", 0) == replicas and not status.get("unavailableReplicas")


async def _killed_after_every(rig: Rig, namespace: str, period: int) -> str:
    await _reference(rig)
    deaths = 0
    places: set[str] = set()
    counted = 0

    def count(write: Write) -> None:
        nonlocal counted, deaths
        if write.is_lease or write.status >= 300 or not rig.operator.is_running:
            return
        counted += 1
        if counted >= period:
            counted = 0
            deaths += 1
            places.add(write.method + " " + write.path.replace(namespace, "NS"))
            rig.operator.kill_now()

    async def start_again() -> None:
        while True:
            if rig.operator.is_running:
                await rig.operator.ended()
            await rig.start_operator(wait=False)

    rig.proxy.on_write = count
    keeper = asyncio.create_task(start_again(), name="keeper")
    try:
        for name, step in STEPS:
            doing = asyncio.create_task(step(rig, namespace))
            await asyncio.wait((doing, keeper), return_when=asyncio.FIRST_COMPLETED)
            if keeper.done():
                doing.cancel()
                keeper.result()
            await doing
            await _quiet(rig, namespace)
            await _same_end(rig, namespace, name, f"after {name}, killed after every {period}. write")
    finally:
        rig.proxy.on_write = None
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
    require(deaths > 3, f"the operator was killed {deaths} times only")
    return f"{deaths} deaths at {len(places)} different writes, end states equal those without a fault"


async def _same_end(rig: Rig, namespace: str, step: str, when: str) -> None:
    """Wait for the end state of the same step without a fault: budgets, for one, are counted by a controller of their
    own."""
    found: list[str] = []

    async def agrees() -> bool:
        nonlocal found
        found = differences(_states[step], await end_state(rig, namespace))
        return not found

    with contextlib.suppress(TooLate):
        await until("the end state", agrees, SETTLED_S, interval=2)
    require(not found, f"{when}: {'; '.join(found[:5])}")


async def _after_every_write(rig: Rig, namespace: str) -> str:
    return await _killed_after_every(rig, namespace, 1)


async def _after_every_third_write(rig: Rig, namespace: str) -> str:
    return await _killed_after_every(rig, namespace, 3)


async def _absent(rig: Rig, namespace: str) -> str:
    await rig.apply(namespace)
    await rig.ready(namespace)
    before = uids(await rig.pods(namespace))
    fleet = await rig.fleet()
    await rig.operator.kill()
    victim = (await rig.pods(namespace))[0]
    await rig.api.delete("pods", namespace, victim["metadata"]["name"])

    async def replaced() -> bool:
        now = uids(await rig.pods(namespace))
        return len(now) == 2 and victim["metadata"]["uid"] not in now

    await until("Kubernetes to replace the pod", replaced, PATIENCE)
    await rig.edit(namespace, "tiny", replicas=3)
    require(await rig.fleet() == fleet, "the fleet document changed without an operator")
    (stays,) = before - {victim["metadata"]["uid"]}
    require(stays in uids(await rig.pods(namespace)), "a replica went away with the operator")
    await rig.start_operator()
    loop = asyncio.get_running_loop()
    began = loop.time()
    await rig.ready(namespace)
    took = loop.time() - began
    if took > RETURN_S:
        raise Violation(f"{took:.1f} s until it had caught up")
    require(stays in uids(await rig.pods(namespace)), "the operator's return replaced a replica")
    return f"caught up {took:.1f} s after it was ready again"


FAULTS = (
    Fault(
        "R6 operator killed after every write",
        "Killed after each of its writes, before it learns of the answer, the operator ends where it would have "
        "without: same children, same conditions, no second pod template, no extra pod",
        _after_every_write,
        1500,
    ),
    Fault(
        "R6 operator killed after every third write",
        "The same, cut at other places",
        _after_every_third_write,
        900,
    ),
    Fault(
        "R7 operator absent",
        "Replicas and the routers' document stay as they are; a pod that dies meanwhile is replaced, and what was "
        f"edited is done within {RETURN_S:.0f} s of the operator's return",
        _absent,
        400,
    ),
)
