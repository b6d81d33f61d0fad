"""When a pod's readiness gate opens and closes."""

from __future__ import annotations

import asyncio
import datetime

import msgspec
import pytest
from builders import NOW, isvc_object, pod
from harness import (
    FakeRouter,
    Operator,
    condition,
    is_ready,
    new_cluster,
    num_routable,
    settled,
)
from virtual_time import virtual_time

from argosy_operator.cluster.router_watch import UNSENT
from argosy_operator.desired.diff import REOPEN_SECONDS, gate_patch, gate_status
from argosy_operator.observation import Routers
from argosy_operator.pod import Pod
from argosy_protocol.reports import ReplicaReport

UNKNOWN = Routers()
NONE = Routers(known=True)
SYNCED = Routers(known=True, alive=1, routable=frozenset({"uid-p"}))
NOT_SYNCED = Routers(known=True, alive=1)
DRAINING = Routers(known=True, alive=1, draining=frozenset({"uid-p"}))

CLOSED = pod("p", "r", gate="")
OPEN = pod("p", "r", gate="True")
STARTING = pod("p", "r", gate="", ready=False)


@pytest.mark.parametrize(
    ("name", "before", "routers", "change"),
    [
        ("a router is synced", CLOSED, SYNCED, "True"),
        (
            "a router is synced with a pod that was drained before",
            pod("p", "r", gate="False"),
            SYNCED,
            "True",
        ),
        ("open already", OPEN, SYNCED, None),
        ("routers are alive, none is synced", CLOSED, NOT_SYNCED, None),
        ("no router is alive", CLOSED, NONE, "True"),
        ("no router is alive, containers start", STARTING, NONE, None),
        ("no router has been asked", CLOSED, UNKNOWN, None),
        ("routers lost it", OPEN, NOT_SYNCED, None),
        ("routers died", OPEN, NONE, None),
        ("drains", OPEN, DRAINING, "False"),
        ("drains, closed already", pod("p", "r", gate="False"), DRAINING, None),
        ("deleted", pod("p", "r", is_terminating=True), SYNCED, "False"),
        ("deleted, no router has been asked", pod("p", "r", is_terminating=True), UNKNOWN, "False"),
        ("deleted, closed already", pod("p", "r", gate="", is_terminating=True), SYNCED, None),
        ("evicted", pod("p", "r", gate="", is_finished=True), SYNCED, None),
    ],
)
def test_gate_status(name: str, before: Pod, routers: Routers, change: str | None) -> None:
    assert gate_status(before, routers) == change, name


def test_patch_names_the_pod_by_uid_and_says_why() -> None:
    patch = gate_patch(CLOSED, "True", now=NOW, router_lives=True)
    assert patch["metadata"] == {"uid": "uid-p"}
    (condition,) = patch["status"]["conditions"]
    assert (condition["type"], condition["status"]) == ("inference.argosy.dev/routable", "True")
    assert condition["reason"] == "RouterSynced"
    assert (
        gate_patch(CLOSED, "True", now=NOW, router_lives=False)["status"]["conditions"][0]["reason"]
        == "NoRouter"
    )
    assert (
        gate_patch(OPEN, "False", now=NOW, router_lives=True)["status"]["conditions"][0]["reason"]
        == "Draining"
    )


@virtual_time
async def test_gate_waits_for_a_router_that_lives() -> None:
    cluster = new_cluster()
    router = FakeRouter(cluster)
    router.set(synced=False)
    async with Operator(cluster, router) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        assert cluster.condition("Ready")["reason"] == "WaitingForRouter"
        router.set()
        await operator.settle()
        assert is_ready(cluster)
        router.set(synced=False)
        await operator.settle()
    assert num_routable(cluster) == 1, "a router that loses a replica does not close the gate"


@virtual_time
async def test_a_service_to_which_no_router_sends_requests_is_not_ready() -> None:
    cluster = new_cluster()
    router = FakeRouter(cluster)
    async with Operator(cluster, router) as operator:
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
        assert is_ready(cluster)
        router.set(synced=False)
        await asyncio.sleep(UNSENT / 2)
        assert is_ready(cluster), "the only router may have started anew"
        await asyncio.sleep(UNSENT)
        assert condition(cluster, "Ready") == condition(cluster, "Routable") == ("False", "WaitingForRouter")
        assert cluster.isvc()["status"]["routable"] == "0/2"
        assert num_routable(cluster) == 2, "the gates stay open"
        router.set()
        await operator.settle()
        assert is_ready(cluster)
        assert cluster.isvc()["status"]["routable"] == "2/2"


@virtual_time
async def test_gate_opens_when_no_router_lives_and_status_says_so() -> None:
    async with settled(isvc_object(), router=False) as (cluster, operator):
        await asyncio.sleep(30)
        await operator.settle()
        assert num_routable(cluster) == 1
        assert cluster.condition("Ready")["reason"] == "NoRouter"
    async with Operator(cluster, router_url="") as operator:
        await asyncio.sleep(30)
        await operator.settle()
    assert is_ready(cluster), "where no router is expected, none is missed"


@virtual_time
async def test_router_that_stops_answering_does_not_lock_the_fleet() -> None:
    cluster = new_cluster()
    router = FakeRouter(cluster)
    async with Operator(cluster, router) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        router.set(reachable=False)
        cluster.edit("tiny", lambda spec: spec.update(replicas=2))
        await asyncio.sleep(60)
        await operator.settle()
    assert num_routable(cluster) == 2


@pytest.mark.parametrize(
    ("since", "change"),
    [
        ("2026-01-01T00:00:00Z", None),
        ("2025-12-31T23:59:50Z", None),
        ("2025-12-31T23:59:40Z", "True"),
        ("2026-01-01T00:00:09Z", "True"),
        ("", "True"),
    ],
    ids=["now", "lately", "long ago", "by a clock ahead of ours", "unknown"],
)
def test_a_gate_that_closed_stays_so_for_a_while(since: str, change: str | None) -> None:
    assert gate_status(pod("p", "r", gate="False", gate_since=since), SYNCED, NOW) == change


class FlappingRouter(FakeRouter):
    """Reports that each replica drains, and that it does not, in turn."""

    drains = False

    def replicas(self) -> tuple[ReplicaReport, ...]:
        found = super().replicas()
        if not self.drains:
            return found
        return tuple(msgspec.structs.replace(each, state="draining", routable=False) for each in found)


@virtual_time
async def test_an_engine_that_drains_over_and_over_makes_few_writes() -> None:
    cluster = new_cluster()
    router = FlappingRouter(cluster)
    began = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)

    def now() -> str:
        time = began + datetime.timedelta(seconds=asyncio.get_running_loop().time())
        return time.strftime("%Y-%m-%dT%H:%M:%SZ")

    async with Operator(cluster, router, now=now) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        before, seconds = len(cluster.writes), 120
        for _ in range(seconds):
            router.drains = not router.drains
            router.changed.set()
            await asyncio.sleep(1.0)
            cluster.step()
        gates = [write for write in cluster.writes[before:] if write[1] == "Pod"]
        assert 2 <= len(gates) <= 2 * (seconds / REOPEN_SECONDS + 1)
        router.drains = False
        router.changed.set()
        await asyncio.sleep(REOPEN_SECONDS + 1)
        await operator.settle()
        assert num_routable(cluster) == 1
