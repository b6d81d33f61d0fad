"""However a request ends, whatever kind it is: afterwards every gauge is at zero, and its key has all its seats."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from argosy_protocol.fleet import FleetDocument, ServiceLimits, encode_fleet
from argosy_router.config import FlowControlLimits
from argosy_router.discovery.source import snapshot_of
from argosy_router.fleet.replica import Member

from .fake_engine import MODEL, Connection, FakeEngine, Received, answer_normally, event
from .harness import Rig, raw, rig, service
from .resumable_stream import ResumableStream
from .test_charges import (
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

SEATS = 4
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


@contextlib.asynccontextmanager
async def limited(tmp_path: Path, *scripts: Callable[..., Any], **config: Any) -> AsyncIterator[Rig]:
    """Two replicas, of which only r1 has the adapter and the alias, a key with few seats, a short queue."""
    keys = tmp_path / "keys"
    terms = f"max_parallel_requests={SEATS} tokens_per_minute=1000000000"
    keys.write_text(f"sk-key name=key {terms}\n")
    engines = [FakeEngine(script=script) for script in scripts]
    fields = {"limits": ServiceLimits(max_inflight_per_replica=2)}
    queue = FlowControlLimits(queue_timeout_s=0.5)
    async with rig(engines, api_keys_file=keys, fields=fields, **{"flow_control": queue, **config}) as r:
        spec = service(engines, adapters=("sql",), aliases=("small",), **fields)
        document = FleetDocument(services=(spec,))
        members = tuple(
            Member(f"r{n}", "", engine.url, adapters=("sql",) * n, aliases=("small",) * n)
            for n, engine in enumerate(engines)
        )
        snapshot = snapshot_of(document, encode_fleet(document))
        r.router.fleet.apply(replace(snapshot, members={spec.qualified_name: members}))
        r.http.headers["authorization"] = "Bearer sk-key"
        yield r
        await at_rest(r)


def gauges(r: Rig) -> dict[str, float]:
    figures = {
        name: r.metric(f'{name}{{model="{MODEL}"}}') for name in ("admitted_requests", "queued_requests")
    }
    figures["inflight_body_bytes"] = r.metric("inflight_body_bytes")
    figures["requests"] = r.router.requests.inflight
    for replica in r.router.fleet.replicas():
        load = replica.load
        figures |= {
            f"{replica.name} {name}": getattr(load, name)
            for name in (
                "inflight",
                "inflight_sequences",
                "inflight_tokens",
                "queued_tokens",
                "requests",
                "wait_s",
            )
        }
        figures[f"{replica.name} attempts"] = len(replica.inflight_attempts)
    return figures


async def at_rest(r: Rig) -> None:
    try:
        await r.until(lambda: not any(gauges(r).values()))
    except TimeoutError:
        assert not {name: value for name, value in gauges(r).items() if value}
    for engine in r.engines:
        engine.script = answer_normally
    # As many as the key has seats at once: one that had been kept would be refused.
    answers = await asyncio.gather(
        *(r.http.post("/tokenize", json={"model": MODEL, "prompt": "x"}) for _ in range(SEATS))
    )
    assert "rate_limit_exceeded" not in "".join(answer.text for answer in answers)


async def ask(r: Rig, kind: str) -> None:
    path, body = KINDS[kind]
    with contextlib.suppress(httpx.HTTPError):
        await r.http.post(f"/v1/{path}", json={"model": MODEL, **body})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
async def test_after_any_answer(tmp_path: Path, script: Callable[..., Any], kind: str) -> None:
    async with limited(tmp_path, script, script) as r:
        await asyncio.gather(*(ask(r, kind) for _ in range(SEATS + 2)))


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
        for _ in range(SEATS):
            _, writer = await stack.enter_async_context(raw(r.router))
            writer.write(head.encode() + body)
        await r.until(lambda: r.router.requests.inflight == SEATS)
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
    async def begin(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("hel"))
        await connection.writer.drain()
        await asyncio.sleep(0.1)
        connection.die()

    async with limited(tmp_path, begin, begin) as r:
        asked = [asyncio.create_task(ask(r, kind)) for kind in ("a stream", "an adapter's stream")]
        await r.until(lambda: sum(len(engine.requests) for engine in r.engines) == 2)
        r.discovery.set(FleetDocument())
        await asyncio.gather(*asked)
        await r.until(lambda: r.router.requests.inflight == 0)
        r.discovery.set(FleetDocument(services=(service(r.engines, aliases=("small",)),)))
        await r.until(lambda: all(each.is_routable for each in r.router.fleet.replicas()))
