"""Two clients of one core, as two API processes have them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from argosy_engine import EngineArgs, SamplingParams
from argosy_engine.core.proc.async_core_client import AsyncMPClient
from argosy_engine.core.proc.core_handle import ClientGroup
from argosy_engine.errors import ConfigError, EngineDead, UtilityFailed
from argosy_engine.messages import EngineCoreRequest, FinishReason
from engine_processes import worker_path
from fake_worker import continuation
from processes import is_alive

pytestmark = pytest.mark.timeout(120)

ARGS: dict[str, Any] = {
    "model": "builtin://tiny",
    "threads": 1,
    "device": "cpu",
    "num_gpu_blocks_override": 64,
}


@pytest.fixture(autouse=True, scope="module")
def bare_workers() -> Iterator[None]:
    with worker_path(is_bare=True):
        yield


async def start(**changed: Any) -> tuple[AsyncMPClient, AsyncMPClient]:
    attaching: list[Awaitable[AsyncMPClient]] = []

    def attach(rank: int, directory: Path) -> None:
        attaching.append(asyncio.ensure_future(AsyncMPClient.attach(directory, 1)))

    group = ClientGroup(2, on_core_started=attach)
    try:
        first = await AsyncMPClient.start(EngineArgs.of(**(ARGS | changed)), group=group)
    except BaseException:
        await asyncio.gather(*attaching, return_exceptions=True)
        raise
    return first, await attaching[0]


@pytest.fixture
async def clients() -> AsyncIterator[tuple[AsyncMPClient, AsyncMPClient]]:
    first, second = await start()
    yield first, second
    await second.close()
    await first.close()


def request(request_id: str, token: int, max_tokens: int = 6) -> EngineCoreRequest:
    """A request whose prompt ends in a token."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return EngineCoreRequest(request_id, [5, 6, token], params, 0.0)


async def tokens_of(client: AsyncMPClient, request_ids: set[str]) -> dict[str, list[int]]:
    """The tokens of all requests whose outputs arrive until those named have ended."""
    tokens: dict[str, list[int]] = {}
    async with aclosing(client.outputs()) as messages:
        async for message in messages:
            for output in message.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    assert output.finish_reason is FinishReason.LENGTH
                    request_ids.discard(output.request_id)
            if not request_ids:
                return tokens
    raise AssertionError("the outputs ended")


async def test_each_client_gets_its_own_outputs(clients: tuple[AsyncMPClient, AsyncMPClient]) -> None:
    first, second = clients
    assert first.pids == second.pids
    assert first.config == second.config
    for index, client in enumerate(clients):
        for number in range(3):
            await client.add_request(request(f"{index}-{number}", token=number))
    await second.add_request(request("aborted", 0, max_tokens=4000))
    await second.abort_requests(["aborted"])
    own = [{f"{index}-{number}" for number in range(3)} for index in range(2)]
    found = await asyncio.gather(tokens_of(first, set(own[0])), tokens_of(second, set(own[1])))
    assert set(found[0]) == own[0]
    assert own[1] <= set(found[1]) <= own[1] | {"aborted"}
    for number in range(3):
        expected = continuation([5, 6, number], 6)
        assert found[0][f"0-{number}"] == found[1][f"1-{number}"] == expected


async def test_each_client_gets_the_answers_to_its_own_calls() -> None:
    first, second = await start()
    readers = [asyncio.ensure_future(drain(client)) for client in (first, second)]
    try:
        unknown = await asyncio.gather(
            first.call_utility("unknown_requests", ["a"]), second.call_utility("unknown_requests", ["b"])
        )
        assert unknown == [["a"], ["b"]]
        with pytest.raises(UtilityFailed):
            await second.call_utility("no such utility")
        pid = first.pid
        await first.close()
        assert not is_alive(pid)
        with pytest.raises(EngineDead, match=f"process {pid}"):
            await readers[1]
        with pytest.raises(EngineDead):
            await second.add_request(request("late", 0))
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await second.close()
        await first.close()


async def drain(client: AsyncMPClient) -> None:
    async for _ in client.outputs():
        pass


async def test_a_core_that_cannot_start_tells_all() -> None:
    with pytest.raises(ConfigError, match="max-model-len"):
        await start(max_model_len=10**6)
