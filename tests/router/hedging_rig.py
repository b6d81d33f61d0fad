"""A router that hedges, in front of replicas that answer when a test lets them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx

from argosy_router.proxy import resilience
from argosy_router.proxy.accounting import AttemptRecord

from .fake_engine import Connection, FakeEngine, Received, Script, answer_normally
from .harness import Rig, StoppedClock, chat, rig

STREAM = {**chat(stream=True), "stream_options": {"include_usage": True}}


class Slow:
    """A replica that answers only when `go_on` is set, and sets `was_reset` when its request is aborted."""

    def __init__(self, then: Script = answer_normally) -> None:
        self.go_on = asyncio.Event()
        self.was_reset = asyncio.Event()
        self.then = then

    async def __call__(self, connection: Connection, request: Received) -> None:
        told = asyncio.create_task(self.go_on.wait())
        gone = asyncio.create_task(connection.gone())
        await asyncio.wait((told, gone), return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if gone.done():
            self.was_reset.set()
            return
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone
        await self.then(connection, request)


async def die(connection: Connection, request: Received) -> None:
    connection.die()


async def refuse(connection: Connection, request: Received) -> None:
    connection.answer(503, b'{"error":{"message":"full"}}')


async def fail(connection: Connection, request: Received) -> None:
    connection.answer(500, b'{"error":{"message":"bug"}}')


async def nonsense(connection: Connection, request: Received) -> None:
    connection.send(b"nonsense\r\n\r\n")


@contextlib.asynccontextmanager
async def hedged(*scripts: Script, **config: Any) -> AsyncIterator[Rig]:
    """A rig of these replicas; the first request goes to the first one, and its hedge to the second.

    Streams are overdue when a test says so (`overdue`)."""
    engines = [FakeEngine(script=script) for script in scripts]
    async with rig(
        engines, **{"policy": "round-robin", "hedge_after": 1.0, "clock": StoppedClock(), **config}
    ) as r:
        yield r


async def asking(r: Rig, content: str = "hi", **fields: Any) -> asyncio.Task[httpx.Response]:
    """Sends a stream's request; returns when a replica has it."""
    before = sent(r)
    task = asyncio.create_task(r.chat(content, **{"stream": True, **fields}))
    await r.until(lambda: sent(r) > before)
    return task


def sent(r: Rig) -> int:
    """Attempts that replicas have seen."""
    return sum(len(engine.requests) for engine in r.engines)


async def overdue(r: Rig) -> None:
    """Lets every stream sent so far be overdue; returns when replicas have the hedges."""
    before, had = sent(r), inflight(r)
    await r.pass_time(2 * resilience.MIN_FIRST_TOKEN_S)
    hedges = inflight(r) - had
    await r.until(lambda: sent(r) >= before + hedges)


async def until_hedged(r: Rig) -> None:
    """Returns when the only stream was sent to one replica, and then as a hedge to another."""
    await r.until(lambda: sent(r) >= 1)
    await overdue(r)
    await r.until(lambda: sent(r) >= 2)


async def chat_hedged(r: Rig) -> httpx.Response:
    task = await asking(r)
    await overdue(r)
    return await task


def inflight(r: Rig) -> int:
    """Attempts that the router has not ended."""
    return sum(len(replica.inflight_attempts) for replica in r.router.fleet.replicas())


def outcomes(r: Rig) -> dict[str, float]:
    return {labels[1]: count for labels, count in r.router.metrics.hedges.sums()}


def failures(r: Rig) -> dict[str, float]:
    return {labels[1]: count for labels, count in r.router.metrics.failures.sums()}


def decisions(r: Rig) -> list[AttemptRecord]:
    """Newest first."""
    return list(r.router.accounting.attempt_log.latest(1000))


def is_whole(answer: httpx.Response) -> bool:
    """Whether it is exactly one answer."""
    text = answer.text
    return answer.status_code == 200 and [text.count(part) for part in ('"hel"', '"lo"', "[DONE]")] == [
        1,
        1,
        1,
    ]
