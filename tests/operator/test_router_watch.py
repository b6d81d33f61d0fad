"""Polling routers and merging their reports."""

from __future__ import annotations

import asyncio
import json

import msgspec
from builders import NOW, pod_object, router_pods
from virtual_time import virtual_time

from argosy_operator.cluster.router_watch import (
    GRACE,
    UNREACHABLE,
    UNSENT,
    WHOLE,
    RouterPod,
    RouterWatch,
    read_router_pod,
)
from argosy_operator.observation import Routers
from argosy_protocol.reports import ReplicaReport, RoutableReport
from released_formats import released


class Scripted:
    """Routers by address: a report, or None for one that does not answer. Answers are held back until they change."""

    def __init__(self, **reports: RoutableReport | None) -> None:
        self.reports = reports
        self.asked: list[tuple[str, int | None]] = []
        self.epochs: list[str] = []
        self._changed = asyncio.Event()

    def say(self, address: str, report: RoutableReport | None) -> None:
        self.reports[address] = report
        self._changed.set()

    async def __call__(self, address: str, seen: int | None, epoch: str) -> RoutableReport:
        self.asked.append((address, seen))
        self.epochs.append(epoch)
        while True:
            report = self.reports[address]
            if report is None:
                raise ConnectionRefusedError
            if report.revision != seen:
                return report
            self._changed.clear()
            await self._changed.wait()


def report(revision: int, *uids: str, state: str = "synced", service: str = "team/tiny") -> RoutableReport:
    replicas = tuple(
        ReplicaReport(
            service=service,
            name=uid,
            uid=uid,
            url="http://x",
            state=state,  # type: ignore[arg-type]
            routable=state == "synced",
        )
        for uid in uids
    )
    return RoutableReport(router="r", revision=revision, replicas=replicas)


@virtual_time
async def test_view_follows_the_reports_of_all_routers() -> None:
    routers = Scripted(a=report(1, "p1"), b=report(5, "p2"))
    changes: list[frozenset[str] | None] = []
    watch = RouterWatch(routers, changes.append)
    watch.set_pods(router_pods("a", "b"))
    assert not watch.view.known
    await asyncio.sleep(2)
    assert (watch.view.known, watch.view.alive) == (True, 2)
    assert watch.view.routable == {"p1", "p2"}
    changes.clear()
    routers.say("a", report(2, "p1", "p3"))
    await asyncio.sleep(0.5)
    assert watch.view.routable == {"p1", "p2", "p3"}
    assert changes == [frozenset({"team/tiny"})], "only the service concerned is reconciled"
    await asyncio.sleep(1)
    assert routers.asked[-1] == ("a", 2), "the next poll waits for a change"
    watch.close()


@virtual_time
async def test_services_that_get_no_requests_for_a_while_are_told_once_and_alone() -> None:
    routers = Scripted(a=report(1, "p1", "p2"), b=report(1, "p1", state="ejected"))
    changes: list[frozenset[str] | None] = []
    watch = RouterWatch(routers, changes.append)
    watch.set_pods(router_pods("a", "b"))
    await asyncio.sleep(UNSENT + 5)
    assert watch.view.unsent == frozenset()
    both = report(2, "p1", state="ejected").replicas + report(2, "p9", service="team/other").replicas
    routers.say("a", RoutableReport(router="r", revision=2, replicas=both))
    await asyncio.sleep(UNSENT - 5)
    assert watch.view.unsent == frozenset(), "it may have started anew"
    changes.clear()
    await asyncio.sleep(10)
    assert watch.view.unsent == {"team/tiny"}
    assert changes == [frozenset({"team/tiny"})]
    changes.clear()
    routers.say("b", report(2, "p1"))
    await asyncio.sleep(2)
    assert watch.view.unsent == frozenset()
    assert changes == [frozenset({"team/tiny"})]
    watch.close()


class Changing(Scripted):
    """Routers that answer with what has changed, as those that know epochs do."""

    def __init__(self, **reports: RoutableReport | None) -> None:
        super().__init__(**reports)
        self.whole: list[str] = []
        self.spoils = False

    async def __call__(self, address: str, seen: int | None, epoch: str) -> RoutableReport:
        found = await super().__call__(address, seen, epoch)
        if seen is None or epoch != found.epoch:
            self.whole.append(address)
            return found
        changed = tuple(sorted({each.service for each in found.replicas if each.name in ("p2", "p3")}))
        replicas = tuple(each for each in found.replicas if each.service in changed)
        base = seen - 1 if self.spoils else seen
        gone = ("team/gone",)
        return msgspec.structs.replace(found, base=base, services=changed + gone, replicas=replicas)


