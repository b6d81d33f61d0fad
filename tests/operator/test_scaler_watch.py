"""The watch of HorizontalPodAutoscalers: what it costs, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import AsyncGenerator
from types import FrameType
from typing import Any

from builders import autoscaler
from fake_kubernetes import FakeKubernetes, Object
from virtual_time import virtual_time

from argosy_operator import observation as observed_scaler
from argosy_operator.cluster import api, watches
from argosy_operator.cluster.api import ObjectList
from argosy_operator.cluster.watches import ScalerWatch
from argosy_operator.names import AUTOSCALERS, Kind, Name


def numbered(number: int) -> Object:
    made = autoscaler(name=f"s{number}")
    made["metadata"]["name"] = f"hpa{number}"
    return made


class Watching:
    """A watch, and the services whose autoscalers it said have changed."""

    def __init__(self, cluster: FakeKubernetes) -> None:
        self.changed: list[Name] = []
        self.watch = ScalerWatch(
            cluster, (), read_service=self._read, find_service=self._find, on_change=self.changed.append
        )

    async def _read(self, name: Name) -> None:
        pass

    def _find(self, deployment: Name) -> Name | None:
        return None


class Opcodes:
    """Counts the instructions that run in the modules of autoscalers."""

    files = (watches.__file__, api.__file__, observed_scaler.__file__)

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        frame.f_trace_opcodes = True
        self.count += event == "opcode"
        return self


async def work_of_an_event(autoscalers: int) -> int:
    cluster = FakeKubernetes()
    for number in range(autoscalers):
        cluster.create(numbered(number))
    watching = Watching(cluster)
    watching.watch.set_needed(True)
    await watching.watch.wait_asked()
    await asyncio.sleep(1)
    watching.changed.clear()
    before, counted = sys.gettrace(), Opcodes()
    sys.settrace(counted)
    try:
        cluster.create(numbered(autoscalers))
        cluster.remove((AUTOSCALERS, "team", "hpa0"))
        moved = numbered(1)
        moved["spec"]["scaleTargetRef"]["name"] = "elsewhere"
        cluster.overwrite((AUTOSCALERS, "team", "hpa1"), moved)
        await asyncio.sleep(1)
    finally:
        sys.settrace(before)
        watching.watch.close()
    expected = [f"s{autoscalers}", "s0", "elsewhere", "s1"]
    assert watching.changed == [("team", name) for name in expected]
    return counted.count


@virtual_time
async def test_an_event_costs_no_more_for_the_autoscalers_of_other_services() -> None:
    few, many = await work_of_an_event(4), await work_of_an_event(400)
    assert few > 0
    assert many == few


@virtual_time
async def test_a_new_list_announces_what_differs() -> None:
    """Autoscalers that went, came and moved while nothing was watched."""

    class Ending(FakeKubernetes):
        ended = asyncio.Event()

        async def watch(
            self, kind: Kind, *, namespace: str | None, version: str
        ) -> AsyncGenerator[tuple[str, Object], None]:
            await self.ended.wait()
            self.ended.clear()
            return
            yield

    cluster = Ending()
    for number in range(3):
        cluster.create(numbered(number))
    watching = Watching(cluster)
    watching.watch.set_needed(True)
    await watching.watch.wait_asked()
    assert watching.changed == [("team", name) for name in ("s0", "s1", "s2")]
    watching.changed.clear()
    cluster.remove((AUTOSCALERS, "team", "hpa0"))
    moved = numbered(1)
    moved["spec"]["scaleTargetRef"]["name"] = "s9"
    cluster.overwrite((AUTOSCALERS, "team", "hpa1"), moved)
    cluster.ended.set()
    await asyncio.sleep(70)
    assert watching.changed == [("team", name) for name in ("s0", "s1", "s9")]
    found = [watching.watch.of(("team", f"s{number}")).names for number in (0, 1, 2, 9)]
    watching.watch.close()
    assert found == [(), (), ("hpa2",), ("hpa1",)]


class Tracked(dict[str, Any]):
    """An object as the API server answers it, which tells whether it is still in memory."""


@virtual_time
async def test_a_page_is_read_and_dropped_before_the_next_is_asked_for() -> None:
    alive: list[int] = []
    sizes: list[int] = []

    class Large(FakeKubernetes):
        async def list_pages(
            self, kind: Kind, *, namespace: str | None, limit: int
        ) -> AsyncGenerator[ObjectList, None]:
            whole = (await self.list(kind, namespace=namespace)).items
            held: list[weakref.ref[Tracked]] = []
            while whole:
                taken = [Tracked(whole.pop()) for _ in range(min(limit, len(whole)))]
                held += map(weakref.ref, taken)
                sizes.append(len(taken))
                page = ObjectList(taken, "1")  # type: ignore[arg-type]
                del taken
                yield page
                del page
                gc.collect()
                alive.append(sum(each() is not None for each in held))

    cluster = Large()
    for number in range(120):
        cluster.create(numbered(number))
    watching = Watching(cluster)
    watching.watch.set_needed(True)
    await watching.watch.wait_asked()
    watching.watch.close()
    assert len(watching.changed) == 120
    assert max(sizes) <= 32
    assert alive == [0] * len(sizes)


@virtual_time
async def test_a_watch_that_ends_at_once_is_begun_again_without_haste() -> None:
    class Ending(FakeKubernetes):
        lists = 0

        async def list(self, kind: Kind, *, namespace: str | None, labels: str = "") -> ObjectList:
            self.lists += 1
            if self.lists > 1000:
                raise RuntimeError("it would not end")
            return await super().list(kind, namespace=namespace, labels=labels)

        async def watch(
            self, kind: Kind, *, namespace: str | None, version: str
        ) -> AsyncGenerator[tuple[str, Object], None]:
            return
            yield

    cluster = Ending()
    watching = Watching(cluster)
    watching.watch.set_needed(True)
    await asyncio.sleep(600)
    watching.watch.close()
    assert 100 < cluster.lists <= 121


@virtual_time
async def test_whoever_waits_goes_on_when_autoscalers_matter_no_more() -> None:
    class Silent(FakeKubernetes):
        async def list(self, kind: Kind, *, namespace: str | None, labels: str = "") -> ObjectList:
            await asyncio.Event().wait()
            raise AssertionError

    watching = Watching(Silent())
    watching.watch.set_needed(True)
    waiting = asyncio.create_task(watching.watch.wait_asked())
    await asyncio.sleep(10)
    assert not waiting.done()
    watching.watch.set_needed(False)
    await asyncio.wait_for(waiting, 1)


@virtual_time
async def test_an_autoscaler_that_cannot_be_read_keeps_nobody_waiting_and_ends_nothing() -> None:
    cluster = FakeKubernetes()
    cluster.create({**numbered(0), "status": {"conditions": [{"status": "True"}]}})
    watching = Watching(cluster)
    watching.watch.set_needed(True)
    async with asyncio.timeout(60):
        await watching.watch.wait_asked()
    assert watching.changed == []
    cluster.remove((AUTOSCALERS, "team", "hpa0"))
    cluster.create(numbered(1))
    await asyncio.sleep(20)
    watching.watch.close()
    assert watching.changed == [("team", "s1")]
