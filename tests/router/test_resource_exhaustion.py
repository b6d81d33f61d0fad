"""Slow clients, many clients, huge bodies, and memory after thousands of requests."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from argosy_router.config import ServerLimits
from argosy_router.http.messages import Phase
from argosy_router.proxy.accounting import AttemptLog, RefusalLog

from .fake_engine import DONE, Connection, FakeEngine, Received, completion, event
from .harness import DEADLINE_S, StoppedClock, raw, read_all, rig, until
from .raw_requests import HEAD, request
from .uploads import body_of, several

STREAMS_BENCH = Path(__file__).parents[2] / "bench/router/streams.py"
STREAMS = 1200
ROUNDS = 100
LONGEST_DEADLINE_S = 600.0
"""The request timeout."""


async def test_content_encodings_are_refused_whatever_they_hide() -> None:
    async with rig([FakeEngine()]) as r:
        for encoding in ("gzip", "identity", "br, gzip", ""):
            headers = {"content-type": "application/json", "content-encoding": encoding}
            response = await r.http.post("/v1/chat/completions", content=b"\x1f\x8b" * 100, headers=headers)
            assert response.status_code == 415
        assert not r.engines[0].requests


async def test_ten_million_elements_cost_their_sender_an_answer() -> None:
    async with rig([FakeEngine()]) as r:
        body = b'{"model":"tiny","prompt":[' + b"7," * 10_000_000 + b"7]}"
        response = await r.http.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        assert response.status_code == 413
        assert "values" in response.json()["error"]["message"]
        assert not r.engines[0].requests


async def test_a_slow_reader_uses_its_write_buffer_only() -> None:
    limits = ServerLimits(write_buffer_bytes=64 * 1024)
    piece, paused = event("x" * 16_384), asyncio.Event()

    async def pour(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        while not all(each.is_behind for each in r.router.server.connections):
            connection.chunk(piece)
            await asyncio.sleep(0)
        for _ in range(256):  # which the router leaves where it is
            connection.chunk(piece)
            await asyncio.sleep(0)
        paused.set()
        await connection.gone()

    async with rig([FakeEngine(script=pour)], server=limits) as r, raw(r.router) as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(request(body_of(10, stream=True)))
        await asyncio.wait_for(paused.wait(), DEADLINE_S)
        (connection,) = r.router.server.connections
        assert connection.is_behind
        # What uvloop hands over in one read may come on top.
        assert connection.transport.get_write_buffer_size() < limits.write_buffer_bytes + 512 * 1024


async def test_many_slow_clients_affect_no_other_and_are_cut() -> None:
    number = 60
    limits = ServerLimits()
    body = body_of(10)
    beginnings = (b"", HEAD[:10], HEAD, HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body[:5]))
    quarter = number // len(beginnings)
    phases = {Phase.IDLE: quarter, Phase.HEAD: 2 * quarter, Phase.BODY: quarter}
    async with rig([FakeEngine()], clock=StoppedClock()) as r, several(r, number) as streams:
        for position, (_, writer) in enumerate(streams):
            writer.write(beginnings[position % len(beginnings)])
        await until(lambda: Counter(each.reader.phase for each in r.router.server.connections) == phases)
        for _ in range(20):
            assert (await r.chat()).status_code == 200
        assert len(r.router.server.connections) > number, "none is cut before its time"
        await r.pass_time(max(limits.header_timeout_s, limits.body_timeout_s))
        answers = Counter([(await read_all(reader))[:13] for reader, _ in streams])
        assert answers == {b"": quarter, b"HTTP/1.1 408 ": 3 * quarter}
        await r.pass_time(limits.linger_s)
        await until(lambda: r.router.server.body_memory.held == 0)


async def play(connection: Connection, received: Received) -> None:
    if not json.loads(received.body).get("stream"):
        connection.answer(200, completion())
        return
    connection.begin_stream()
    connection.chunk(event("a"))
    connection.chunk(DONE)
    connection.end_stream()


async def test_memory_does_not_grow_with_requests_served() -> None:
    """Counts the collector's objects, which all that a request needs is made of, or is referred to by."""
    engine = FakeEngine(script=play)
    async with rig([engine], clock=StoppedClock()) as r:
        r.router.accounting.attempt_log = AttemptLog(100)
        r.router.accounting.refusal_log = RefusalLog(100)

        async def serve() -> int:
            for number in range(ROUNDS):  # the same each time: of other prompts the prefix index would learn
                await r.chat(f"{number} " + "w" * 600)
                await r.chat("same", stream=True)
                await r.http.post("/v1/chat/completions", content=b"{")
                await r.http.get("/nowhere")
                async with raw(r.router) as (_, writer):
                    writer.write(HEAD + b"content-length: 100\r\n\r\n{")
            await until(lambda: not r.router.requests.inflight and r.router.server.body_memory.held == 0)
            engine.requests.clear()
            await r.pass_time(
                LONGEST_DEADLINE_S
            )  # one that was ended stays in the timer wheel until its time
            gc.collect()
            return len(gc.get_objects())

        for _ in range(2):  # rings, pools and caches fill
            before = await serve()
        for _ in range(2):
            after = await serve()
        assert after - before < ROUNDS, "an object is left of each request of one kind"


def test_a_thousand_streams_at_once_are_whole() -> None:
    """5,000 of them are the benchmark's; it exits with 1 if one of them failed."""
    options = ["--streams", str(STREAMS), "--events", "3", "--interval", "0.5", "--open-rate", "2000"]
    done = subprocess.run(
        [sys.executable, str(STREAMS_BENCH), *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert report["outcomes"] == {"ok": STREAMS}
    assert report["events"] == 3 * STREAMS
