"""Clients of several engine cores (`--data-parallel-size`), with the interface of a client of one.

DPLBAsyncMPClient  asyncio, for the API server
DPLBSyncMPClient   blocking, for offline use

Each core is a process with a scheduler, a KV cache and workers of its own; `RankBalancer` chooses one for each request.
The cores are one engine: if one dies, every call raises `EngineDead` with its reason, and its owner closes the client,
which ends the others. Utilities are called on all cores.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any

import msgspec
import zmq

from argosy_engine.config import EngineArgs, ResolvedConfig
from argosy_engine.core.proc.async_core_client import AsyncMPClient
from argosy_engine.core.proc.core_client import POLL_MS, SyncMPClient
from argosy_engine.core.proc.rank_balancer import RankBalancer
from argosy_engine.errors import ConfigError, EngineDead, EngineError, UtilityFailed
from argosy_engine.messages.core_messages import EngineCoreOutputs, EngineCoreRequest
from argosy_engine.sizing.rank_resources import check_gpus, rank_args

_MAX_UNREAD = 64
"""Messages of all cores that are decoded ahead of their reader; more wait in the sockets."""


class DPLBAsyncMPClient:
    """Client of the cores of all ranks. Create it with `start`. The name is vLLM's.

    Args:
        clients: one for each rank, in order.

    Raises (from the constructor):
        ConfigError: the cores differ in what determines outputs.
    """

    def __init__(self, clients: Sequence[AsyncMPClient]) -> None:
        self._clients = clients
        self.config = combined_config([client.config for client in clients])
        self._balancer = RankBalancer([client.config.max_num_seqs for client in clients])

    @classmethod
    async def start(cls, args: EngineArgs) -> DPLBAsyncMPClient:
        """Start all cores and wait until their models are loaded.

        Raises:
            ConfigError: a core rejects its arguments, or there are too few GPUs.
            EngineDead: a core died while starting.
        """
        check_gpus(args)
        own_args, ranks = rank_args(args), range(args.data_parallel_size)
        starts = [asyncio.create_task(_start_rank(own_args, rank), name=f"core {rank}") for rank in ranks]
        try:
            return cls(await asyncio.gather(*starts))
        except BaseException:
            for start in starts:
                start.cancel()
            started = await asyncio.gather(*starts, return_exceptions=True)
            await asyncio.gather(*(client.close() for client in started if isinstance(client, AsyncMPClient)))
            raise

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request to the rank that it asks for, or to the best one, and set its `data_parallel_rank`.

        Raises:
            EngineDead: the core has died.
        """
        await self._clients[self._balancer.add(request)].add_request(request)

    async def abort_requests(self, request_ids: list[str]) -> None:
        for rank, own_ids in self._balancer.remove(request_ids).items():
            await self._clients[rank].abort_requests(own_ids)

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Call a utility of all cores, and return their results as those of one (`combined_result`).

        Raises:
            UtilityFailed: it failed in a core. A core that fell asleep while another one could not is awake again.
            EngineDead: a core died.
        """
        calls = [client.call_utility(method, *args) for client in self._clients]
        results = await asyncio.gather(*calls, return_exceptions=True)
        try:
            return combined_result(method, results)
        except UtilityFailed:
            if method == "sleep":
                wakes = [client.call_utility("wake_up") for client in self._clients]
                await asyncio.gather(*wakes, return_exceptions=True)
            raise

    async def outputs(self) -> AsyncGenerator[EngineCoreOutputs]:
        """Yield everything that the cores send, with their ranks, until one of them dies.

        Raises:
            EngineDead: a process ended, or announced that it is dying.
        """
        merged: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue(_MAX_UNREAD)
        readers = [
            asyncio.create_task(self._read(rank, merged), name=f"outputs of core {rank}")
            for rank in range(len(self._clients))
        ]
        try:
            while True:
                outputs = await merged.get()
                if isinstance(outputs, Exception):
                    raise outputs
                yield outputs
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _read(self, rank: int, merged: asyncio.Queue[EngineCoreOutputs | Exception]) -> None:
        try:
            async with aclosing(self._clients[rank].outputs()) as stream:
                async for outputs in stream:
                    self._balancer.update(rank, outputs)
                    await merged.put(outputs)
        except EngineDead as error:
            await merged.put(_dead(rank, error))
        except Exception as error:
            await merged.put(error)

    @property
    def pids(self) -> list[int]:
        """The processes of all cores, by rank."""
        return [client.pid for client in self._clients]

    async def close(self) -> None:
        """End the cores and close the sockets."""
        await asyncio.gather(*(client.close() for client in self._clients))


async def _start_rank(args: EngineArgs, rank: int) -> AsyncMPClient:
    with _naming(rank):
        return await AsyncMPClient.start(args, rank)


class DPLBSyncMPClient:
    """Blocking client of the cores of all ranks.

    Raises (from the constructor):
        ConfigError: a core rejects its arguments, or there are too few GPUs.
        EngineDead: a core died while starting. The methods raise it if one dies later.
    """

    def __init__(self, args: EngineArgs) -> None:
        check_gpus(args)
        own_args = rank_args(args)
        self._clients: list[SyncMPClient] = []
        try:
            for rank in range(args.data_parallel_size):
                self._clients.append(SyncMPClient(own_args, rank, is_awaited=False))
            for wait in (
                SyncMPClient.wait_until_loading,
                SyncMPClient.wait_until_ready,
            ):  # they load side by side
                for rank, client in enumerate(self._clients):
                    with _naming(rank):
                        wait(client)
            self.config = combined_config([client.config for client in self._clients])
        except BaseException:
            self.close()
            raise
        self._balancer = RankBalancer([client.config.max_num_seqs for client in self._clients])
        self._last = 0
        """Rank of the last step."""

    @property
    def pids(self) -> list[int]:
        """The processes of all cores, by rank."""
        return [client.pid for client in self._clients]

    @property
    def has_work(self) -> bool:
        return any(client.has_work for client in self._clients)

    def add_request(self, request: EngineCoreRequest) -> None:
        rank = self._balancer.add(request)
        with _naming(rank):
            self._clients[rank].add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        for rank, own_ids in self._balancer.remove(request_ids).items():
            self._clients[rank].abort_requests(own_ids)

    def step(self) -> EngineCoreOutputs:
        """Return the next message of any core; the cores take turns."""
        count = len(self._clients)
        while True:
            for offset in range(1, count + 1):
                rank = (self._last + offset) % count
                if self._clients[rank].is_ready:
                    self._last = rank
                    with _naming(rank):
                        outputs = self._clients[rank].step()
                    self._balancer.update(rank, outputs)
                    return outputs
            poller = zmq.Poller()
            notices_ends = [client.watch(poller) for client in self._clients]
            poller.poll(None if all(notices_ends) else POLL_MS)

    def call_utility(self, method: str, *args: Any) -> Any:
        """Call a utility of all cores, one after the other, and return their results as those of one
        (`combined_result`).

        Raises:
            UtilityFailed: it failed in a core. A core that fell asleep while another one could not is awake again.
            EngineDead: a core died.
        """
        results: list[Any] = []
        for rank, client in enumerate(self._clients):
            try:
                with _naming(rank):
                    results.append(client.call_utility(method, *args))
            except UtilityFailed as error:
                results.append(error)
        try:
            return combined_result(method, results)
        except UtilityFailed:
            if method == "sleep":
                for client in self._clients:
                    with suppress(EngineError):
                        client.call_utility("wake_up")
            raise

    def close(self) -> None:
        for client in self._clients:
            client.close()


@contextmanager
def _naming(rank: int) -> Iterator[None]:
    """Name the rank of a core in the error of its death."""
    try:
        yield
    except EngineDead as error:
        raise _dead(rank, error) from None


def _dead(rank: int, error: EngineDead) -> EngineDead:
    return EngineDead(f"data-parallel rank {rank}: {error}")


def combined_config(configs: Sequence[ResolvedConfig]) -> ResolvedConfig:
    """Return the configuration of an engine of several cores: what all of them can serve.

    Raises:
        ConfigError: the cores differ in what determines outputs.
    """
    if len({config.model_fingerprint for config in configs}) > 1:
        raise ConfigError(
            "the data-parallel ranks have loaded different weights, or run on different devices; start again once the "
            "checkpoint no longer changes, and give --device and --dtype"
        )
    slowest = max(configs, key=lambda config: sum(seconds for _, seconds in config.startup_phases))
    return msgspec.structs.replace(
        configs[0],
        max_model_len=min(config.max_model_len for config in configs),
        startup_phases=slowest.startup_phases,
        rank_memory=tuple(config.memory for config in configs),
    )


def combined_result(method: str, results: Sequence[Any]) -> Any:
    """Combine the results of a utility in all cores, by rank.

    Args:
        results: values, or the exceptions of failed calls, of which the first is raised.
    """
    for rank, result in enumerate(results):
        if isinstance(result, UtilityFailed):
            raise UtilityFailed(f"data-parallel rank {rank}: {result}")
        if isinstance(result, EngineDead):
            raise _dead(rank, result)
        if isinstance(result, BaseException):
            raise result
    match method:
        case "collective_rpc":  # one answer of each worker
            return [answer for answers in results for answer in answers]
        case "unknown_requests":  # a core knows its own only
            others = [set(unknown) for unknown in results[1:]]
            return [request_id for request_id in results[0] if all(request_id in other for other in others)]
        case "reset_prefix_cache" | "check":
            return all(results)
        case _:
            return results[0]
