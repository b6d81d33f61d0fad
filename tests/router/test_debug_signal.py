"""SIGUSR1 makes a router describe its state without disturbing it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from processes import free_port, running, wait_until

from .failure_scripts import never_answer
from .fake_engine import FakeEngine
from .harness import until
from .raw_requests import request_bytes

pytestmark = pytest.mark.timeout(300)  # for processes that start beside other work


async def test_a_router_tells_stacks_tasks_and_ages_of_requests(tmp_path: Path) -> None:
    log, port = tmp_path / "log", free_port()
    async with FakeEngine(script=never_answer) as engine:
        arguments = ["argosy_router.main", "--port", str(port), "--admin-port", "-1", "--replica", engine.url]
        server = running(arguments, log, port=port, ready_path="/ready")
        process = (await asyncio.to_thread(server.__enter__)).process
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            await until(lambda: bool(engine.telemetry))
            writer.write(request_bytes())
            await until(lambda: bool(engine.requests))
            before = len(log.read_text())
            for count in (1, 2):
                process.send_signal(signal.SIGUSR1)
                await asyncio.to_thread(
                    wait_until, lambda count=count: log.read_text().count("tasks: ") == count, "a description"
                )
            told = log.read_text()[before:]
            assert f"argosy router, process {process.pid}: " in told.splitlines()[0]
            assert "most recent call first" in told
            assert "state of the router: " in told
            assert "replica=" in told
            assert "age=" in told
            assert "discovery: " in told, "its tasks"
            assert process.poll() is None
            writer.close()
        finally:
            await asyncio.to_thread(server.__exit__, None, None, None)
