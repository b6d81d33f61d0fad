"""Replicas are replaced: by an edit, by an upgrade of the chart, or while routers restart: R4, R5, R12, R23."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from chaos.api import Object, until
from chaos.fault import Fault, require, uids
from chaos.operator_process import PARTS, install, rendered
from chaos.rig import PATIENCE, ROOT, VALUES, Rig, condition
from cluster.shell import ClusterError, run

GATE = "inference.argosy.dev/routable"
BEFORE = os.environ.get("CHAOS_BEFORE") or "HEAD~1"
"""The commit that R23 upgrades from."""


def _is_routable(pod: Object) -> bool:
    conditions = {each["type"]: each["status"] for each in pod.get("status", {}).get("conditions", ())}
    return (
        not pod["metadata"].get("deletionTimestamp")
        and conditions.get("Ready") == "True"
        and conditions.get(GATE) == "True"
    )


class LeastRoutable:
    """The least number of routable replicas in a namespace, over all events of its pods. An async context manager."""

    def __init__(self, rig: Rig, namespace: str) -> None:
        self._rig = rig
        self._namespace = namespace
        self._pods: dict[str, Object] = {}
        self.least = 1 << 30
        self.events = 0

    async def __aenter__(self) -> LeastRoutable:
        for pod in await self._rig.pods(self._namespace):
            self._pods[pod["metadata"]["uid"]] = pod
        self._count()
        self._task = asyncio.create_task(self._follow(), name="least")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        async for event, pod in self._rig.api.watch("pods", self._namespace):
            if event == "DELETED":
                self._pods.pop(pod["metadata"]["uid"], None)
            else:
                self._pods[pod["metadata"]["uid"]] = pod
            self.events += 1
            self._count()

    def _count(self) -> None:
        self.least = min(self.least, sum(map(_is_routable, self._pods.values())))


async def _rolling_update(rig: Rig, namespace: str) -> str:
    await rig.apply(namespace, replicas=4)
    await rig.ready(namespace)
    before = uids(await rig.pods(namespace))
    async with LeastRoutable(rig, namespace) as watched:
        await rig.edit(namespace, "tiny", engine={"maxNumSeqs": 32})
        await rig.ready(namespace)
    require(not before & uids(await rig.pods(namespace)), "an old replica is left")
    require(watched.least >= 4, f"{watched.least} of 4 replicas routable during the rollout")
    return f"never fewer than {watched.least} of 4 routable, over {watched.events} events"


async def _image_bump(rig: Rig, namespace: str) -> str:
    await rig.apply(namespace)
    await rig.ready(namespace)
    loop = asyncio.get_running_loop()
    seen: list[tuple[float, int, str, str]] = []
    returned: list[set[str]] = []

    async def follow() -> None:
        async for _, obj in rig.api.watch("inferenceservices", namespace):
            ready = condition(obj, "Ready")
            observed = obj.get("status", {}).get("observedGeneration", -1)
            entry = (observed, ready.get("status", ""), ready.get("reason", ""))
            if not seen or seen[-1][1:] != entry:
                time = loop.time()
                if entry[1] == "True":
                    pods = await rig.pods(namespace)
                    returned.append({pod["spec"]["containers"][0]["image"] for pod in pods})
                seen.append((time, *entry))  # last, since the end is noticed by it

    following = asyncio.create_task(follow(), name="transitions")
    try:

        async def watching() -> bool:
            return bool(seen)

        await until("the first event", watching, PATIENCE)
        edited = await rig.edit(namespace, "tiny", engine={"image": "argosy-engine:next"})
        began = loop.time()
        generation = edited["metadata"]["generation"]
        await rig.ready(namespace)

        async def complete() -> bool:
            return seen[-1][1:3] == (generation, "True")

        await until("the event of the end", complete, PATIENCE)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    after = [each for each in seen if each[0] >= began or each[1] == generation]
    require(
        after[0][1] == generation and after[0][2] == "False", f"Ready did not leave True at once: {after}"
    )
    left = max(0.0, after[0][0] - began)
    require(left <= 1.0, f"{left:.2f} s until Ready was False")
    require(
        [each[2] for each in after].count("True") == 1 and after[-1][2] == "True",
        f"Ready went to and fro: {after}",
    )
    require(returned[-1] == {"argosy-engine:next"}, f"Ready returned with {returned[-1]}")
    return f"Ready False {left * 1000:.0f} ms after the edit, True once, with new replicas only"


async def _router_away(rig: Rig, namespace: str) -> str:
    await rig.apply(namespace)
    await rig.ready(namespace)
    before = uids(await rig.pods(namespace))
    writes = len(rig.proxy.writes)
    async with LeastRoutable(rig, namespace) as watched:
        await rig.router.close()

        async def alone() -> bool:
            return (await rig.operator.metrics())["argosy_operator_routers_alive"] == 0

        await until("the operator to notice that no router answers", alone, PATIENCE)
        await rig.router.start()

        async def back() -> bool:
            return (await rig.operator.metrics())["argosy_operator_routers_alive"] == 1

        await until("the operator to find the router again", back, PATIENCE)
        await rig.ready(namespace)
    require(uids(await rig.pods(namespace)) == before, "a replica was replaced")
    require(watched.least >= 2, f"{watched.least} of 2 gates stayed open")
    count = len([write for write in rig.proxy.writes[writes:] if not write.is_lease])
    return f"every gate stayed open; {count} writes"


async def _upgrade(rig: Rig, namespace: str) -> str:
    tree = rig.folder / "before"
    _export(BEFORE, tree)
    try:
        old = rendered(rig.plane, tree, *VALUES[:1], "engine.image.tag=n-1")
        await rig.operator.terminate()
        await install(rig.api, old)
        rig.operator.use(old, tree)
        await rig.start_operator()
        await rig.apply(namespace, "plain")
        await rig.apply(namespace, "with-gpu", resources={"gpu": {"count": 1}})
        for name in ("plain", "with-gpu"):
            await rig.ready(namespace, name)
        before = uids(await rig.pods(namespace))
        templates = len(await rig.api.list("replicasets", namespace))
        for objects, source in ((rig.chart, ROOT), (old, tree), (rig.chart, ROOT)):
            await rig.operator.terminate()
            await install(rig.api, objects)
            rig.operator.use(objects, source)
            await rig.start_operator()
            await rig.idle()
            for name in ("plain", "with-gpu"):
                await rig.ready(namespace, name)
            require(uids(await rig.pods(namespace)) == before, f"the operator of {source} replaced replicas")
        require(len(await rig.api.list("replicasets", namespace)) == templates, "a pod template changed")
        stored = (
            await rig.api.get("customresourcedefinitions", "", "inferenceservices.inference.argosy.dev")
        )["status"]["storedVersions"]
        return (
            f"{BEFORE} to this tree, back and forth: no replica replaced, stored versions {', '.join(stored)}"
        )
    finally:
        if rig.operator.is_running:
            await rig.operator.kill()
        await install(rig.api, rig.chart)
        shutil.rmtree(tree, ignore_errors=True)


def _export(commit: str, target: Path) -> None:
    """Write the packages and the chart of a commit into a folder."""
    target.mkdir(parents=True)
    archive = target / "tree.tar"
    try:
        run("git", "-C", ROOT, "archive", "-o", archive, commit, *PARTS, "charts", "crds")
        run("tar", "-xf", archive, "-C", target)
    except ClusterError:
        shutil.rmtree(target, ignore_errors=True)
        raise
    archive.unlink()


FAULTS = (
    Fault(
        "R4 rolling update",
        "Of four replicas that are replaced, four are routable at any moment",
        _rolling_update,
        600,
    ),
    Fault(
        "R5 routers away",
        "No gate closes and no replica is replaced while no router answers, nor when one is back",
        _router_away,
        300,
    ),
    Fault(
        "R12 image bump while old replicas serve",
        "Ready leaves True within a second of the edit, and returns once, with new replicas only",
        _image_bump,
        400,
    ),
    Fault(
        "R23 upgrade and rollback",
        "The chart and the operator of an earlier commit, these, and back: no replica is replaced",
        _upgrade,
        600,
    ),
)
