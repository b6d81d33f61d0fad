"""Requests that one API process passes to another, and calls between them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp

from argosy_engine.api.api_process import (
    Call,
    CallChannel,
    Drain,
    GetMetrics,
    Ping,
    ProcessStandsStill,
    Sleep,
    answer_calls,
)
from argosy_engine.api.app import build_app
from argosy_engine.api.http.asgi_layers import MAX_BODY_BYTES, RequestLimits
from argosy_engine.api.observability.request_records import RequestRecords
from argosy_engine.api.request_relay import RelayServer, RequestRelay, is_own, open_stream
from argosy_engine.api.served_engine import Engine
from argosy_engine.errors import EngineDead, UtilityFailed
from argosy_engine.frontend.observer import current_record
from argosy_protocol.headers import RESOLVED

STATEFUL = ("/v1/responses", "/health", "/ping", "/sleep", "/wake_up", "/reset_prefix_cache")


class Pair:
    """A first process's application, and the client of another process, which has nothing loaded."""

    def __init__(self, app: ASGIApp) -> None:
        receiving, sending = socket.socketpair()
        self.server = RelayServer(app)
        self.server.listen(receiving)
        self.sending = sending
        relay = RequestRelay(FastAPI(), cast("Any", SimpleNamespace(llm=None)), sending)
        self.relay = relay
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=relay), base_url="http://engine")

    async def close(self) -> None:
        await self.http.aclose()
        await self.server.close()
        self.sending.close()


async def test_a_relayed_request_arrives_and_is_answered_whole() -> None:
    app = FastAPI()

    @app.post("/echo/{name}")
    async def echo(request: Request, name: str) -> Response:
        body = await request.body()
        lines = {"x-name": name, "x-query": request.url.query, "x-key": request.headers["x-key"]}
        return Response(body[::-1], 201, lines)

    pair = Pair(app)
    body = bytes(range(256)) * 20_000
    answers = await asyncio.gather(
        *(pair.http.post(f"/echo/{n}?a={n}", content=body, headers={"x-key": "k"}) for n in range(4))
    )
    for number, answer in enumerate(answers):
        assert (answer.status_code, answer.content) == (201, body[::-1])
        lines = [answer.headers[name] for name in ("x-name", "x-query", "x-key")]
        assert lines == [str(number), f"a={number}", "k"]
    await pair.close()


async def test_a_client_that_leaves_ends_its_stream_in_the_first_process() -> None:
    app, ended = FastAPI(), asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            ended.set()

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(parts())

    pair, leave, sent = Pair(app), asyncio.Event(), asyncio.Queue[dict[str, Any]]()
    messages = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> Any:
        message = next(messages, None)
        if message is None:
            await leave.wait()
            return {"type": "http.disconnect"}
        return message

    async def send(message: Any) -> None:
        sent.put_nowait(message)

    scope = {
        "type": "http", "method": "GET", "path": "/stream", "query_string": b"", "headers": [], "scheme": "http",
        "http_version": "1.1", "client": None,
    }  # fmt: skip
    running = asyncio.create_task(pair.relay(scope, receive, send))
    assert (await sent.get())["status"] == 200
    assert (await sent.get())["body"] == b"first"
    assert not ended.is_set()
    leave.set()
    await running
    await asyncio.wait_for(ended.wait(), 60)
    await pair.close()


async def test_only_the_process_that_answers_a_request_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    app, trace = FastAPI(), {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}

    @app.get("/x")
    async def answer() -> dict[str, str]:
        record = current_record.get()
        assert record is not None
        record.model = "tiny"
        return record.trace_headers

    pair = Pair(RequestRecords(app, is_logged=True))
    transport = httpx.ASGITransport(app=RequestRecords(pair.relay, is_logged=True))
    with caplog.at_level(logging.INFO, "argosy.access"):
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
            assert (await http.get("/x", headers=trace)).json() == trace
            await pair.server.close()
            assert (await http.get("/gone")).status_code == 503
    lines = [record.getMessage() for record in caplog.records if record.name == "argosy.access"]
    answered, unanswered = sorted(lines, key=lambda line: "/gone" in line)
    assert "path=/x status=200 model=tiny " in answered
    assert "path=/gone status=503 " in unanswered
    await pair.close()


async def test_a_first_process_that_is_gone_is_a_503() -> None:
    pair = Pair(FastAPI())
    await pair.server.close()
    answer = await pair.http.get("/ready")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "this engine is shutting down"
    await pair.close()


