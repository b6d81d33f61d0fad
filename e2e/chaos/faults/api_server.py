"""The API server is away, expires watches, or answers from an earlier moment: R8, R9, R10."""

from __future__ import annotations

import asyncio
import os
from functools import partial

from chaos.api import until
from chaos.fault import Fault, require, uids
from chaos.faults.operator_dies import RETURN_S
from chaos.faulty_proxy import Mode
from chaos.rig import PATIENCE, Rig

OUTAGE_S = float(os.environ.get("CHAOS_OUTAGE_S") or 20)
"""Seconds for which the API server is away at least."""
STORM = 60
"""Watches that are cut or expired in a row."""


async def _outage(rig: Rig, namespace: str, mode: Mode) -> str:
    await rig.apply(namespace)
    await rig.ready(namespace)
    before = uids(await rig.pods(namespace))
    pid = rig.operator.pid
    loop = asyncio.get_running_loop()
    began, failed = loop.time(), rig.proxy.failed
    rig.proxy.mode = mode
    rig.proxy.cut_watches()
    await rig.edit(namespace, "tiny", replicas=3)

    async def noticed() -> bool:
        return rig.proxy.failed > failed + 3 and loop.time() > began + OUTAGE_S

    await until("the operator to notice the outage", noticed, PATIENCE)
    rig.proxy.mode = "open"
    took = await _resumed(rig, namespace, pid)
    require(before <= uids(await rig.pods(namespace)), "the outage replaced a replica")
    return f"{rig.proxy.failed - failed} requests failed; edit done {took:.1f} s after the return"


async def _resumed(rig: Rig, namespace: str, pid: int) -> float:
    """Seconds until an edit was done, by the process that lived through it."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def scaled() -> bool:
        found = await rig.api.get("deployments", namespace, "tiny-engine")
        return bool(found["spec"]["replicas"] == 3)

    await until("the edit to be done", scaled, PATIENCE)
    took = loop.time() - began
    await rig.ready(namespace)
    require(rig.operator.is_running and rig.operator.pid == pid, "the operator had to be restarted")
    require(took <= RETURN_S, f"{took:.1f} s until the edit was done")
    return took


async def _killed(rig: Rig, namespace: str) -> str:
    await rig.apply(namespace)
    await rig.ready(namespace)
    before = uids(await rig.pods(namespace))
    pid = rig.operator.pid
    loop = asyncio.get_running_loop()
    began = loop.time()
    await rig.plane.kill_api_server()

    async def long_enough() -> bool:
        return loop.time() > began + OUTAGE_S

    await until("the outage to last", long_enough, PATIENCE)
    require(rig.operator.is_running, "the operator ended with the API server")
    await rig.plane.restart_api_server()
    await rig.edit(namespace, "tiny", replicas=3)
    took = await _resumed(rig, namespace, pid)
    require(before <= uids(await rig.pods(namespace)), "the outage replaced a replica")
    return f"edit done {took:.1f} s after the return"


async def _churn(rig: Rig, namespace: str) -> set[str]:
    """Create, edit and delete services; returns those that remain."""
    for number in range(6):
        await rig.apply(namespace, f"s{number}", replicas=1)
    for number in range(0, 6, 2):
        await rig.edit(namespace, f"s{number}", replicas=2)
    for number in (1, 2):
        await rig.api.delete("inferenceservices", namespace, f"s{number}")
    return {f"{namespace}/s{number}" for number in (0, 3, 4, 5)}


async def _agrees(rig: Rig, namespace: str, expected: set[str]) -> float:
    """Seconds until the routers' document has the services that exist, and no other."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def same() -> bool:
        return {name for name in await rig.fleet() if name.startswith(f"{namespace}/")} == expected

    await until("the fleet document to have the services that exist", same, PATIENCE)
    took = loop.time() - began
    for name in sorted(expected):
        await rig.ready(namespace, name.partition("/")[2])
    require(took <= RETURN_S, f"{took:.1f} s until the fleet document had no service that is gone")
    return took


async def _watch_cuts(rig: Rig, namespace: str) -> str:
    before = rig.proxy.cut

    async def cut() -> None:
        while True:
            rig.proxy.cut_watches()
            await asyncio.sleep(0.5)

    cutting = asyncio.create_task(cut(), name="cutting")
    try:
        expected = await _churn(rig, namespace)

        async def enough() -> bool:
            return rig.proxy.cut >= before + STORM

        await until(f"{STORM} watches to be cut", enough, PATIENCE)
    finally:
        cutting.cancel()
        await asyncio.gather(cutting, return_exceptions=True)
    took = await _agrees(rig, namespace, expected)
    return f"{rig.proxy.cut - before} watches cut; all agrees {took:.1f} s later"


async def _expired(rig: Rig, namespace: str) -> str:
    before = rig.proxy.expired
    rig.proxy.expired_watches = STORM
    rig.proxy.cut_watches()
    expected = await _churn(rig, namespace)

    async def enough() -> bool:
        rig.proxy.cut_watches()
        return rig.proxy.expired_watches == 0

    await until(f"{STORM} watches to expire", enough, PATIENCE, interval=0.5)
    took = await _agrees(rig, namespace, expected)
    return f"{rig.proxy.expired - before} watches answered with 410; all agrees {took:.1f} s later"


