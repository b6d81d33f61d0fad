"""Unfinished events, which a router holds until they are whole: all of them together have a bound."""

from __future__ import annotations

import asyncio

import pytest

from argosy_router.http.body_memory import BodyMemory, BodyReservation
from argosy_router.proxy.upstream.relay import StreamRelay
from argosy_router.proxy.upstream.response_status import Refused

from .fake_engine import DONE, Connection, FakeEngine, Received, event
from .harness import chat, rig

MIB = 1 << 20


def relay(memory: BodyMemory, service: str) -> tuple[StreamRelay, BodyReservation]:
    held = BodyReservation(memory, service, 0)
    return StreamRelay(None, held, is_response=True), held


def test_unfinished_events_of_a_service_leave_memory_to_others() -> None:
    """Each stream could hold 64 MiB, and an engine may have a thousand streams."""
    memory = BodyMemory(16 * MIB)
    streams = [relay(memory, "hostile") for _ in range(20)]
    for each, _ in streams:
        each.feed(b"data: " + b"x" * MIB)
    refused = [each.failure for each, _ in streams if each.failure is not None]
    assert memory.held <= 13 * MIB
    assert len(refused) == 20 - memory.held // MIB
    assert all(isinstance(each, Refused) and each.is_resource_busy for each in refused)
    other, held = relay(memory, "other")
    assert other.feed(b"data: " + b"y" * MIB) == b""
    assert (other.failure, held.size > MIB) == (None, True)
    assert len(other.feed(b"\n\ndata: z\n\n")) > MIB
    assert held.size == 0
    for _, each in streams:
        each.release()
    assert memory.held == 0


@pytest.mark.parametrize("ends", [True, False])
async def test_an_unfinished_event_counts_until_it_is_whole_or_its_attempt_over(ends: bool) -> None:
    may_end = asyncio.Event()

    async def script(connection: Connection, request: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("a") + b"data: " + b"x" * MIB)
        await may_end.wait()
        connection.chunk(b"\n\n" + DONE)
        connection.end_stream()

    async with rig([FakeEngine(script=script)]) as r:
        memory = r.router.requests.event_memory
        async with r.http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
            await r.until(lambda: memory.held >= MIB)
            if ends:
                may_end.set()
                assert (await answer.aread()).endswith(DONE)
        await r.until(lambda: memory.held == 0)
        may_end.set()
