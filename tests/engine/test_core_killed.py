"""A core that is killed under its clients: everything they are asked afterwards has an answer, and that soon."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from argosy_engine import LLM, EngineArgs, LLMEngine, SamplingParams
from argosy_engine.core.proc.async_core_client import AsyncMPClient
from argosy_engine.core.proc.core_client import SyncMPClient
from argosy_engine.errors import EngineDead, UtilityFailed
from argosy_engine.messages.core_messages import EngineCoreRequest
from processes import children, is_alive, wait_until

ARGS: dict[str, Any] = {
    "model": "builtin://tiny",
    "threads": 1,
    "device": "cpu",
    "num_gpu_blocks_override": 64,
}
FOREVER = SamplingParams(max_tokens=500, ignore_eos=True)

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_a_blocking_client_hears_of_the_death_whatever_it_asks(backend: str) -> None:
    engine = LLMEngine.from_engine_args(
        EngineArgs.of(**ARGS, distributed_executor_backend=backend), multiprocess=True
    )
    try:
        assert isinstance(engine.client, SyncMPClient)
        core = engine.client.pid
        workers = children(core)
        assert len(workers) == (backend == "mp")
        engine.add_request("a", "Once upon a time", FOREVER)
        engine.step()
        os.kill(core, signal.SIGKILL)
        with pytest.raises(EngineDead, match="killed by SIGKILL"):
            _step_for_ever(engine)
        for ask in (lambda: engine.add_request("b", "The sea"), engine.reset_prefix_cache):
            with pytest.raises(EngineDead, match="killed by SIGKILL"):
                ask()
        engine.abort_request("a")
        assert not engine.has_unfinished_requests()
        wait_until(lambda: not any(map(is_alive, workers)), "the workers to end")
    finally:
        engine.close()


def _step_for_ever(engine: LLMEngine) -> None:
    while True:
        engine.step()


def test_generate_ends_when_the_core_dies_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(**ARGS, multiprocess=True)
    try:
        assert isinstance(llm.client, SyncMPClient)
        core, step = llm.client.pid, llm.client.step

        def step_and_kill() -> Any:
            outputs = step()
            os.kill(core, signal.SIGKILL)
            return outputs

        monkeypatch.setattr(llm.client, "step", step_and_kill)
        with pytest.raises(EngineDead):
            llm.generate(["The sea", "The land"], FOREVER, use_tqdm=False)
        with pytest.raises(EngineDead):
            llm.embed("The sea")
    finally:
        llm.close()


@pytest.mark.parametrize("is_read", [True, False])
async def test_an_asynchronous_client_hears_of_the_death_whatever_it_asks(is_read: bool) -> None:
    """`is_read`: somebody was reading the core's outputs when it died, and so knows."""
    client = await AsyncMPClient.start(EngineArgs.of(**ARGS))
    try:
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
        request = EngineCoreRequest("a", [1, 2], FOREVER, time.time())
        for ask in (lambda: client.add_request(request), lambda: client.call_utility("reset_prefix_cache")):
            with pytest.raises(EngineDead):
                await asyncio.wait_for(ask(), 20)
        await asyncio.wait_for(client.abort_requests(["a"]), 20)
    finally:
        await client.close()


async def _read(client: AsyncMPClient) -> None:
    async for _ in client.outputs():
        pass
