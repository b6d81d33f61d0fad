"""The router's metrics and access log."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from argosy_batch.config import BatchConfig
from argosy_protocol.fleet import FleetDocument
from argosy_router import metrics
from argosy_router.metrics import DEFINITIONS
from argosy_router.observability.lines import LineHandler, LineWriter
from argosy_router.observability.request_log import AccessEntry, AccessLog

from .fake_engine import DONE, Connection, FakeEngine, Received, completion, event
from .harness import DEADLINE_S, chat, rig, service

DESCRIBED = (
    *("requests_total", "ttft_seconds", "itl_seconds", "ttft_error_seconds", "predicted_cached_tokens_total"),
    *("actual_cached_tokens_total", "index_chunks", "replica_state", "telemetry_age_seconds"),
    *("telemetry_syncs_total", "queued_tokens", "decision_seconds"),
)
"""What research into other routers found missing in one or another of them."""


async def answer(connection: Connection, request: Received) -> None:
    if request.json.get("stream"):
        usage = {**json.loads(completion(prompt_tokens=120, cached=96))["usage"], "completion_tokens": 3}
        connection.begin_stream()
        connection.chunk(event("a"))
        connection.chunk(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        connection.chunk(DONE)
        connection.end_stream()
    else:
        connection.answer(200, completion(prompt_tokens=120, cached=96))


async def test_a_scrape_holds_every_described_series() -> None:
    async with rig([FakeEngine(script=answer)]) as r:
        await r.chat("word " * 100, stream=True, stream_options={"include_usage": True})
        await r.chat("word " * 100)
        text = r.router.metrics.render().decode()
        for name in DESCRIBED:
            assert re.search(rf"^argosy_router_{name}(_count)?[ {{]", text, re.MULTILINE), name
        assert r.metric('itl_seconds_count{model="tiny"}') == 1
        assert r.metric('routes_total{mode="synced",model="tiny",reason="only",replica="r0"}') == 2
        assert r.metric('telemetry_syncs_total{model="tiny",replica="r0"}') == 1
        assert r.metric('completion_tokens_total{model="tiny",replica="r0"}') == 4
        assert "process_cpu_seconds_total" in text
        names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
        assert len(names) == len(set(names))


async def test_a_router_exports_exactly_the_defined_metrics(tmp_path: Path) -> None:
    async with rig([FakeEngine()], storage=BatchConfig(storage=str(tmp_path))) as r:
        exported = [(each.name, tuple(each.labels), each.help) for each in r.router.metrics.series]
    assert sorted(exported) == sorted((each.name, each.labels, each.help) for each in DEFINITIONS)


async def test_services_that_share_a_model_name_share_a_sample() -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with rig(engines) as r:
        first = service(engines[:1])
        second = service(engines[1:], namespace="other", uid="uid-2")
        r.discovery.set(FleetDocument(services=(first, second)))
        await r.until(lambda: len(list(r.router.fleet.replicas())) == 2)
        samples = [line.partition(" ")[0] for line in r.router.metrics.render().decode().splitlines()]
        assert len([s for s in samples if s.startswith("argosy_router_index_chunks{")]) == 1


async def test_series_of_replicas_that_left_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with rig(engines, policy="round-robin") as r:
        for _ in range(4):
            await r.chat()
        r.discovery.set(FleetDocument(services=(service(engines[:1]),)))
        gone = 'routes_total{mode="synced",model="tiny",reason="load",replica="r1"}'
        assert r.metric(gone) == 2, "a last scrape still sees it"
        assert r.metric("requests_total") == 4
        monkeypatch.setattr(metrics, "DEPARTED_S", 0.0)
        assert r.metric(gone) == 0
        assert r.metric(gone.replace("r1", "r0")) == 2
        assert r.metric("requests_total") == 4, "the model is still served"


# the access log


@pytest.mark.parametrize("line_format", ["text", "json"])
async def test_every_request_has_one_line(line_format: str) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as lines:
        written_by = LineWriter(writer)
        log: dict[str, Any] = {"access_log": True, "access_log_format": line_format, "stderr": written_by}
        async with rig([FakeEngine(script=answer)], **log) as r:
            await r.http.post(
                "/v1/chat/completions",
                json=chat(stream=True, stream_options={"include_usage": True}),
                headers={"x-request-id": "one"},
            )
            await r.http.post("/v1/chat/completions", content=b"{", headers={"x-request-id": "two"})
        written_by.close(DEADLINE_S)
        os.close(writer)
        written = lines.read().splitlines()
    assert len(written) == 2
    if line_format == "json":
        one, two = (json.loads(line) for line in written)
    else:
        one, two = (dict(field.split("=", 1) for field in line.split(" ")) for line in written)
    assert (one["request"], str(one["status"]), one["model"], one["replica"]) == ("one", "200", "tiny", "r0")
    assert [
        str(one[name]) for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "attempts")
    ] == [*("120", "96", "3", "1")]
    assert float(one["ttft_ms"]) <= float(one["duration_ms"])
    assert (two["request"], str(two["status"])) == ("two", "415")


def test_unread_log_lines_are_dropped_without_blocking() -> None:
    reader, writer = os.pipe()
    written_by = LineWriter(writer, max_waiting_bytes=200_000)
    log = AccessLog(written_by)

    async def write() -> None:
        for number in range(10_000):
            log.write(AccessEntry(0.0, f"id-{number}", 200, model="a\nb"))
            if number % 10 == 9:
                log.flush()

    thread = threading.Thread(target=asyncio.run, args=(write(),), daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "a full pipe stops whoever writes to it, which must not be the loop"
    assert 0 < log.dropped < 10_000
    with os.fdopen(reader) as lines:
        received: list[str] = []
        drain = threading.Thread(target=lambda: received.extend(lines), daemon=True)
        drain.start()
        written_by.close(DEADLINE_S)
        os.close(writer)
        drain.join(DEADLINE_S)
    assert len(received) == 10_000 - log.dropped
    assert all(
        line.startswith("time=") and 'model="a\\nb"' in line and line.endswith("\n") for line in received
    )


def test_a_log_record_is_a_line_of_the_same_writer() -> None:
    reader, writer = os.pipe()
    written_by = LineWriter(writer)
    handler = LineHandler(written_by)
    handler.emit(logging.LogRecord("a", logging.INFO, "", 0, "broken %s", ("\ud800",), None))
    written_by.close(DEADLINE_S)
    os.close(writer)
    with os.fdopen(reader) as lines:
        assert lines.read() == "broken \\ud800\n"
