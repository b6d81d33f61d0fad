"""A service's own timeouts replace the router's, shorter or longer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from argosy_protocol.fleet import FleetDocument, FleetService, ServiceLimits
from argosy_router.config import FlowControlLimits

from .fake_engine import Connection, FakeEngine, Received, answer_normally
from .harness import Rig, rig, service

LONG_S = 3600
SHORT_S = 0.05
REFUSALS = {"request_timeout_s": 504, "queue_timeout_s": 429, "hold_timeout_s": 503}
"""The status of a request whose time ran out."""


class Fleet:
    """Services called by their models, on whose engines nothing ends before it may."""

    def __init__(self, limit: str) -> None:
        self.limit = limit
        self.may_answer = asyncio.Event()
        self.services: list[FleetService] = []
        self.engines: list[FakeEngine] = []

    async def add(self, name: str, seconds: int = 0) -> None:
        """A service with its own `limit` in seconds; zero leaves it to the router."""
        fields: dict[str, Any] = {self.limit: seconds, "max_inflight_per_replica": 1}
        engines = [] if self.limit == "hold_timeout_s" else [await self.start_engine(name)]
        given = service(engines, name=name, uid=name, model=name, limits=ServiceLimits(**fields))
        self.services.append(given)

    async def start_engine(self, name: str) -> FakeEngine:
        engine = FakeEngine(model=name, script=self._answer)
        await engine.start()
        self.engines.append(engine)
        return engine

    async def _answer(self, connection: Connection, request: Received) -> None:
        await self.may_answer.wait()
        await answer_normally(connection, request)

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        for engine in self.engines:
            await engine.stop()

    def config(self, seconds: float) -> dict[str, Any]:
        """A router with its own `limit` in seconds."""
        config: dict[str, Any] = {"document": FleetDocument(services=tuple(self.services))}
        if self.limit == "request_timeout_s":
            return {**config, "request_timeout_s": seconds}
        limits: dict[str, Any] = {"queue_timeout_s": float(LONG_S), self.limit: seconds}
        return {**config, "flow_control": FlowControlLimits(**limits)}

    async def occupy(self, r: Rig, name: str) -> list[asyncio.Task[Any]]:
        """Takes the service's only seat, if it is the queue that requests have to wait in."""
        if self.limit != "queue_timeout_s":
            return []
        first = asyncio.create_task(r.chat("first", model=name))
        await r.until(lambda: any(e.requests for e in self.engines if e.model == name))
        return [first]


@pytest.mark.parametrize("limit", REFUSALS)
async def test_a_service_may_allow_more_than_the_router(limit: str) -> None:
    async with Fleet(limit) as fleet:
        await fleet.add("patient", LONG_S)
        await fleet.add("plain")
        async with rig(**fleet.config(SHORT_S)) as r:
            first = await fleet.occupy(r, "patient") + await fleet.occupy(r, "plain")
            asking = asyncio.create_task(r.chat(model="patient"))
            await r.until(lambda: r.router.requests.inflight == len(first) + 1)
            for _ in range(3):  # each of these ran out of the router's time, which shows that it passes
                assert (await r.chat(model="plain")).status_code == REFUSALS[limit]
            assert not asking.done()
            fleet.may_answer.set()
            if limit == "hold_timeout_s":
                engine = await fleet.start_engine("patient")
                given = service([engine], name="patient", uid="patient", model="patient")
                r.discovery.set(FleetDocument(services=(given,)))
            assert (await asking).status_code == 200
            await asyncio.gather(*first)


async def test_a_service_may_allow_less_than_the_router() -> None:
    async def hasty(limit: str) -> int:
        async with Fleet(limit) as fleet:
            await fleet.add("hasty", 1)
            async with rig(**fleet.config(LONG_S)) as r:
                first = await fleet.occupy(r, "hasty")
                refused = await r.chat(model="hasty")
                fleet.may_answer.set()
                await asyncio.gather(*first)
                return refused.status_code

    given = await asyncio.gather(*(hasty(limit) for limit in REFUSALS))
    assert given == list(REFUSALS.values())
