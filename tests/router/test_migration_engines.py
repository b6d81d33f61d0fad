"""A real engine ends under open streams, killed or told to, or stops: each client gets what an undisturbed run says."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from image_processors import make_model, picture, user
from processes import Server, descendants, free_port, running

from .engine_processes import STREAMS, Stream, calls, document, fold, undisturbed
from .harness import rig

pytestmark = pytest.mark.timeout(300)  # for processes that start beside other work

FEW = 20


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_fifty_streams_survive(engines: list[Server], number: signal.Signals) -> None:
    process = engines[0].process
    try:
        expected, survived = await disturb(engines, number)
        await asyncio.to_thread(process.wait, 60)
    finally:
        process.kill()
        process.wait()
    for (kind, _, body), before, told in zip(calls(), expected, survived, strict=True):
        assert told == before, (kind, body)
    finishes: dict[str, set[str]] = defaultdict(set)
    for (kind, *_), told in zip(calls(), survived, strict=True):
        finishes[kind].update(*told["finish_reason"].values())
    assert finishes["a tool call"] == {"tool_calls"}
    assert "stop" in finishes["JSON schema"]
    assert "stop" in finishes["stop strings"]


async def disturb(
    engines: list[Server], number: signal.Signals
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what the streams say without and with the end of the first engine."""
    async with rig(document=document(engines, 0), wait=False) as r:
        await r.until(lambda: all(replica.is_synced for replica in r.router.fleet.replicas()))
        expected = await undisturbed(r, STREAMS)
        streams = [Stream(r, stream) for stream in range(STREAMS)]
        pid, load = engines[0].process.pid, r.replica(0).load
        os.kill(
            pid, signal.SIGSTOP
        )  # until all have asked: so all begin together, and none is over when it dies
        reading = asyncio.gather(*(stream.read() for stream in streams))
        await r.until(lambda: load.inflight == STREAMS)
        os.kill(pid, signal.SIGCONT)
        begun = asyncio.gather(*(stream.has_begun.wait() for stream in streams))
        await asyncio.wait({begun, reading}, return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            begun.cancel()
            await asyncio.gather(begun, return_exceptions=True)
            await reading  # a stream that was refused never begins: say why, instead of waiting for it
        r.discovery.set(document(engines, 1))
        os.kill(pid, number)
        survived = await reading
        moved = r.metric('migrations_total{model="tiny",outcome="resumed"}')
        assert moved >= STREAMS // 2, "the others had said all before the engine died"
        assert r.metric("interrupted_streams_total") == 0
    return expected, survived


@pytest.fixture
def seeing_engines(tmp_path: Path) -> Iterator[tuple[list[Server], int]]:
    """Two engines that see pictures, and the token that stands for a part of one."""
    folder = tmp_path / "model"
    token = make_model(folder)
    with ExitStack() as stack, ThreadPoolExecutor() as starters:

        def start(number: int) -> Server:
            port = free_port()
            command = [
                "argosy_engine.api.serve",
                str(folder),
                "--served-model-name",
                "tiny",
                "--port",
                str(port),
            ]
            command += ["--device", "cpu", "--threads", "1", "--dtype", "float32", "--max-model-len", "2048"]
            command += ["--num-gpu-blocks-override", "200"]
            return stack.enter_context(running(command, tmp_path / f"log{number}", port=port))

        yield list(starters.map(start, range(2))), token


async def test_a_stream_about_a_picture_survives(seeing_engines: tuple[list[Server], int]) -> None:
    """The engine that goes on has never seen the picture, which the router has kept."""
    engines, placeholder = seeing_engines
    body = {
        "model": "tiny", "messages": [user("What is this?", picture(90, 60, 1))], "stream": True,
        "temperature": 0, "max_tokens": 900, "ignore_eos": True, "logit_bias": {str(placeholder): -100},
    }  # fmt: skip
    process = engines[0].process
    async with rig(document=document(engines, 0), wait=False) as r:
        await r.until(lambda: all(replica.is_synced for replica in r.router.fleet.replicas()))
        expected = fold((await r.http.post("/v1/chat/completions", json=body)).content)
        async with r.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            read, lines = b"", answer.aiter_bytes()
            while read.count(b"data: ") < 5:
                read += await anext(lines)
            r.discovery.set(document(engines, 1))
            process.kill()
            read += b"".join([each async for each in lines])
        assert r.metric('migrations_total{model="tiny",outcome="resumed"}') == 1
        assert r.metric("interrupted_streams_total") == 0
    assert fold(read) == expected
    assert expected["finish_reason"] == {0: ["length"]}
    await asyncio.to_thread(process.wait, 60)


async def test_streams_leave_a_stopped_core(engines: list[Server]) -> None:
    """The core of an engine stops under some streams and before others."""
    async with rig(document=document(engines, 0), wait=False) as r:
        await r.until(lambda: all(replica.is_synced for replica in r.router.fleet.replicas()))
        expected = await undisturbed(r, FEW)
        streams = [Stream(r, stream) for stream in range(FEW)]
        cores = descendants(engines[0].process.pid)
        assert cores
        begun = [asyncio.create_task(stream.read()) for stream in streams[: FEW // 2]]
        await asyncio.wait([asyncio.create_task(s.has_begun.wait()) for s in streams[: FEW // 2]])
        for pid in cores:
            os.kill(pid, signal.SIGSTOP)
        load = r.replica(0).load
        try:
            waiting = [asyncio.create_task(stream.read()) for stream in streams[FEW // 2 :]]
            await r.until(lambda: load.inflight == len(waiting) + sum(not task.done() for task in begun))
            r.discovery.set(document(engines, 1))
            async with asyncio.timeout(200):
                survived = await asyncio.gather(*begun, *waiting)
        finally:
            for pid in cores:
                os.kill(pid, signal.SIGCONT)
        assert survived == expected
        assert r.metric('retries_total{model="tiny",reason="stalled"}') >= FEW // 2
        assert r.metric("interrupted_streams_total") == 0
        assert not r.replica(0).health.is_ejected
        await r.until(lambda: load.inflight == 0)
