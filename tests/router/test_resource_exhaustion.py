"""Slow clients, many clients, huge bodies, and memory after thousands of requests."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from argosy_router.config import FlowControlLimits, ServerLimits
from argosy_router.proxy.upstream.attempt_log import AttemptLog

from .fake_engine import DONE, Connection, FakeEngine, Received, completion, event
from .harness import DEADLINE_S, raw, read_all, rig, until
from .raw_requests import HEAD, request
from .uploads import body_of, several

STREAMS_BENCH = Path(__file__).parents[2] / "bench/router/streams.py"
STREAMS = 1200


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
        while not paused.is_set():
            connection.chunk(piece)
            try:
                async with asyncio.timeout(1.0):
                    await connection.writer.drain()
            except TimeoutError:
                if all(each.is_behind for each in r.router.server.connections):  # the router reads no more
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
    limits = ServerLimits(header_timeout_s=2.0, body_timeout_s=2.0, keep_alive_s=2.0)
    body = body_of(10)
    beginnings = (b"", HEAD[:10], HEAD, HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body[:5]))
    async with rig([FakeEngine()], server=limits) as r, several(r, number) as streams:
        for position, (_, writer) in enumerate(streams):
            writer.write(beginnings[position % len(beginnings)])
        await until(lambda: len(r.router.server.connections) >= number)
        for _ in range(20):
            assert (await r.chat()).status_code == 200
        answers = Counter([(await read_all(reader))[:13] for reader, _ in streams])
        assert answers == {b"": number // 4, b"HTTP/1.1 408 ": 3 * number // 4}
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
    limits = ServerLimits(header_timeout_s=0.2, body_timeout_s=0.2)
    # A deadline that was ended stays in the timer wheel until its time: make that short.
    soon = FlowControlLimits(keep_alive_s=0.1, keep_alive_after_s=0.1)
    async with rig([engine], server=limits, flow_control=soon) as r:
        r.router.accounting.attempt_log = AttemptLog(100)

        async def serve(requests: int) -> int:
            for number in range(requests // 5):
                await r.chat(f"{number} " + "w" * 600)
                await r.chat("same", stream=True)
                await r.http.post("/v1/chat/completions", content=b"{")
                await r.http.get("/nowhere")
                async with raw(r.router) as (_, writer):
                    writer.write(HEAD + b"content-length: 100\r\n\r\n{")
            await until(lambda: not r.router.requests.inflight and r.router.server.body_memory.held == 0)
            engine.requests.clear()
            gc.collect()
            return len(gc.get_objects())

        await serve(500)  # rings, pools and caches fill
        before = await serve(500)
        served = 1000
        after = await serve(served)
        assert after - before < served // 2, "a connection or an exchange is more than ten objects"


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