async def _lost_deletions(rig: Rig, namespace: str) -> str:
    for number in range(3):
        await rig.apply(namespace, f"s{number}", replicas=1)
    for number in range(3):
        await rig.ready(namespace, f"s{number}")
    before = rig.proxy.lost
    rig.proxy.lose_deletions = True
    for number in (0, 1):
        await rig.api.delete("inferenceservices", namespace, f"s{number}")

    async def lost() -> bool:
        return rig.proxy.lost >= before + 2 and not [
            each for each in await rig.pods(namespace) if "s2" not in each["metadata"]["name"]
        ]

    await until("the deletions to be lost", lost, PATIENCE)
    # Deletions are lost with a watch that expires: the next one begins after them.
    rig.proxy.expired_watches = 5
    rig.proxy.cut_watches()
    took = await _agrees(rig, namespace, {f"{namespace}/s2"})
    rig.proxy.lose_deletions = False
    return f"{rig.proxy.lost - before} deletions lost; none remembered {took:.1f} s after the watches had expired"


async def _stale(rig: Rig, namespace: str, kinds: tuple[str, ...]) -> str:
    """An operator starts and is shown an earlier moment: a service that was deleted and made anew since, one that
    was scaled up, and one that did not exist."""
    await rig.apply(namespace, "renewed", replicas=1)
    await rig.apply(namespace, "grown", replicas=1)
    await rig.ready(namespace, "renewed")
    await rig.ready(namespace, "grown")
    await rig.operator.kill()
    await rig.start_operator()  # it lists everything
    await rig.idle()
    earlier = rig.proxy.remember_lists()
    await rig.api.delete("inferenceservices", namespace, "renewed")

    async def gone() -> bool:
        return not await rig.pods(namespace, "renewed")

    await until("the old replicas to be gone", gone, PATIENCE)
    await rig.apply(namespace, "renewed", replicas=1)
    await rig.apply(namespace, "new", replicas=1)
    await rig.edit(namespace, "grown", replicas=2)
    for name in ("renewed", "new", "grown"):
        await rig.ready(namespace, name)
    living = uids(await rig.pods(namespace))
    kept = {
        kind: uids(await rig.api.list(kind, namespace)) for kind in ("deployments", "services", "secrets")
    }
    await rig.operator.kill()
    rig.proxy.stale = {path: answer for path, answer in earlier.items() if path.rsplit("/", 1)[-1] in kinds}
    seen = rig.proxy.stale_answers
    await rig.start_operator()
    await rig.idle()
    count = -1
    while count != rig.proxy.changes:  # it does what it wants on what it was shown
        count = rig.proxy.changes
        await asyncio.sleep(3)
    require(rig.proxy.stale_answers > seen, "no list was stale")
    now = uids(await rig.pods(namespace))
    require(living <= now, f"{len(living - now)} living replicas deleted")
    require(now <= living, f"{len(now - living)} replicas made twice")
    for kind, before in kept.items():
        require(uids(await rig.api.list(kind, namespace)) == before, f"{kind} were deleted or made anew")
    rig.proxy.stale = None
    rig.proxy.cut_watches()
    for name in ("renewed", "new", "grown"):
        await rig.ready(namespace, name)
    require(uids(await rig.pods(namespace)) == living, "a replica was replaced after the fresh lists")
    return f"{rig.proxy.stale_answers - seen} stale lists; every living object kept"


EVERYTHING = ("inferenceservices", "deployments", "services", "poddisruptionbudgets", "pods")

FAULTS = (
    *(
        Fault(
            f"R8 API server {mode}",
            f"Edits made meanwhile are done within {RETURN_S:.0f} s of its return, by the same process; no replica "
            "is replaced",
            partial(_outage, mode=mode),
            400,
        )
        for mode in ("refused", "silent", "unavailable")
    ),
    Fault(
        "R8 API server killed",
        "The same, with the process killed and started anew",
        _killed,
        400,
    ),
    Fault(
        "R9 watches cut",
        "While every watch ends twice a second, services are created, edited and deleted; "
        f"the routers' document agrees within {RETURN_S:.0f} s",
        _watch_cuts,
        500,
    ),
    Fault(
        "R9 watches expired",
        "The same while every new watch is answered with 410",
        _expired,
        500,
    ),
    Fault(
        "R9 deletions lost",
        f"Services whose deletion no watch told are forgotten within {RETURN_S:.0f} s of the watches' end",
        _lost_deletions,
        500,
    ),
    Fault(
        "R10 stale lists",
        "An operator that starts on lists from an earlier moment deletes no living object and makes none twice",
        partial(_stale, kinds=EVERYTHING),
        500,
    ),
    Fault(
        "R10 stale lists of children",
        "The same if services are listed as they are, and only their children and pods from an earlier moment",
        partial(_stale, kinds=EVERYTHING[1:]),
        500,
    ),
)
