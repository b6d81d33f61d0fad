"""A router that asks its engines what they serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from argosy_protocol.fleet import FleetDocument
from argosy_router.discovery.sources import StaticDiscovery
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.upstream import UpstreamTls

from .fake_engine import FakeEngine
from .harness import Rig, rig

PROMPT = "The quick brown fox jumps over the lazy dog. " * 60


@contextlib.asynccontextmanager
async def routing(*engines: FakeEngine) -> AsyncIterator[Rig]:
    """A router that asks the engines what they serve."""
    async with rig(engines, document=FleetDocument(), wait=False) as r:
        wheel = TimerWheel(asyncio.get_running_loop())
        static = StaticDiscovery([engine.url for engine in engines], "", wheel, UpstreamTls())
        task = asyncio.create_task(static.run(r.router.fleet.apply))
        try:
            await r.until(
                lambda: sum(replica.is_routable for replica in r.router.fleet.replicas()) == len(engines)
            )
            yield r
        finally:
            task.cancel()
            wheel.close()
