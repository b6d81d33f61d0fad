"""However a request ends, whatever kind it is: afterwards every gauge is at zero, and its key has all its seats."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from argosy_protocol.fleet import FleetDocument
from argosy_router.config import FlowControlLimits

from .failure_scripts import (
    die_in_the_body,
    die_in_the_stream,
    empty_stream,
    never_answer,
    nonsense,
    only_done,
    refuse,
    reject,
    reset_at_once,
    stall_in_the_stream,
)
from .fake_engine import MODEL, Connection, Received, answer_normally, event
from .harness import Rig, raw, service
from .limited_fleet import MAX_PARALLEL_REQUESTS, limited
from .resumable_stream import ResumableStream

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "a chat": ("chat/completions", CHAT),
    "a stream": ("chat/completions", {**CHAT, "stream": True}),
    "an adapter's": ("chat/completions", {**CHAT, "model": "tiny:sql"}),
    "an adapter's stream": ("chat/completions", {**CHAT, "model": "tiny:sql", "stream": True}),
    "an alias's": ("chat/completions", {**CHAT, "model": "small"}),
    "a batch": ("completions", {"prompt": ["one", "two", "three"], "n": 2, "max_tokens": 5}),
    "a batch's stream": ("completions", {"prompt": ["one", "two"], "stream": True}),
    "a beam search": ("completions", {"prompt": "one", "use_beam_search": True, "best_of": 4}),
    "an embedding": ("embeddings", {"input": ["one", "two"]}),
}


async def cut_long_answer(connection: Connection, _: Received) -> None:
    connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9000000\r\n\r\n")
    connection.send(b"{" + b" " * 2_000_000)
    await connection.writer.drain()
    connection.die()


async def fail(connection: Connection, _: Received) -> None:
    connection.answer(500, b'{"error":{"message":"no"}}')


SCRIPTS: list[Callable[..., Any]] = [
    *(answer_normally, reset_at_once, refuse, reject, nonsense, die_in_the_body, die_in_the_stream),
    *(empty_stream, only_done, fail, cut_long_answer),
]


async def ask(r: Rig, kind: str) -> None:
    path, body = KINDS[kind]
    with contextlib.suppress(httpx.HTTPError):
        await r.http.post(f"/v1/{path}", json={"model": MODEL, **body})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
async def test_after_any_answer(tmp_path: Path, script: Callable[..., Any], kind: str) -> None:
    async with limited(tmp_path, script, script) as r:
        await asyncio.gather(*(ask(r, kind) for _ in range(MAX_PARALLEL_REQUESTS + 2)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("script", [never_answer, stall_in_the_stream], ids=lambda script: script.__name__)
async def test_after_clients_that_left(tmp_path: Path, script: Callable[..., Any], kind: str) -> None:
    """Some of them sent, some in the queue."""
    path, asked = KINDS[kind]
    body = json.dumps({"model": MODEL, **asked}).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-key\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    async with (
        limited(tmp_path, script, script, flow_control=FlowControlLimits()) as r,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(MAX_PARALLEL_REQUESTS):
            _, writer = await stack.enter_async_context(raw(r.router))
            writer.write(head.encode() + body)
        await r.until(lambda: r.router.requests.inflight == MAX_PARALLEL_REQUESTS)
        await r.until(lambda: sum(len(engine.requests) for engine in r.engines) >= 2)


async def test_after_hedges(tmp_path: Path) -> None:
    async def slow(connection: Connection, request: Received) -> None:
        await asyncio.sleep(0.2)
        await answer_normally(connection, request)

    async with limited(tmp_path, never_answer, slow, hedge_after=1.0, policy="round-robin") as r:
        asked = [asyncio.create_task(ask(r, "a stream")) for _ in range(2)]
        await r.until(lambda: r.metric("hedges_total") > 0)
        for engine in r.engines:
            await engine.stop()
        await asyncio.gather(*asked)


async def test_after_migrations(tmp_path: Path) -> None:
    script = ResumableStream(deaths=[400, 500])
    async with limited(tmp_path, script, script) as r:
        await asyncio.gather(*(ask(r, "a stream") for _ in range(3)))
        assert r.metric('migrations_total{model="tiny",outcome="resumed"}') > 0


async def test_after_a_removal_of_the_service(tmp_path: Path) -> None:
    is_removed = asyncio.Event()

    async def begin(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("hel"))
        await connection.writer.drain()
        await is_removed.wait()
        connection.die()

    async with limited(tmp_path, begin, begin) as r:
        asked = [asyncio.create_task(ask(r, kind)) for kind in ("a stream", "an adapter's stream")]
        await r.until(lambda: sum(len(engine.requests) for engine in r.engines) == 2)
        r.discovery.set(FleetDocument())
        is_removed.set()
        await asyncio.gather(*asked)
        await r.until(lambda: r.router.requests.inflight == 0)
        r.discovery.set(FleetDocument(services=(service(r.engines, aliases=("small",)),)))
        await r.until(lambda: all(each.is_routable for each in r.router.fleet.replicas()))
