"""In-flight accounts: whatever becomes of a request, it is charged once and discharged once (AIBrix#2463, GIE#2802)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest

from .announced_chunks import LONG, chain
from .failure_scripts import (
    SCRIPTS,
    never_answer,
    stall_in_the_stream,
)
from .fake_engine import DONE, MODEL, Connection, FakeEngine, Received, event
from .harness import chat, is_settled, raw, rig
from .raw_requests import request_bytes


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
async def test_every_end_settles_the_account(script: Any, stream: bool) -> None:
    async with rig([FakeEngine(script=script), FakeEngine(script=script)]) as r:
        answers = await asyncio.gather(
            *(r.chat(f"question {number}", stream=stream) for number in range(6)), return_exceptions=True
        )
        assert len(answers) == 6
        await r.until(lambda: is_settled(r))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
async def test_everything_a_request_held_is_freed_with_it(script: Any, stream: bool) -> None:
    """A body may have many megabytes: it must not wait for the garbage collector."""
    async with rig([FakeEngine(script=script), FakeEngine(script=script)]) as r:
        await r.chat("once, for what stays", stream=stream)
        with collector_off() as garbage:
            await asyncio.gather(
                *(r.chat(f"question {number}", stream=stream) for number in range(3)), return_exceptions=True
            )
            await r.until(lambda: is_settled(r))
            gc.collect()
            left = {type(thing).__name__ for thing in garbage if type(thing).__module__.startswith(HOLDERS)}
            assert not left


async def test_everything_a_queued_request_held_is_freed_with_it() -> None:
    async with rig([FakeEngine(hello={"max_num_seqs": 1})]) as r:
        await r.chat("once, for what stays")
        with collector_off() as garbage:
            await asyncio.gather(*(r.chat(f"question {number}") for number in range(24)))
            await r.until(lambda: is_settled(r))
            assert r.metric(f'queue_seconds_count{{model="{MODEL}",outcome="sent"}}')
            gc.collect()
            left = {type(thing).__name__ for thing in garbage if type(thing).__module__.startswith(HOLDERS)}
            assert not left


HOLDERS = "argosy_router.proxy."


@contextlib.contextmanager
def collector_off() -> Iterator[list[Any]]:
    """No collection of its own accord; the list shows what one finds."""
    gc.collect()
    gc.freeze()  # so that the next collections are of what comes now
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def test_a_prompt_counts_until_the_first_token_and_its_request_until_the_last() -> None:
    say = asyncio.Queue[bytes]()

    async def as_told(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        while (told := await say.get()) != DONE:
            connection.chunk(told)
        connection.chunk(DONE)
        connection.end_stream()

    async with (
        rig([FakeEngine(script=as_told, resident=chain(LONG))]) as r,
        raw(r.router) as (reader, writer),
    ):
        load = r.replica(0).load
        writer.write(request_bytes(content=LONG + "which of them is it?" * 60, stream=True))
        await r.until(lambda: bool(r.engines[0].requests))
        record = next(r.router.accounting.attempt_log.latest(1))
        uncached = record.prompt_tokens - record.predicted_cached_tokens
        assert 0 < uncached < record.prompt_tokens
        assert (load.inflight, load.requests) == (1, 1)
        assert (load.inflight_tokens, load.queued_tokens) == (uncached, uncached)
        assert load.wait_s > 0.0, "the next one would wait for it"
        for text in ("first", "second"):
            say.put_nowait(event(text))
            await reader.readuntil(event(text))
            assert (load.inflight_tokens, load.queued_tokens) == (0, 0), text
            assert (load.inflight, load.requests) == (1, 1), text
        say.put_nowait(DONE)
        await r.until(lambda: is_settled(r))


async def test_a_deadline_settles_the_account() -> None:
    async with rig([FakeEngine(script=never_answer)], request_timeout_s=0.05, first_byte_timeout_s=0.05) as r:
        assert (await r.chat("hi", stream=True)).status_code == 504
        await r.until(lambda: is_settled(r))


@pytest.mark.parametrize("script", [never_answer, stall_in_the_stream], ids=lambda script: script.__name__)
async def test_a_client_that_leaves_settles_the_account(script: Any) -> None:
    async with rig([FakeEngine(script=script)]) as r, contextlib.AsyncExitStack() as stack:
        request = r.http.build_request("POST", "/v1/chat/completions", json=chat("hi", stream=True))
        head = b"".join(b"%b: %b\r\n" % header for header in request.headers.raw)
        for _ in range(5):
            _, writer = await stack.enter_async_context(raw(r.router))
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n" + head + b"\r\n" + request.content)
        load = r.replica(0).load
        await r.until(lambda: load.inflight == 5)
        await stack.aclose()
        await r.until(lambda: is_settled(r))


async def test_a_replica_that_vanishes_settles_the_account() -> None:
    async with rig([FakeEngine(script=never_answer)]) as r:
        asking = asyncio.create_task(r.chat("hi"))
        await r.until(lambda: len(r.engines[0].requests) == 1)
        assert r.replica(0).load.inflight == 1
        await r.engines[0].stop()
        assert (await asking).status_code in (502, 503)
        await r.until(lambda: is_settled(r))