def with_epoch(revision: int, epoch: str, **services: tuple[str, ...]) -> RoutableReport:
    replicas = [
        each for name, uids in services.items() for each in report(0, *uids, service=f"team/{name}").replicas
    ]
    return RoutableReport(router="r", revision=revision, epoch=epoch, replicas=tuple(replicas))


@virtual_time
async def test_a_router_that_only_the_operator_cannot_reach_may_send_requests() -> None:
    """A service was told to get no requests, though such a router served it."""
    routers = Scripted(a=report(1, "p1"), b=report(1, "p1", state="ejected"))
    watch = RouterWatch(routers, lambda _: None)
    watch.set_pods(router_pods("a", "b"))
    await asyncio.sleep(2)
    routers.say("a", None)
    await asyncio.sleep(UNREACHABLE + UNSENT + GRACE)
    assert (watch.view.alive, watch.view.unsent) == (1, frozenset())
    watch.set_pods(router_pods("b"))
    await asyncio.sleep(UNSENT + 1)
    assert watch.view.unsent == {"team/tiny"}, "its pod has gone"
    routers.say("c", None)
    watch.set_pods(router_pods("b", "c"))
    await asyncio.sleep(UNREACHABLE - 5)
    assert watch.view.unsent == frozenset(), "nobody knows what it does"
    await asyncio.sleep(10)
    assert (watch.view.unsent, watch.view.unreachable) == ({"team/tiny"}, ("c",)), (
        "it is not waited for, but named"
    )
    watch.close()


@virtual_time
async def test_changes_are_put_into_the_report_before_and_all_is_asked_for_now_and_then() -> None:
    routers = Changing(a=with_epoch(1, "e", one=("p1",), two=("p2",), gone=("p9",)))
    changes: list[frozenset[str] | None] = []
    watch = RouterWatch(routers, changes.append)
    watch.set_pods(router_pods("a"))
    await asyncio.sleep(2)
    changes.clear()
    routers.say("a", with_epoch(2, "e", one=("p1",), two=("p2", "p3")))
    await asyncio.sleep(2)
    assert watch.view.routable == {"p1", "p2", "p3"}
    assert changes == [frozenset({"team/two", "team/gone"})]
    routers.say("a", with_epoch(3, "e", one=("p1",)))
    await asyncio.sleep(2)
    assert routers.whole == ["a"]
    routers.say("a", with_epoch(2, "another", one=("p7",)))
    await asyncio.sleep(2)
    assert watch.view.routable == {"p7"}, "it has started anew"
    routers.spoils = True
    routers.say("a", with_epoch(5, "another", one=("p1",), two=("p2",)))
    await asyncio.sleep(4)
    assert (watch.view.routable, watch.view.alive) == ({"p1", "p2"}, 1)
    routers.spoils = False
    routers.whole.clear()
    for revision in range(6, 6 + int(2.5 * WHOLE / 10)):
        routers.say("a", with_epoch(revision, "another", one=("p1",), two=("p2",)))
        await asyncio.sleep(10)
    assert routers.whole == ["a", "a"]
    watch.close()


@virtual_time
async def test_a_router_of_the_release_before_reports_all() -> None:
    recorded = json.dumps(released("messages.json")["messages"]["RoutableReport"]["filled"])
    sent = msgspec.json.decode(recorded, type=RoutableReport)
    routers = Scripted(a=sent)
    watch = RouterWatch(routers, lambda affected: None)
    watch.set_pods(router_pods("a"))
    await asyncio.sleep(2)
    assert watch.view.routable == {"words"}
    routers.say("a", msgspec.structs.replace(sent, revision=sent.revision + 1, replicas=()))
    await asyncio.sleep(2)
    assert watch.view.routable == frozenset()
    assert set(routers.epochs) == {""}
    watch.close()


@virtual_time
async def test_a_router_that_changes_all_the_time_is_asked_once_a_second() -> None:
    routers, loop = Scripted(a=report(1)), asyncio.get_running_loop()
    watch = RouterWatch(routers, lambda affected: None)
    watch.set_pods(router_pods("a"))
    began = loop.time()
    for revision in range(2, 202):
        routers.say("a", report(revision, f"p{revision}"))
        await asyncio.sleep(0.1)
    assert len(routers.asked) <= loop.time() - began + 2
    await asyncio.sleep(1)
    assert watch.view.routable == {"p201"}
    watch.close()