async def test_a_chunked_body_that_is_too_large_is_a_413() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY_BYTES // len(chunk) + 1):
            yield chunk

    chunk = bytes(1 << 20)
    pair = Pair(FastAPI())
    transport = httpx.ASGITransport(app=RequestLimits(pair.relay))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        answer = await http.post(
            "/v1/responses", content=chunks(), headers={"content-type": "application/json"}
        )
    assert answer.status_code == 413
    assert "exceeds" in answer.json()["error"]["message"]
    await pair.close()


def test_each_route_is_stateful_or_answered_by_every_process() -> None:
    routes = [cast("Any", route) for route in build_app(Engine(("tiny",))).routes]
    posts = {route.path for route in routes if "POST" in route.methods}
    own = {path for path in posts if is_own({"path": path, "headers": []})}
    others = posts - own
    assert "/v1/chat/completions" in own
    assert "/v1/messages" in own
    assert all(path.startswith(STATEFUL) for path in others), others
    assert not any(path.startswith(STATEFUL) for path in own)


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("/v1/responses", [], False),
        ("/v1/responses", [(RESOLVED.lower().encode(), b"1")], True),
        ("/v1/responses/resp_1", [(RESOLVED.lower().encode(), b"1")], False),
        ("/v1/models/org/name", [], True),
        ("/metrics", [], False),
        ("/internal/telemetry", [], False),
    ],
)
def test_which_requests_a_process_answers_itself(path: str, headers: list[Any], expected: bool) -> None:
    assert is_own({"path": path, "headers": headers}) is expected


async def test_calls_overlap_and_fail_by_name() -> None:
    ours, theirs = socket.socketpair()
    channel = CallChannel("ApiServer_1", await open_stream(ours))
    drained = asyncio.Event()

    async def handle(call: Call) -> list[float]:
        match call:
            case Drain():
                await drained.wait()
            case Sleep():
                raise ValueError("no such level")
            case GetMetrics():
                return [1.5, 2.0]
        return []

    answering = asyncio.create_task(answer_calls(await open_stream(theirs), handle))
    reading = asyncio.create_task(channel.read())
    draining = asyncio.create_task(channel.call(Drain()))
    assert await channel.call(GetMetrics()) == [1.5, 2.0]
    with pytest.raises(UtilityFailed, match="ApiServer_1: no such level"):
        await channel.call(Sleep(9, "wait"))
    assert not draining.done()
    drained.set()
    assert await draining == []
    lost = asyncio.create_task(channel.call(Drain()))
    drained.clear()
    await asyncio.sleep(0)
    channel.close()
    await asyncio.gather(answering, reading)
    with pytest.raises(EngineDead, match="ApiServer_1 has ended"):
        await lost
    with pytest.raises(EngineDead):
        await channel.call(GetMetrics())


async def test_a_call_may_take_long_while_the_process_answers_pings() -> None:
    ours, theirs = socket.socketpair()
    channel, num_pings = CallChannel("ApiServer_1", await open_stream(ours)), 0
    is_done = asyncio.Event()

    async def handle(call: Call) -> list[float]:
        nonlocal num_pings
        if isinstance(call, Ping):
            num_pings += 1
            if num_pings == 3:
                is_done.set()
            return []
        await is_done.wait()
        return [1.0]

    answering = asyncio.create_task(answer_calls(await open_stream(theirs), handle))
    reading = asyncio.create_task(channel.read())
    assert await channel.call_unless_still(Sleep(1, "wait"), interval_s=0.001, timeout_s=60) == [1.0]
    assert num_pings >= 3
    channel.close()
    await asyncio.gather(answering, reading)
    with pytest.raises(EngineDead, match="ApiServer_1 has ended"):
        await channel.call_unless_still(Sleep(1, "wait"))


async def test_a_call_of_a_process_that_stands_still_fails_by_name() -> None:
    ours, theirs = socket.socketpair()
    channel = CallChannel("ApiServer_1", await open_stream(ours))
    reading = asyncio.create_task(channel.read())
    with pytest.raises(ProcessStandsStill, match=r"ApiServer_1 has not answered for 0\.01 s"):
        await channel.call_unless_still(Sleep(1, "abort"), interval_s=0.001, timeout_s=0.01)
    theirs.close()
    await reading
    channel.close()
