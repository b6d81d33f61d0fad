"""Requests that are held while there is no replica, and streams that begin while they wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import pytest

from argosy_protocol.fleet import FleetDocument
from argosy_router.config import FlowControlLimits
from argosy_router.flow_control import TOLD_PER_TURN
from argosy_router.proxy.exchange import QueuedCall

from .fake_engine import DONE, Connection, FakeEngine, Received, event
from .harness import StoppedClock, chat, raw, rig, service
from .queueing import check_hint, is_settled, send
from .raw_requests import answer, request_bytes

# no replica


async def test_without_a_replica_requests_are_refused_at_once() -> None:
    async with rig([]) as r:
        refused = await r.chat()
        assert refused.status_code == 503
        check_hint(refused)


async def test_requests_are_held_until_the_first_replica_comes() -> None:
    async with rig([], flow_control=FlowControlLimits(hold_timeout_s=60.0)) as r:
        held = await send(r, "held", 1)
        async with FakeEngine() as engine:
            r.discovery.set(FleetDocument(services=(service([engine]),)))
            assert (await held).status_code == 200
            await r.until(lambda: is_settled(r))


async def test_a_steady_flow_of_newcomers_does_not_put_off_the_held() -> None:
    async with rig([], flow_control=FlowControlLimits(hold_timeout_s=60.0)) as r:
        held = await send(r, "held", 1)

        async def flow() -> None:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.03):
                        await r.chat("impatient")

        flowing = asyncio.create_task(flow())
        async with FakeEngine() as engine:
            r.discovery.set(FleetDocument(services=(service([engine]),)))
            assert (await held).status_code == 200
            flowing.cancel()


@pytest.mark.parametrize("has_replica", [True, False])
async def test_what_was_held_goes_a_few_in_each_turn_of_the_loop(
    monkeypatch: pytest.MonkeyPatch, has_replica: bool
) -> None:
    """All that a key had held went in one turn: a thousand took 70 ms there, and as long again to connect."""
    told_in: Counter[int] = Counter()
    turn = 0

    def count_turn() -> None:
        nonlocal turn
        turn += 1
        asyncio.get_running_loop().call_soon(count_turn)

    for method in ("admit", "refuse"):
        original = getattr(QueuedCall, method)

        def counted(self: QueuedCall, *args: Any, original: Any = original) -> None:
            told_in[turn] += 1
            original(self, *args)

        monkeypatch.setattr(QueuedCall, method, counted)
    clock = StoppedClock()
    limits = FlowControlLimits(hold_timeout_s=60.0)
    async with (
        rig([], flow_control=limits, clock=clock) as r,
        FakeEngine(hello={"max_num_seqs": 1000}) as engine,
        contextlib.AsyncExitStack() as stack,
    ):
        readers = []
        for _ in range(4 * TOLD_PER_TURN):
            reader, writer = await stack.enter_async_context(raw(r.router))
            writer.write(request_bytes())
            readers.append(reader)
        await r.until(lambda: r.metric("queued_requests") == len(readers))
        asyncio.get_running_loop().call_soon(count_turn)
        if has_replica:
            r.discovery.set(FleetDocument(services=(service([engine]),)))
            await r.until(lambda: any(replica.is_routable for replica in r.router.fleet.replicas()))
        await r.pass_time(1.0 if has_replica else 61.0)
        answers = [await answer(reader) for reader in readers]
        assert {status for status, _, _ in answers} == {200 if has_replica else 503}
    assert sum(told_in.values()) == len(readers)
    assert max(told_in.values()) <= 2 * TOLD_PER_TURN


async def test_holding_ends() -> None:
    async with rig([], flow_control=FlowControlLimits(hold_timeout_s=0.05)) as r:
        assert (await r.chat()).status_code == 503


# streams that wait


QUICK = FlowControlLimits(keep_alive_s=0.01, hold_timeout_s=60.0)


async def test_a_waiting_stream_gets_comments_and_then_its_events() -> None:
    async def say(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("hello"))
        connection.chunk(DONE)
        connection.end_stream()

    async with rig([], flow_control=QUICK) as r:
        async with r.http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["x-request-id"]
            lines = answer.aiter_lines()
            for _ in range(2):
                assert (await anext(lines)).startswith(": ")
                assert not await anext(lines)
            async with FakeEngine(script=say) as engine:
                r.discovery.set(FleetDocument(services=(service([engine]),)))
                rest = [line async for line in lines if line and not line.startswith(":")]
        assert "\n\n".join(rest) + "\n\n" == (event("hello") + DONE).decode()
        await r.until(lambda: is_settled(r))


async def test_a_refusal_ends_a_begun_stream_with_an_event() -> None:
    limits = FlowControlLimits(hold_timeout_s=60.0)
    async with rig([], flow_control=limits, clock=StoppedClock()) as r:
        held = await send(r, "held", 1, stream=True)
        for _ in range(2):
            await r.pass_time(limits.keep_alive_s)
        await r.pass_time(limits.hold_timeout_s)
        answer = await held
        assert answer.status_code == 200
        comment, *_, error = [text for text in answer.text.split("\n\n") if text]
        assert comment.startswith(": ")
        assert error.startswith("data: ")
        assert '"service_unavailable"' in error
        assert r.metric('requests_total{code="503",model="tiny"}') == 1


async def test_an_engine_error_ends_a_begun_stream_with_an_event() -> None:
    async def reject(connection: Connection, _: Received) -> None:
        connection.answer(400, b'{"error":\n{"message":"no"}}')

    async with rig([], flow_control=QUICK) as r:
        async with r.http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            async with FakeEngine(script=reject) as engine:
                r.discovery.set(FleetDocument(services=(service([engine]),)))
                rest = [line async for line in lines if line and not line.startswith(":")]
        assert rest == ['data: {"error": {"message":"no"}}']


async def test_a_request_whose_begun_stream_was_closed_is_never_sent() -> None:
    async with rig([], flow_control=QUICK) as r:
        async with r.http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
            await anext(answer.aiter_lines())
        await r.until(lambda: is_settled(r))
        async with FakeEngine() as engine:
            r.discovery.set(FleetDocument(services=(service([engine]),)))
            assert (await r.chat("next")).status_code == 200
            assert len(engine.requests) == 1
