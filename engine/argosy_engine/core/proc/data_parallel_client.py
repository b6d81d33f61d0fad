"""Clients of several engine cores (`--data-parallel-size`), with the interface of a client of one.

DPLBAsyncMPClient  asyncio, for the API server
DPLBSyncMPClient   blocking, for offline use

Each core is a process with a scheduler, a KV cache and workers of its own; `RankBalancer` chooses one for each request.
The cores are one engine: if one dies, every call raises `EngineDead` with its reason, and its owner closes the client,
which ends the others. Utilities are called on all cores.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any

import msgspec
import zmq

from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.async_core_client import AsyncMPClient
from argosy_engine.core.proc.core_client import POLL_MS, SyncMPClient
from argosy_engine.core.proc.core_handle import ALONE, ClientGroup, LoadWatch
from argosy_engine.core.proc.rank_balancer import RankBalancer
from argosy_engine.distributed.lockstep import LockstepEnds, LockstepFiles
from argosy_engine.errors import ConfigError, EngineDead, EngineError, UtilityFailed
from argosy_engine.messages import EngineCoreOutputs, EngineCoreRequest
from argosy_engine.osproc import SharedCounters
from argosy_engine.resolved_config import ResolvedConfig
from argosy_engine.sizing.resources import check_gpus, rank_args

ROOT_CAUSE_S = 2.0
"""How long to wait for the death of another core when one has died because it lost a worker of another."""
_LOST_PEER = ("closed by peer", "reset by peer", "Broken pipe")
"""What gloo says of a connection whose other end has ended."""
START_POLL_MS = 1000

_MAX_UNREAD = 64
"""Messages of all cores that are decoded ahead of their reader; more wait in the sockets."""


class DPLBAsyncMPClient:
    """Client of the cores of all ranks. Create it with `start`. The name is vLLM's.

    Args:
        clients: one for each rank, in order.
        shares_experts: whether the cores do, so that none can go on without the others.
        counters: of several API processes (`RankBalancer`).

    Raises (from the constructor):
        ConfigError: the cores differ in what determines outputs.
    """

    def __init__(
        self,
        clients: Sequence[AsyncMPClient],
        *,
        shares_experts: bool = False,
        counters: SharedCounters | None = None,
    ) -> None:
        self._clients = clients
        self._shares_experts = shares_experts
        self.config = combined_config([client.config for client in clients])
        self._balancer = RankBalancer([client.config.max_num_seqs for client in clients], counters)
        self._is_asleep = False

    @classmethod
    async def start(cls, args: EngineArgs, group: ClientGroup = ALONE) -> DPLBAsyncMPClient:
        """Start all cores and wait until their models are loaded.

        Args:
            group: the API processes that the cores serve.

        Raises:
            ConfigError: a core rejects its arguments, or there are too few GPUs.
            EngineDead: a core died while starting.
        """
        check_gpus(args)
        own_args, ends = rank_args(args), ExpertGroup(args)
        watch = LoadWatch(args.load_stall_timeout, group.on_load_step)
        starts = [
            asyncio.create_task(_start_rank(own_args, rank, ends.of(rank), group, watch), name=f"core {rank}")
            for rank in range(args.data_parallel_size)
        ]
        try:
            clients = await asyncio.gather(*starts)
            return cls(clients, shares_experts=args.parallel_config.shares_experts, counters=group.counters)
        except BaseException:
            for start in starts:
                start.cancel()
            started = await asyncio.gather(*starts, return_exceptions=True)
            await asyncio.gather(*(client.close() for client in started if isinstance(client, AsyncMPClient)))
            raise
        finally:
            ends.close()

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
            UtilityFailed: it failed in a core. All are as they were before then, asleep or awake.
            EngineDead: a core died.
        """
        if self._shares_experts and method == "wake_up" and not self._is_asleep:
            return None  # the workers would wait for each other, and some may wait in a step already
        if self._shares_experts and method == "sleep":
            check_idle(self._balancer)
            await asyncio.gather(*(client.call_utility(*_NO_CALL) for client in self._clients))
            check_idle(self._balancer)
        calls = [client.call_utility(method, *args) for client in self._clients]
        results = await asyncio.gather(*calls, return_exceptions=True)
        try:
            result = combined_result(method, results)
        except UtilityFailed:
            if undo := undo_call(method, self._is_asleep):
                calls = [client.call_utility(*undo) for client in self._clients]
                await asyncio.gather(*calls, return_exceptions=True)
            raise
        self._is_asleep = is_asleep_after(method, self._is_asleep)
        return result

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
                if isinstance(outputs, EngineDead) and is_consequence(outputs):
                    outputs = await self._cause(outputs, merged)
                if isinstance(outputs, Exception):
                    raise outputs
                yield outputs
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _cause(
        self, death: EngineDead, merged: asyncio.Queue[EngineCoreOutputs | Exception]
    ) -> EngineDead:
        """Return the death of another core, if one follows that is the reason of this one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ROOT_CAUSE_S):
                while True:
                    outputs = await merged.get()
                    if isinstance(outputs, EngineDead) and not is_consequence(outputs):
                        return outputs
        return death

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


async def _start_rank(
    args: EngineArgs, rank: int, lockstep: LockstepEnds | None, group: ClientGroup, watch: LoadWatch
) -> AsyncMPClient:
    with _naming(rank):
        return await AsyncMPClient.start(args, rank, lockstep, group, watch)


class DPLBSyncMPClient:
    """Blocking client of the cores of all ranks.

    Raises (from the constructor):
        ConfigError: a core rejects its arguments, or there are too few GPUs.
        EngineDead: a core died while starting. The methods raise it if one dies later.
    """

    def __init__(self, args: EngineArgs) -> None:
        check_gpus(args)
        own_args, ends, watch = rank_args(args), ExpertGroup(args), LoadWatch(args.load_stall_timeout)
        self._shares_experts = args.parallel_config.shares_experts
        self._clients: list[SyncMPClient] = []
        try:
            for rank in range(args.data_parallel_size):
                self._clients.append(
                    SyncMPClient(own_args, rank, ends.of(rank), is_awaited=False, watch=watch)
                )
            self._wait_until_ready()
            self.config = combined_config([client.config for client in self._clients])
        except BaseException:
            self.close()
            raise
        finally:
            ends.close()
        self._balancer = RankBalancer([client.config.max_num_seqs for client in self._clients])
        self._is_asleep = False
        self._last = 0
        """Rank of the last step."""

    def _wait_until_ready(self) -> None:
        """Wait until all cores are. They load side by side, and may wait for each other."""
        starting = dict(enumerate(self._clients))
        while starting:
            ready = [rank for rank, client in starting.items() if client.is_ready]
            for rank in ready:
                with _naming(rank):
                    if starting[rank].shake_hands():
                        del starting[rank]
            if not ready:
                poller = zmq.Poller()
                for client in starting.values():
                    client.watch(poller)
                poller.poll(START_POLL_MS)
                for rank, client in starting.items():
                    with _naming(rank):
                        client.check_start()

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
                    try:
                        with _naming(rank):
                            outputs = self._clients[rank].step()
                    except EngineDead as error:
                        raise self._cause(rank, error) from None
                    self._balancer.update(rank, outputs)
                    return outputs
            poller = zmq.Poller()
            notices_ends = [client.watch(poller) for client in self._clients]
            poller.poll(None if all(notices_ends) else POLL_MS)

    def _cause(self, rank: int, death: EngineDead) -> EngineDead:
        """Return the death of another core, if one follows that is the reason of this one's."""
        deadline = time.monotonic() + ROOT_CAUSE_S
        others = {other: client for other, client in enumerate(self._clients) if other != rank}
        while is_consequence(death) and others and (left := deadline - time.monotonic()) > 0:
            poller = zmq.Poller()
            for client in others.values():
                client.watch(poller)
            poller.poll(min(int(left * 1000) + 1, POLL_MS))
            for other in [other for other, client in others.items() if client.is_ready]:
                try:
                    others[other].step()
                except EngineDead as error:
                    del others[other]
                    if not is_consequence(error):
                        return _dead(other, error)
        return death

    def call_utility(self, method: str, *args: Any) -> Any:
        """Call a utility of all cores at once, and return their results as those of one (`combined_result`).

        Raises:
            UtilityFailed: it failed in a core. All are as they were before then, asleep or awake.
            EngineDead: a core died.
        """
        if self._shares_experts and method == "wake_up" and not self._is_asleep:
            return None  # the workers would wait for each other, and some may wait in a step already
        if self._shares_experts and method == "sleep":
            check_idle(self._balancer)
            self._call_all(*_NO_CALL)
        results = self._call_all(method, *args)
        try:
            result = combined_result(method, results)
        except UtilityFailed:
            if undo := undo_call(method, self._is_asleep):
                with suppress(EngineError):
                    self._call_all(*undo)  # at once, because cores that share experts wake up together
            raise
        self._is_asleep = is_asleep_after(method, self._is_asleep)
        return result

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a utility of all cores at once, and return their results, or why they failed, by rank."""
        calls, results = [], []
        for rank, client in enumerate(self._clients):
            with _naming(rank):
                calls.append(client.begin_call(method, *args))
        for rank, client in enumerate(self._clients):
            try:
                with _naming(rank):
                    results.append(client.answer(calls[rank]))
            except UtilityFailed as error:
                results.append(error)
        return results

    def close(self) -> None:
        for client in self._clients:
            client.close()


class ExpertGroup:
    """What the processes of cores that share experts inherit, if they do. Close it once all have started."""

    def __init__(self, args: EngineArgs) -> None:
        self._files = LockstepFiles(args.data_parallel_size) if args.parallel_config.shares_experts else None

    def of(self, rank: int) -> LockstepEnds | None:
        return None if self._files is None else self._files.ends(rank)

    def close(self) -> None:
        if self._files is not None:
            self._files.close()


_NO_CALL: tuple[str, list[str]] = ("unknown_requests", [])
"""A call without effect. Once all cores that share experts have answered it, they have handled what was sent before
(aborts) as well, so that none begins a step that needs another core, which may fall asleep then."""


def check_idle(balancer: RankBalancer) -> None:
    """
    Raises:
        UtilityFailed: a request has not ended.
    """
    if any(balancer.num_requests):
        raise UtilityFailed("requests are running")


def undo_call(method: str, was_asleep: bool) -> tuple[Any, ...]:
    """Return the call that undoes one that has failed in some cores, so that all are asleep or none; empty: no call."""
    if method == "sleep" and was_asleep:
        return ()
    return {"sleep": ("wake_up",), "wake_up": ("sleep", 1)}.get(method, ())


def is_asleep_after(method: str, was_asleep: bool) -> bool:
    """Whether the cores sleep after a call that has succeeded in all of them."""
    return method == "sleep" or (was_asleep and method != "wake_up")


def is_consequence(death: EngineDead) -> bool:
    """Whether a core has died because a worker of another core, with which its own compute together, has ended."""
    return any(sign in str(death) for sign in _LOST_PEER)


@contextmanager
def _naming(rank: int) -> Iterator[None]:
    """Name the rank of a core in the error of its death."""
    try:
        yield
    except EngineDead as error:
        raise _dead(rank, error) from None


def _dead(rank: int, error: EngineDead) -> EngineDead:
    return type(error)(f"data-parallel rank {rank}: {error}")


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
