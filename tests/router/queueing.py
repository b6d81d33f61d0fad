"""A service whose capacity a test controls, so that further requests queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx

from argosy_protocol.fleet import ServiceLimits
from argosy_router.config import FlowControlLimits

from .fake_engine import MODEL, Connection, FakeEngine, Received, answer_normally
from .harness import Rig, rig

ONE_AT_A_TIME = {"limits": ServiceLimits(max_inflight_per_replica=1)}


class Turnstile:
    """A script that holds every request until a test lets it go, and remembers the order."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self._permits = asyncio.Semaphore(0)

    async def __call__(self, connection: Connection, request: Received) -> None:
        self.order.append(request.json["messages"][0]["content"])
        self.bodies.append(request.json)
        await self._permits.acquire()
        await answer_normally(connection, request)

    def let(self, count: int = 1) -> None:
        for _ in range(count):
            self._permits.release()


def queued(r: Rig) -> float:
    return r.metric(f'queued_requests{{model="{MODEL}"}}')


def is_settled(r: Rig) -> bool:
    loads = [replica.load for replica in r.router.fleet.replicas()]
    return (
        r.router.requests.inflight == 0
        and queued(r) == 0
        and all((load.inflight, load.queued_tokens) == (0, 0) for load in loads)
        and r.router.flow_control.num_admitted == 0
    )


@contextlib.asynccontextmanager
async def full(
    *, limits: FlowControlLimits | None = None, **config: Any
) -> AsyncIterator[tuple[Rig, Turnstile, asyncio.Task[httpx.Response]]]:
    """A service whose capacity of one request is taken by a request called "first"."""
    turnstile = Turnstile()
    engines = [FakeEngine(script=turnstile)]
    async with rig(engines, fields=ONE_AT_A_TIME, flow_control=limits or FlowControlLimits(), **config) as r:
        first = asyncio.create_task(r.chat("first"))
        await r.until(lambda: turnstile.order == ["first"])
        yield r, turnstile, first
        turnstile.let(1000)
        await asyncio.gather(first, return_exceptions=True)
        await r.until(lambda: is_settled(r))


async def send(r: Rig, name: str, waiting: int, **fields: Any) -> asyncio.Task[httpx.Response]:
    """A request that has to wait; returns once it does."""
    task = asyncio.create_task(r.chat(name, **fields))
    await r.until(lambda: queued(r) == waiting)
    return task


def check_hint(answer: httpx.Response) -> None:
    """As OpenAI's SDKs read it: milliseconds first, and never longer than a minute."""
    assert 0 < float(answer.headers["retry-after-ms"]) <= 60_000
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert answer.headers["x-should-retry"] == "true"
