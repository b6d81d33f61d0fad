"""The last message of a core that fails: its client gets the whole reason, although the process ends at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from argosy_engine import EngineArgs
from argosy_engine.core.proc.async_core_client import AsyncMPClient
from argosy_engine.core.proc.core_client import SyncMPClient
from argosy_engine.core.proc.core_handle import CoreHandle
from argosy_engine.errors import ConfigError, EngineDead
from argosy_engine.messages import EngineCoreRequest
from argosy_engine.params import SamplingParams
from engine_processes import worker_path
from probe_worker import LongReasonWorker
from processes import is_alive, wait_until

pytestmark = pytest.mark.timeout(300)

REQUEST = EngineCoreRequest("a", [1, 2], SamplingParams(), 0.0)


@pytest.fixture(autouse=True, scope="module")
def bare_workers() -> Iterator[None]:
    with worker_path(is_bare=True):
        yield


def args(**fields: Any) -> EngineArgs:
    return EngineArgs.of(
        model="builtin://tiny",
        device="cpu",
        threads=1,
        num_gpu_blocks_override=16,
        worker_cls="probe_worker.LongReasonWorker",
        **fields,
    )


def check(error: Exception) -> None:
    assert str(error).count("x") >= LongReasonWorker.REASON_LENGTH


def step_for_ever(client: SyncMPClient) -> None:
    while True:
        client.step()


def test_a_start_that_fails() -> None:
    with pytest.raises(ConfigError) as caught:
        SyncMPClient(args(seed=1))
    check(caught.value)


async def test_an_asynchronous_start_that_fails() -> None:
    with pytest.raises(ConfigError) as caught:
        await AsyncMPClient.start(args(seed=1))
    check(caught.value)


def test_a_step_that_fails() -> None:
    client = SyncMPClient(args())
    try:
        client.add_request(REQUEST)
        with pytest.raises(EngineDead) as caught:
            step_for_ever(client)
        check(caught.value)
    finally:
        client.close()


def test_a_call_while_the_core_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sockets are closed, and the process cannot be waited for yet when the call looks for the first time."""
    client = SyncMPClient(args())
    try:
        client.add_request(REQUEST)
        wait_until(lambda: not is_alive(client.pid), "the core to end")
        poll, looks = CoreHandle.poll, list[None]()
        monkeypatch.setattr(CoreHandle, "poll", lambda handle: looks.pop() if looks else poll(handle))

        def call_until_nobody_reads() -> None:
            while True:
                time.sleep(0.01)  # ZeroMQ looks for news of a socket once in a millisecond
                looks[:] = [None]
                client.add_request(REQUEST)

        with pytest.raises(EngineDead) as caught:
            call_until_nobody_reads()
        check(caught.value)
    finally:
        client.close()


async def test_an_asynchronous_step_that_fails() -> None:
    client = await AsyncMPClient.start(args())
    try:
        await client.add_request(REQUEST)
        with pytest.raises(EngineDead) as caught:
            async for _ in client.outputs():
                pass
        check(caught.value)
    finally:
        await client.close()
