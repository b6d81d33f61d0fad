"""A core that is killed: every later call of its client fails at once instead of waiting."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from argosy_engine import LLM, EngineArgs, LLMEngine, SamplingParams
from argosy_engine.core.proc.async_core_client import AsyncMPClient
from argosy_engine.core.proc.core_client import SyncMPClient
from argosy_engine.errors import EngineDead, UtilityFailed
from argosy_engine.messages import EngineCoreRequest
from engine_processes import worker_path
from processes import is_alive, wait_until, workers

ARGS: dict[str, Any] = {
    "model": "builtin://tiny",
    "threads": 1,
    "device": "cpu",
    "num_gpu_blocks_override": 600,
}
FOREVER = SamplingParams(max_tokens=4000, ignore_eos=True)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True, scope="module")
def bare_workers() -> Iterator[None]:
    with worker_path(is_bare=True):
        yield


def test_every_call_of_an_engine_fails_after_its_core_was_killed() -> None:
    engine = LLMEngine.from_engine_args(
        EngineArgs.of(**ARGS, distributed_executor_backend="mp"), multiprocess=True
    )
    try:
        assert isinstance(engine.client, SyncMPClient)
        core = engine.client.pid
        (worker,) = workers(core)
        engine.add_request("a", "Once upon a time", FOREVER)
        engine.step()
        os.kill(core, signal.SIGKILL)
        with pytest.raises(EngineDead, match="killed by SIGKILL"):
            _step_for_ever(engine)
        _check_calls_fail(engine)
        engine.abort_request("a")
        assert not engine.has_unfinished_requests()
        wait_until(lambda: not is_alive(worker), "the worker to end")
    finally:
        engine.close()


def test_generate_fails_when_the_core_is_killed_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(**ARGS, multiprocess=True)
    try:
        assert isinstance(llm.client, SyncMPClient)
        core, step = llm.client.pid, llm.client.step

        def step_and_kill() -> Any:
            outputs = step()
            os.kill(core, signal.SIGKILL)
            return outputs

        assert not workers(core)
        monkeypatch.setattr(llm.client, "step", step_and_kill)
        with pytest.raises(EngineDead):
            llm.generate(["The sea", "The land"], FOREVER, use_tqdm=False)
        with pytest.raises(EngineDead):
            llm.embed("The sea")
        _check_calls_fail(llm.engine)
    finally:
        llm.close()


def _check_calls_fail(engine: LLMEngine) -> None:
    for call in (lambda: engine.add_request("b", "The sea"), engine.reset_prefix_cache):
        with pytest.raises(EngineDead, match="killed by SIGKILL"):
            call()


def _step_for_ever(engine: LLMEngine) -> None:
    while True:
        engine.step()


async def test_every_call_of_an_asynchronous_client_fails_after_the_core_was_killed() -> None:
    """Whether its outputs were being read when the core died or not. The two cores start side by side."""
    clients = await asyncio.gather(*(AsyncMPClient.start(EngineArgs.of(**ARGS)) for _ in range(2)))
    try:
        for client, is_read in zip(clients, (True, False), strict=True):
            await _kill(client, is_read=is_read)
            request = EngineCoreRequest("a", [1, 2], FOREVER, time.time())
            with pytest.raises(EngineDead):
                await asyncio.wait_for(client.add_request(request), 20)
            with pytest.raises(EngineDead):
                await asyncio.wait_for(client.call_utility("reset_prefix_cache"), 20)
            await asyncio.wait_for(client.abort_requests(["a"]), 20)
    finally:
        for client in clients:
            await client.close()


async def _kill(client: AsyncMPClient, *, is_read: bool) -> None:
    """Kill the core during a call.

    Args:
        is_read: whether a reader of the outputs notices the death; otherwise nothing has noticed it yet.
    """
    reader = asyncio.ensure_future(_read(client))
    call = asyncio.ensure_future(client.call_utility("nobody knows it"))
    await asyncio.sleep(0)
    os.kill(client.pid, signal.SIGKILL)
    if is_read:
        with pytest.raises(EngineDead):
            await reader
        with pytest.raises((EngineDead, UtilityFailed)):
            await call
    else:
        reader.cancel()
        call.cancel()
        wait_until(lambda: not is_alive(client.pid), "the core to end")


async def _read(client: AsyncMPClient) -> None:
    async for _ in client.outputs():
        pass
