"""Replicas that fail: retries before the first byte, errors to the client, and interrupted streams."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from argosy_protocol.errors import (
    ApiError,
    BadRequest,
    InternalError,
    TooManyRequests,
    Unavailable,
)
from argosy_protocol.fleet import FleetDocument
from argosy_router.config import UpstreamLimits
from argosy_router.proxy import resilience
from argosy_router.proxy.answer import error_headers
from argosy_router.proxy.relay import MAX_BUFFERED_BYTES

from .fake_engine import NORMAL_STREAM, Connection, FakeEngine, Received, completion, event
from .harness import UnpausedClock, chat, raw, read_all, rig, service
from .raw_requests import request_bytes


async def reset(connection: Connection, _: Received) -> None:
    connection.die()


async def die_in_body(connection: Connection, _: Received) -> None:
    connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
    await connection.writer.drain()
    connection.die()


async def die_before_event(connection: Connection, _: Received) -> None:
    connection.begin_stream()
    connection.chunk(event("half")[:20])
    await connection.writer.drain()
    connection.die()


async def unavailable(connection: Connection, _: Received) -> None:
    connection.answer(
        503, b'{"error":{"message":"busy"}}', "content-type: application/json\r\nretry-after: 7\r\n"
    )


async def unauthorized(connection: Connection, _: Received) -> None:
    connection.answer(401, b'{"error":{"message":"wrong internal key"}}')


async def garbage(connection: Connection, _: Received) -> None:
    connection.send(b"SSH-2.0-OpenSSH\r\n\r\n")


async def endless_header(connection: Connection, _: Received) -> None:
    connection.send(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000 + b"\r\n")


async def silent(connection: Connection, _: Received) -> None:
    await connection.gone()


FAILURES: dict[str, Any] = {
    "reset": reset,
    "death in the body": die_in_body,
    "death before an event": die_before_event,
    "503": unavailable,
    "401": unauthorized,
    "garbage": garbage,
    "endless header": endless_header,
    "silence": silent,
}


def times(name: str) -> dict[str, float]:
    """Short ones where it is they that end a request: others have the time that they need."""
    return {"first_byte_timeout_s": 0.5, "request_timeout_s": 0.5} if name == "silence" else {}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_failure_before_the_first_byte_is_hidden(name: str) -> None:
    engines = [FakeEngine(script=FAILURES[name]), FakeEngine()]
    async with rig(engines, policy="round-robin", **times(name)) as r:
        for stream in (False, True):
            before = len(engines[0].requests)
            for _ in range(2):  # one of two turns meets the failing replica
                response = await r.chat(stream=stream)
                assert response.status_code == 200
                assert response.headers["x-argosy-replica"] == "r1"
                assert response.content == (NORMAL_STREAM if stream else completion())
            assert len(engines[0].requests) == before + 1
            r.replica(0).health.cooldown_until = 0.0  # a busy one would not be asked again so soon
            r.router.fleet.changed()
        assert r.metric("retries_total") == 2
        assert all(replica.load.inflight == 0 for replica in r.router.fleet.replicas())
        assert all(replica.load.inflight_tokens == 0 for replica in r.router.fleet.replicas())


LAST_WORDS = {"reset": 502, "death in the body": 502, "503": 429, "401": 502, "silence": 504}


@pytest.mark.parametrize("name", LAST_WORDS)
async def test_the_last_failure_is_returned(name: str) -> None:
    async with rig([FakeEngine(script=FAILURES[name])], **times(name)) as r:
        response = await r.chat()
        assert response.status_code == LAST_WORDS[name]
        assert "error" in response.json()
        if name == "503":
            assert response.headers["retry-after"] == "7"
        assert "internal key" not in response.text
        assert r.replica(0).load.inflight == 0


async def test_a_service_without_replicas() -> None:
    async with rig([], document=FleetDocument(services=(service([]),))) as r:
        response = await r.chat()
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.headers["x-should-retry"] == "true"


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (InternalError("a bug"), b"x-should-retry: false"),
        (Unavailable("not yet"), b"x-should-retry: true"),
        (TooManyRequests("too much"), b"x-should-retry: true"),
        (BadRequest("nonsense"), None),  # nobody repeats it anyway
    ],
)
def test_error_headers_tell_sdks_whether_to_retry(error: ApiError, advice: bytes | None) -> None:
    lines = error_headers(error).splitlines()
    assert [line for line in lines if b"retry:" in line] == ([advice] if advice else [])


async def test_refused_connections_go_elsewhere_and_eject() -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with rig(engines, policy="round-robin") as r:
        await engines[0].stop()
        for _ in range(4):
            response = await r.chat()
            assert (response.status_code, response.headers["x-argosy-replica"]) == (200, "r1")
        await r.until_state(0, "connecting")
        engines[0].script = engines[1].script
        await engines[0].start()
        await r.until_state(0, "synced")
        names = {(await r.chat()).headers["x-argosy-replica"] for _ in range(2)}
        assert names == {"r0", "r1"}


async def test_each_attempt_goes_to_another_replica() -> None:
    engines = [FakeEngine(script=reset) for _ in range(5)]
    async with rig(engines) as r:
        assert (await r.chat()).status_code == 502
        assert sorted(len(engine.requests) for engine in engines) == [0, 0, 1, 1, 1]


async def test_the_retry_budget_ends_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resilience, "FREE_RETRIES_PER_S", 0.0)
    monkeypatch.setattr(resilience, "MAX_RETRY_CREDIT", 3.0)
    engines = [FakeEngine(script=unavailable) for _ in range(2)]
    async with rig(engines) as r:
        for _ in range(20):
            assert (await r.chat()).status_code == 429
        assert r.metric("retries_total") <= 3 + 20 * 0.2


async def test_stale_connections_are_replaced_without_blame() -> None:
    async with rig([FakeEngine()]) as r:
        engine = r.engines[0]
        assert (await r.chat()).status_code == 200
        answer = engine.script

        async def close_after_use(connection: Connection, request: Received) -> None:
            if engine.requests.count(request) and len(engine.requests) == 2:
                connection.die()  # as if the keep-alive timeout had passed while the request was on its way
            else:
                await answer(connection, request)

        engine.script = close_after_use
        assert (await r.chat()).status_code == 200
        assert len(engine.requests) == 3
        assert r.metric('retries_total{model="tiny",reason="stale"}') == 1
        assert r.metric("upstream_failures_total") == 0


async def test_a_dead_stream_ends_with_an_error_event() -> None:
    async def die_mid_stream(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("hel"))
        connection.chunk(event("lost in the middle")[:30])
        await connection.writer.drain()
        connection.die()

    async with rig([FakeEngine(script=die_mid_stream), FakeEngine(script=die_mid_stream)]) as r:
        response = await r.chat(stream=True)
        first, rest = response.content[: len(event("hel"))], response.content[len(event("hel")) :]
        assert first == event("hel")
        assert rest.startswith(b'data: {"error":')
        assert rest.endswith(b"\n\n")
        assert json.loads(rest[6:])["error"]["type"] == "upstream_error"
        assert b"lost" not in response.content
        assert sum(len(engine.requests) for engine in r.engines) == 1, "a stream that began is not repeated"
        async with openai.AsyncOpenAI(base_url=r.router.url + "/v1", api_key="x", max_retries=0) as client:
            stream = await client.chat.completions.create(**chat(stream=True))
            with pytest.raises(openai.APIError):
                async for _ in stream:
                    pass


async def test_a_stalled_stream_ends_with_an_error_event() -> None:
    async def stall(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("hel"))
        await connection.gone()

    limits = UpstreamLimits(idle_timeout_s=2 * UnpausedClock.LONGEST_STEP_S)
    async with rig([FakeEngine(script=stall)], upstream=limits) as r:
        content = (await r.chat(stream=True)).content
        assert content.startswith(event("hel") + b'data: {"error":')


@pytest.mark.parametrize("framing", ["content-length: 3000000", "transfer-encoding: chunked"])
async def test_a_large_answer_whose_replica_dies_never_looks_whole(framing: str) -> None:
    has_begun = asyncio.Event()

    async def die_midway(connection: Connection, _: Received) -> None:
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n%b\r\n\r\n" % framing.encode())
        part = b"x" * 2_000_000
        connection.chunk(part) if "chunked" in framing else connection.send(part)
        await has_begun.wait()
        connection.die()

    async with rig([FakeEngine(script=die_midway)]) as r, raw(r.router) as (reader, writer):
        writer.write(request_bytes().replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        await reader.readexactly(MAX_BUFFERED_BYTES)
        has_begun.set()
        rest = await read_all(reader)
        assert not rest.endswith(b"0\r\n\r\n"), "the last chunk would say that this was all"
        await r.until(lambda: r.router.requests.inflight == 0)
        assert r.metric("interrupted_streams_total") == 1
