"""How the engine's processes end: killed, stopped or drained, without leaving processes or files behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from argosy_engine.api.app import build_app
from argosy_engine.api.serve import drain
from argosy_engine.api.served_engine import Engine
from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.tokenizer import INLINE_CHARS
from processes import (
    Server,
    answers,
    children,
    cpu_share,
    free_port,
    has_grammar_server,
    held_files,
    is_alive,
    running,
    wait_until,
    workers,
)
from served_engine import AUTHORIZED, FOREVER, SECRET, SERVE_TINY
from stub_engine import StubEngine

pytestmark = pytest.mark.timeout(300)


def fails(url: str) -> bool:
    return httpx.get(url).status_code == 503


def wait_until_idle(server: Server, processes: list[int], cores: list[int]) -> None:
    """Ask for something and wait until nothing uses the processor, as what spins does for ever."""
    wait_until(lambda: all(map(has_grammar_server, cores)), "the grammar process, started while idle")
    body = {"prompt": "Once", "max_tokens": 8}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=AUTHORIZED, timeout=60)
    assert answer.status_code == 200
    wait_until(lambda: cpu_share(processes, 0.5) < 0.2, "idle processes")


def test_an_idle_engine_does_not_spin(tiny_server: Server) -> None:
    cores = children(tiny_server.process.pid)
    assert len(cores) == 1
    assert workers(cores[0]) == []
    wait_until_idle(tiny_server, [tiny_server.process.pid, *cores], cores)


def test_a_stuck_core_turns_health_red_and_a_killed_worker_ends_everything(
    bare_workers: None, tmp_path: Path
) -> None:
    port, log = free_port(), tmp_path / "log"
    arguments = [*SERVE_TINY, "--port", str(port), "--distributed-executor-backend", "mp"]
    arguments += ["--engine-iteration-timeout", "1.5"]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with running(arguments, log, port=port, env={"TMPDIR": str(temporary)}) as server:
        (core,) = children(server.process.pid)
        (worker,) = workers(core)
        assert list(temporary.iterdir()) == []  # a running engine has no files
        wait_until(lambda: answers(server.url + "/health"), "/health to be green")
        os.kill(core, signal.SIGSTOP)
        wait_until(lambda: fails(server.url + "/health"), "/health to turn red")
        assert fails(server.url + "/ready")
        os.kill(core, signal.SIGCONT)
        wait_until(lambda: answers(server.url + "/health"), "/health to recover")

        with httpx.stream("POST", f"{server.url}/v1/completions", json=FOREVER, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            held = set().union(*map(held_files, (server.process.pid, core, worker)))
            assert not {path for path in held if path.startswith("/dev/shm/")}  # nor named shared memory
            os.kill(worker, signal.SIGKILL)
            killed = time.monotonic()
            events = [line for line in lines if line.startswith("data: ")]
            seconds = time.monotonic() - killed
        assert json.loads(events[-2][6:])["error"]["type"] == "service_unavailable"
        assert server.process.wait(60) == 1
        assert seconds < 30  # a hang, not a slow machine
        wait_until(lambda: not is_alive(core), "the core to end")
    assert list(temporary.iterdir()) == []
    text = log.read_text()
    assert f"Worker (process {worker}) ended: killed by SIGKILL, maybe for lack of memory" in text
    assert "state of the engine core at its end" in text
    assert "scheduler: running=1 waiting=0" in text
    assert "last step: tokens=" in text
    assert not any(word in text for word in SECRET.split())


def test_an_idle_worker_does_not_spin_and_nothing_outlives_a_killed_server_not_even_a_stopped_core(
    bare_workers: None,
    tmp_path: Path,
) -> None:
    port, log = free_port(), tmp_path / "log"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    arguments = [*SERVE_TINY, "--port", str(port), "--distributed-executor-backend", "mp"]
    with running(arguments, log, port=port, env={"TMPDIR": str(temporary)}) as server:
        (core,) = children(server.process.pid)
        (worker,) = workers(core)
        wait_until_idle(server, [server.process.pid, core, worker], [core])
        os.kill(core, signal.SIGSTOP)
        server.stop(signal.SIGKILL)
        wait_until(lambda: not is_alive(core) and not is_alive(worker), "core and worker to end")
        assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("victim", ["server", "core"])
def test_a_kill_while_starting_leaves_no_files(tmp_path: Path, victim: str) -> None:
    command = [sys.executable, "-m", *SERVE_TINY, "--port", str(free_port())]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        wait_until(lambda: bool(list(tmp_path.glob("argosy-*"))), "the sockets to be bound")
        wait_until(lambda: bool(children(process.pid)), "the core to be started")
        (core,) = children(process.pid)
        os.kill(process.pid if victim == "server" else core, signal.SIGKILL)
        assert process.wait(60) == (-signal.SIGKILL if victim == "server" else 1)
        wait_until(lambda: not is_alive(core), "the core to end")
        wait_until(lambda: not list(tmp_path.glob("argosy-*")), "the sockets to be removed")
    finally:
        process.kill()
        process.wait()


class FakeLLM:
    """Has one request, which finishes when `finished` is set."""

    num_live = 1

    def __init__(self) -> None:
        self.finished = asyncio.Event()
        self.is_dead = False
        self.heartbeat_age_s = 0.0

    async def drain(self) -> None:
        await self.finished.wait()


@pytest.mark.parametrize(
    ("timeout_s", "signals", "finishes", "message"),
    [
        (60.0, 1, True, None),
        (0.0, 1, False, "drain timed out after 0 s; 1 requests aborted"),
        (60.0, 2, False, "told twice to stop; 1 requests aborted"),
    ],
)
async def test_a_drain_ends_with_the_last_request_the_timeout_or_a_second_signal(
    caplog: pytest.LogCaptureFixture, timeout_s: float, signals: int, finishes: bool, message: str | None
) -> None:
    caplog.set_level("INFO", "argosy.api")
    engine, llm, hurry = Engine(("m",)), FakeLLM(), asyncio.Event()
    engine.llm = llm  # type: ignore[assignment]
    draining = asyncio.create_task(drain(engine, timeout_s, hurry))
    await asyncio.sleep(0)
    if timeout_s:
        while not engine.is_draining:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert not draining.done()
        assert not engine.is_ready
        assert engine.is_healthy
    if finishes:
        llm.finished.set()
    if signals == 2:
        hurry.set()
    await asyncio.wait_for(draining, 30)
    waits = "stopping: waiting up to 60 s for 1 requests; another signal (Ctrl-C) aborts them"
    assert caplog.messages == [line for line in (waits if timeout_s else None, message) if line]


class SlowRenderer:
    """Renders a prompt, wrong as it is, once it is released."""

    def __init__(self) -> None:
        self.started, self.released = threading.Event(), threading.Event()
        self.tokenizer = SimpleNamespace(special_tokens_of_text=[])

    def truncation_of(self, request: object) -> None:
        return None

    def render_completion(self, request: object) -> None:
        self.started.set()
        self.released.wait()
        raise InvalidRequest("as asked")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": "x" * INLINE_CHARS}),
        ("completions", {"prompt": "x" * INLINE_CHARS, "stream": True}),
        ("embeddings", {"input": "x" * INLINE_CHARS}),
    ],
)
async def test_a_drain_waits_for_requests_whose_prompts_are_still_rendered(
    path: str, fields: dict[str, Any]
) -> None:
    llm, renderer = FakeLLM(), SlowRenderer()
    llm.finished.set()
    config = SimpleNamespace(pooling=None)
    own = {
        "config": config,
        "renderer": renderer,
        "num_live": 0,
        "queue_limits": SimpleNamespace(check=lambda *_: None),
    }
    vars(llm).update(own)
    engine = StubEngine(llm)
    transport = httpx.ASGITransport(app=build_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        sent = asyncio.create_task(http.post(f"/v1/{path}", json={"model": "tiny", **fields}))
        try:
            await asyncio.to_thread(renderer.started.wait)
            draining = asyncio.create_task(engine.drain())
            for _ in range(20):  # turns of the event loop
                await asyncio.sleep(0)
            assert engine.is_draining
            assert engine.num_live == 1
            assert not draining.done()
        finally:
            renderer.released.set()
        assert "as asked" in (await sent).text
        await asyncio.wait_for(draining, 30)
    assert engine.num_live == 0
