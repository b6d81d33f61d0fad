"""`/ready` of a router that has just started: its first requests must find the replicas that are well."""

from __future__ import annotations

import asyncio

import pytest

from argosy_protocol.fleet import FleetDocument
from argosy_router.config import UpstreamLimits
from argosy_router.discovery.sources import StaticDiscovery
from argosy_router.fleet import fleet as fleet_module
from argosy_router.fleet.fleet import Fleet, FleetSnapshot
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.upstream import UpstreamTls

from .fake_engine import Connection, FakeEngine, Received
from .harness import DEADLINE_S, Rig, rig, service, until

LONG_S = 600.0
"""No test waits for it: what is ready in time is so by an answer, not by the clock."""


class Slow(FakeEngine):
    """An engine whose answer to one path waits until a test opens the gate."""

    def __init__(self, path: str, *, has_telemetry: bool = True) -> None:
        super().__init__(has_telemetry=has_telemetry)
        self.path = path
        self.asked, self.gate = asyncio.Event(), asyncio.Event()

    async def handle(self, connection: Connection, request: Received) -> None:
        if request.path == self.path:
            self.asked.set()
            await self.gate.wait()
        await super().handle(connection, request)


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "FIRST_ANSWER_S", LONG_S)


async def ready(r: Rig) -> bool:
    status = (await r.http.get("/ready")).status_code
    assert status in (200, 503)
    return status == 200


async def until_ready(r: Rig) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await ready(r):  # noqa: ASYNC110 - what a kubelet does
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("path", "has_telemetry"), [("/internal/telemetry", True), ("/health", False)], ids=["argosy", "foreign"]
)
async def test_a_router_is_ready_once_its_replicas_were_tried(path: str, has_telemetry: bool) -> None:
    slow = Slow(path, has_telemetry=has_telemetry)
    async with rig([FakeEngine(), slow], wait=False) as r:
        await asyncio.wait_for(slow.asked.wait(), DEADLINE_S)
        await r.until_state(0, "synced")
        assert not await ready(r)
        slow.gate.set()
        await until_ready(r)
        assert all(replica.is_routable for replica in r.router.fleet.replicas())
        late = Slow("/internal/telemetry")
        async with late:
            r.discovery.set(FleetDocument(services=(service([*r.engines, late]),)))
            await asyncio.wait_for(late.asked.wait(), DEADLINE_S)
            assert await ready(r), "a replica that is added later takes nothing back"
            late.gate.set()


async def test_a_replica_that_refuses_connections_was_tried() -> None:
    async with FakeEngine() as gone:
        await gone.stop()
        async with rig(wait=False, document=FleetDocument(services=(service([gone]),))) as r:
            await until_ready(r)
            assert (await r.chat()).status_code == 503


async def test_a_silent_replica_keeps_a_router_waiting_for_a_short_time_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Slow("/internal/telemetry")
    async with rig([slow], wait=False) as r:
        await asyncio.wait_for(slow.asked.wait(), DEADLINE_S)
        assert not await ready(r)
        monkeypatch.setattr(fleet_module, "FIRST_ANSWER_S", 0.0)
        assert await ready(r)
        slow.gate.set()


async def test_a_replica_is_tried_only_after_its_model_was_asked_for() -> None:
    slow = Slow("/v1/models")
    wheel = TimerWheel(asyncio.get_running_loop())
    fleet = Fleet(wheel, UpstreamLimits())
    async with slow, FakeEngine() as gone:
        await gone.stop()
        discovery = StaticDiscovery([slow.url, gone.url], "", wheel, UpstreamTls())
        task = asyncio.create_task(discovery.run(fleet.apply))
        try:
            await asyncio.wait_for(slow.asked.wait(), DEADLINE_S)
            assert fleet.is_loaded
            assert not fleet.is_initialized
            slow.gate.set()
            await until(lambda: fleet.is_initialized)
            assert [replica.is_routable for replica in fleet.replicas()] == [True]
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await fleet.close()
    wheel.close()


async def test_a_replica_that_leaves_need_not_be_tried() -> None:
    slow, good = Slow("/internal/telemetry"), FakeEngine()
    async with rig([slow, good], wait=False) as r:
        await r.until(lambda: any(replica.is_routable for replica in r.router.fleet.replicas()))
        assert not await ready(r)
        r.discovery.set(FleetDocument(services=(service([good]),)))
        await until_ready(r)


def test_without_replicas_there_is_nothing_to_try() -> None:
    loop = asyncio.new_event_loop()
    fleet = Fleet(TimerWheel(loop), UpstreamLimits())
    assert not fleet.is_initialized
    fleet.apply(FleetSnapshot())
    assert fleet.is_initialized
    loop.close()
