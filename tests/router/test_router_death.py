"""What clients left with an installation is found after one of its processes was killed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from processes import Server, free_port, running

from .batch_rig import DEADLINE_S, lines, results, start_batch
from .fake_engine import FakeEngine

pytestmark = pytest.mark.timeout(300)  # for processes that start beside other work
KEY = {"ARGOSY_FLEET_KEY": "a fleet key of tests"}


@contextlib.contextmanager
def router_process(folder: Path, engine: FakeEngine, batch_port: int, name: str) -> Iterator[Server]:
    port = free_port()
    arguments = ["argosy", "router", "--port", str(port), "--admin-port", "-1", "--api-key", "k"]
    arguments += ["--replica", engine.url, "--batch-url", f"http://127.0.0.1:{batch_port}"]
    with running(arguments, folder / f"{name}.log", port=port, env=KEY) as server:
        yield server


@contextlib.contextmanager
def batch_process(folder: Path, router_url: str, port: int, name: str) -> Iterator[Server]:
    arguments = ["argosy", "batch", "--port", str(port), "--router-url", router_url]
    arguments += ["--storage", str(folder / "storage")]
    with running(arguments, folder / f"{name}.log", port=port, env=KEY) as server:
        yield server


def client_of(server: Server) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=10)


async def test_files_and_results_are_found_after_a_router_and_the_program_that_keeps_them_were_killed(
    tmp_path: Path,
) -> None:
    async with FakeEngine() as engine:
        loop = asyncio.get_running_loop()
        batch_port = free_port()
        with contextlib.ExitStack() as stack:
            start = stack.enter_context
            first, second = await asyncio.gather(
                *(
                    loop.run_in_executor(None, start, router_process(tmp_path, engine, batch_port, name))
                    for name in ("first", "second")
                )
            )
            keeper = await asyncio.to_thread(start, batch_process(tmp_path, second.url, batch_port, "keeper"))
            async with client_of(first) as one, client_of(second) as two:
                batch = await start_batch(one, lines("a", "b"))
                async with asyncio.timeout(DEADLINE_S):
                    while (await one.batches.retrieve(batch.id)).status != "completed":  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                await asyncio.to_thread(first.stop, signal.SIGKILL)
                await asyncio.to_thread(keeper.stop, signal.SIGKILL)
                with contextlib.ExitStack() as again:
                    await asyncio.to_thread(
                        again.enter_context, batch_process(tmp_path, second.url, batch_port, "again")
                    )
                    assert [each.id async for each in two.batches.list()] == [batch.id]
                    batch = await two.batches.retrieve(batch.id)
                    assert set(await results(two, batch.output_file_id)) == {"a", "b"}
                    assert (await two.files.content(batch.input_file_id)).content == lines("a", "b")
