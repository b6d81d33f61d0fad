"""What clients left with a router is found through another one after the first was killed."""

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


@contextlib.contextmanager
def router_process(tmp_path: Path, engine: FakeEngine, name: str) -> Iterator[Server]:
    port = free_port()
    arguments = ["argosy", "router", "--port", str(port), "--admin-port", "-1", "--api-key", "k"]
    arguments += ["--replica", engine.url, "--storage", str(tmp_path / "storage")]
    with running(arguments, tmp_path / f"{name}.log", port=port) as server:
        yield server


def client_of(server: Server) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)


async def test_files_and_results_are_found_through_a_router_after_the_other_was_killed(
    tmp_path: Path,
) -> None:
    async with FakeEngine() as engine:
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            start = stack.enter_context
            first, second = await asyncio.gather(
                *(
                    loop.run_in_executor(None, start, router_process(tmp_path, engine, name))
                    for name in ("first", "second")
                )
            )
            async with client_of(first) as one, client_of(second) as two:
                batch = await start_batch(one, lines("a", "b"))
                async with asyncio.timeout(DEADLINE_S):
                    while (await one.batches.retrieve(batch.id)).status != "completed":  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                await asyncio.to_thread(first.stop, signal.SIGKILL)
                assert [each.id async for each in two.batches.list()] == [batch.id]
                batch = await two.batches.retrieve(batch.id)
                assert set(await results(two, batch.output_file_id)) == {"a", "b"}
                assert (await two.files.content(batch.input_file_id)).content == lines("a", "b")
