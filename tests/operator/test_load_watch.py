"""Asking routers for their load."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest
from builders import router_pods
from virtual_time import virtual_time

from argosy_operator.cluster.router_watch import ASK_PAUSE, FRESH, LOAD_WAIT, UNREACHABLE, LoadWatch
from argosy_protocol.reports import LoadReport, ReplicaLoadReport, ServiceLoadReport


class Routers:
    """Routers by address. An answer is held back until the revision changes, or for WAIT seconds."""

    def __init__(self, *addresses: str) -> None:
        self.reports = {address: report(1) for address in addresses}
        self.silent: set[str] = set()
        self.asked: list[tuple[str, int | None]] = []
        self._changed = asyncio.Event()

    def say(self, address: str, report: LoadReport) -> None:
        self.reports[address] = report
        self._changed.set()
        self._changed = asyncio.Event()

    async def __call__(self, address: str, seen: int | None) -> LoadReport:
        self.asked.append((address, seen))
        if address in self.silent:
            raise ConnectionRefusedError
        if self.reports[address].revision == seen:
            try:
                async with asyncio.timeout(LOAD_WAIT):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return self.reports[address]


def report(revision: int, *, held: int = 0, queued: int = 0) -> LoadReport:
    service = ServiceLoadReport(service="team/tiny", held=held, queued=queued)
    return LoadReport(router="r", revision=revision, services=(service,))


@virtual_time
async def test_reports_are_merged_and_kept_fresh() -> None:
    routers = Routers("a", "b")
    watch = LoadWatch(routers, lambda held: None)
    watch.set_pods(router_pods("a", "b"))
    await asyncio.sleep(1)
    assert (routers.asked, watch.view()) == ([], {}), "no service scales"
    watch.set_needed(True)
    await asyncio.sleep(1)
    routers.reports |= {"a": report(1, queued=2), "b": report(1, queued=3)}
    await asyncio.sleep(2 * LOAD_WAIT)
    assert (watch.view()["team/tiny"].queued, watch.view()["team/tiny"].is_complete) == (5, True)
    routers.silent.add("b")
    await asyncio.sleep(FRESH + LOAD_WAIT)
    assert (watch.view()["team/tiny"].queued, watch.view()["team/tiny"].is_complete) == (2, False)
    watch.set_pods(router_pods("a"))
    assert watch.view()["team/tiny"].is_complete, "the other router is gone"
    watch.set_needed(False)
    count = len(routers.asked)
    await asyncio.sleep(10 * LOAD_WAIT)
    assert len(routers.asked) == count


@virtual_time
async def test_a_router_that_is_silent_for_a_minute_is_waited_for_no_more() -> None:
    routers = Routers("a", "b", "c")
    routers.silent.add("c")
    watch = LoadWatch(routers, lambda held: None)
    watch.set_pods(router_pods("a", "b", "c"))
    watch.set_needed(True)

    def known() -> tuple[bool, bool]:
        load = watch.view()["team/tiny"]
        return load.is_complete, load.is_settled

    await asyncio.sleep(1)
    assert known() == (False, False)
    await asyncio.sleep(UNREACHABLE)
    assert known() == (False, True)
    routers.silent.add("b")
    await asyncio.sleep(FRESH + LOAD_WAIT)
    assert known() == (False, False), "another one may come back yet"
    await asyncio.sleep(UNREACHABLE)
    assert known() == (False, True)
    routers.silent.clear()
    await asyncio.sleep(LOAD_WAIT)
    assert known() == (True, True)
    watch.close()


class Counted(tuple[ReplicaLoadReport, ...]):
    """Counts how often the replicas of a report are read."""

    read = 0

    def __iter__(self) -> Iterator[ReplicaLoadReport]:
        self.read += 1
        return super().__iter__()


@virtual_time
async def test_reports_are_merged_once_for_each_change_and_each_service_that_is_asked_for() -> None:
    replicas = [Counted([ReplicaLoadReport(name="p", uid="p", requests=3)]) for _ in range(3)]
    routers = Routers("a", "b")
    for number, address in enumerate(("a", "b")):
        services = tuple(
            ServiceLoadReport(service=f"team/s{each}", queued=number, replicas=found)
            for each, found in enumerate(replicas)
        )
        routers.reports[address] = LoadReport(router=address, revision=1, services=services)
    watch = LoadWatch(routers, lambda held: None)
    watch.set_pods(router_pods("a", "b"))
    watch.set_needed(True)
    await asyncio.sleep(1)
    before = [each.read for each in replicas]
    for _ in range(100):
        assert (watch.view()["team/s0"].queued, watch.view()["team/s0"].sequences) == (1, 4)
        assert watch.view().get("team/s9") is None
    assert [each.read - read for each, read in zip(replicas, before, strict=True)] == [2, 0, 0]
    seen = watch.view()
    routers.say("b", msgspec.structs.replace(routers.reports["b"], revision=2))
    await asyncio.sleep(1)
    assert watch.view() is not seen
    assert watch.view()["team/s0"] == seen["team/s0"]
    assert replicas[0].read - before[0] == 4
    routers.silent.add("b")
    await asyncio.sleep(FRESH + LOAD_WAIT)
    assert (watch.view()["team/s0"].is_complete, watch.view()["team/s0"].queued) == (False, 0)
    watch.close()


@virtual_time
async def test_held_requests_are_announced_within_a_second() -> None:
    routers, told = Routers("a", "b"), []
    loop = asyncio.get_running_loop()
    watch = LoadWatch(routers, lambda held: told.append((loop.time(), held)))
    watch.set_pods(router_pods("a", "b"))
    watch.set_needed(True)
    await asyncio.sleep(2.5)
    began = loop.time()
    routers.say("b", report(2, held=1, queued=1))
    await asyncio.sleep(1)
    (when, held) = told[0]
    assert (when - began, held) == (pytest.approx(0.0), frozenset({"team/tiny"}))
    watch.close()


@virtual_time
async def test_routers_are_asked_once_without_being_followed() -> None:
    routers = Routers("a", "b")
    routers.reports["a"] = report(1, queued=4)
    routers.silent.add("b")
    watch = LoadWatch(routers, lambda held: None)
    assert await watch.ask() == {}
    watch.set_pods(router_pods("a", "b"))
    loads = await watch.ask()
    assert (loads["team/tiny"].queued, loads["team/tiny"].is_complete) == (4, False)
    assert routers.asked == [("a", None), ("b", None)]


@virtual_time
async def test_removals_share_an_answer_for_a_second() -> None:
    routers = Routers("a")
    watch = LoadWatch(routers, lambda held: None)
    watch.set_pods(router_pods("a"))
    for _ in range(10):
        await asyncio.gather(*(watch.ask() for _ in range(50)))
        await asyncio.sleep(ASK_PAUSE / 5)
    assert len(routers.asked) == 2
    routers.reports["a"] = report(1, queued=4)
    await asyncio.sleep(ASK_PAUSE)
    assert (await watch.ask())["team/tiny"].queued == 4


@virtual_time
async def test_a_router_that_hangs_does_not_delay_for_long() -> None:
    async def hang(address: str, seen: int | None) -> LoadReport:
        await asyncio.Event().wait()
        raise AssertionError

    watch = LoadWatch(hang, lambda held: None)
    watch.set_pods(router_pods("a"))
    async with asyncio.timeout(3):
        assert await watch.ask() == {}
