"""Unfinished events and unary answers, which a router holds until they are whole: all together have a bound."""

from __future__ import annotations

import asyncio

import pytest

from argosy_router.http.limits import BodyMemory, BodyReservation
from argosy_router.proxy.relay import Refused, StreamRelay, UnaryRelay

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


def test_unary_answers_that_are_held_leave_memory_to_those_of_others() -> None:
    """Each could hold a megabyte that counted nowhere. One for which there is no memory is forwarded as it comes."""
    memory = BodyMemory(4 * MIB)
    answers = [UnaryRelay(BodyReservation(memory, "hostile", 0)) for _ in range(64)]
    piece = b"x" * (MIB // 2)
    passed = [answer.feed(piece) for answer in answers]
    assert memory.held <= 3 * MIB
    assert passed.count(piece) == 64 - memory.held // len(piece)
    late = answers[passed.index(piece)]
    assert (late.feed(b"y"), late.end()) == (b"y", b"")
    other = UnaryRelay(BodyReservation(memory, "other", 0))
    assert (other.feed(piece), other.end()) == (b"", piece)
    for answer in answers:
        answer.end()
    assert memory.held == 0


async def test_an_answer_that_is_held_counts_until_it_is_forwarded() -> None:
    may_end = asyncio.Event()
    body = b'{"x":"%b"}' % (b"x" * MIB)[:-100]

    async def script(connection: Connection, request: Received) -> None:
        connection.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body[:-1])
        await may_end.wait()
        connection.writer.write(body[-1:])

    async with rig([FakeEngine(script=script)]) as r:
        memory = r.router.requests.shared.event_memory
        asked = asyncio.create_task(r.chat())
        await r.until(lambda: memory.held >= MIB - 200)
        may_end.set()
        assert (await asked).content == body
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
        memory = r.router.requests.shared.event_memory
        async with r.http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
            await r.until(lambda: memory.held >= MIB)
            if ends:
                may_end.set()
                assert (await answer.aread()).endswith(DONE)
        await r.until(lambda: memory.held == 0)
        may_end.set()