@virtual_time
async def test_draining_counts_only_when_no_router_routes() -> None:
    routers = Scripted(a=report(1, "p1", "p2", state="draining"), b=report(1, "p2"))
    watch = RouterWatch(routers, lambda affected: None)
    watch.set_pods(router_pods("a", "b"))
    await asyncio.sleep(1)
    assert (watch.view.draining, watch.view.routable) == ({"p1"}, {"p2"})
    watch.close()


@virtual_time
async def test_silence_is_forgiven_for_a_while_only() -> None:
    routers = Scripted(a=report(1, "p1"))
    watch = RouterWatch(routers, lambda affected: None)
    watch.set_pods(router_pods("a"))
    await asyncio.sleep(1)
    routers.say("a", None)
    await asyncio.sleep(GRACE / 2)
    assert (watch.view.alive, watch.view.routable) == (1, {"p1"}), "its last word still counts"
    await asyncio.sleep(GRACE)
    assert not watch.view.known, "it may be restarting"
    await asyncio.sleep(GRACE)
    assert watch.view == Routers(known=True), "no router is alive"
    routers.say("a", report(1, "p1"))
    await asyncio.sleep(2)
    assert watch.view.routable == {"p1"}
    watch.close()


@virtual_time
async def test_a_router_that_is_silent_for_a_minute_is_named() -> None:
    routers = Scripted(a=report(1, "p1"), b=report(1, "p2"), c=None)
    changes: list[frozenset[str] | None] = []
    watch = RouterWatch(routers, changes.append)
    watch.set_pods(router_pods("a", "b", "c"))
    await asyncio.sleep(5)
    routers.say("b", None)
    await asyncio.sleep(UNREACHABLE - 6)
    assert watch.view.unreachable == ()
    changes.clear()
    await asyncio.sleep(2)
    assert watch.view.unreachable == ("c",)
    await asyncio.sleep(UNREACHABLE)
    assert (watch.view.alive, watch.view.unreachable) == (1, ("b", "c"))
    assert changes == [None, None], "all services are told, once for each"
    routers.say("b", report(2, "p2"))
    await asyncio.sleep(2)
    watch.set_pods(router_pods("a", "b"))
    assert watch.view == Routers(known=True, alive=2, routable=frozenset({"p1", "p2"}))
    watch.close()


@virtual_time
async def test_nothing_is_known_before_a_router_had_the_time_to_answer() -> None:
    watch = RouterWatch(Scripted(a=None), lambda affected: None)
    watch.set_pods([])
    assert not watch.view.known
    await asyncio.sleep(GRACE / 2)
    watch.set_pods(router_pods("a"))
    assert not watch.view.known
    await asyncio.sleep(2 * GRACE)
    assert watch.view == Routers(known=True)
    watch.close()


@virtual_time
async def test_a_router_that_does_not_hold_back_is_not_asked_without_end() -> None:
    asked = 0

    async def fetch(address: str, seen: int | None, epoch: str) -> RoutableReport:
        nonlocal asked
        asked += 1
        return report(1, "p1")

    watch = RouterWatch(fetch, lambda affected: None)
    watch.set_pods(router_pods("a"))
    await asyncio.sleep(60)
    watch.close()
    assert asked <= 65


@virtual_time
async def test_a_router_that_is_gone_is_asked_no_more() -> None:
    routers = Scripted(a=report(1, "p1"), b=report(1, "p2"))
    watch = RouterWatch(routers, lambda affected: None)
    watch.set_pods(router_pods("a", "b"))
    await asyncio.sleep(1)
    watch.set_pods(router_pods("b"))
    assert watch.view.routable == {"p2"}
    routers.asked.clear()
    routers.say("a", report(2))
    await asyncio.sleep(5)
    assert [address for address, _ in routers.asked if address == "a"] == []
    watch.close()
    await asyncio.sleep(0)
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("router")] == []


def test_which_pods_are_routers_to_ask() -> None:
    running = pod_object("r", podIP="10.0.0.1")
    assert read_router_pod(running) == RouterPod(uid="uid-r", name="r", address="10.0.0.1")
    assert read_router_pod(pod_object("r")) is None
    assert read_router_pod(pod_object("r", phase="Pending", podIP="10.0.0.1")) is None
    running["metadata"]["deletionTimestamp"] = NOW
    assert read_router_pod(running) is None
