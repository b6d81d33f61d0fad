"""ProcessGroup: the further API processes of an engine, as the first one sees them.

All accept connections from the same listening sockets, which they inherit: a connection that is not accepted yet
belongs to none of them, so none is lost with one that ends or stands still.

Invariant: the processes end together. One that ends by itself ends the engine with the reason; those that are left over
end with the first one, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path

from starlette.types import ASGIApp

from argosy_engine.api.http_layers import add_relayed_layers
from argosy_engine.api.processes.call_channel import (
    PING_INTERVAL_S,
    PING_TIMEOUT_S,
    CallChannel,
    ProcessStandsStill,
)
from argosy_engine.api.processes.frames import open_stream, write_frame
from argosy_engine.api.processes.process_messages import (
    Attach,
    Call,
    ConnectCore,
    Drain,
    GetMetrics,
    Sleep,
    Start,
    Stop,
)
from argosy_engine.api.processes.relay_server import RelayServer
from argosy_engine.api.server_args import ServerArgs
from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.client_group import ClientGroup, num_columns
from argosy_engine.distributed.process_name import api_server_name
from argosy_engine.errors import EngineDead, UtilityFailed
from argosy_engine.frontend.async_llm import SleepMode
from argosy_engine.osproc.child_process import EXIT_TIMEOUT_S, describe_exit, end_child, parent_argument
from argosy_engine.osproc.shared_counters import SharedCounters, make_shared_memory

logger = logging.getLogger("argosy.api")

METRICS_TIMEOUT_S = 2.0
"""How long a process may take to tell its metrics, before its last ones are used."""


class _Process:
    """One of the processes.

    Args:
        calling, receiving: our ends of its sockets.
    """

    def __init__(
        self, index: int, process: subprocess.Popen[bytes], calling: socket.socket, receiving: socket.socket
    ) -> None:
        self.name = api_server_name(index)
        self.process = process
        self.calling = calling
        self.receiving = receiving
        self.channel: CallChannel | None = None
        self.metric_values: list[float] = []

    async def call(self, call: Call) -> list[float]:
        assert self.channel is not None, "the group is not open"
        return await self.channel.call(call)

    def close(self) -> None:
        if self.channel is None:
            self.calling.close()
            self.receiving.close()
        else:
            self.channel.close()


class ProcessGroup:
    """Starts the processes; they wait for `open`. Created in the main thread, whose end ends them.

    Args:
        listeners: listening sockets, which the processes inherit.
        started: when the engine started, in seconds since the epoch.
        ping_interval_s, ping_timeout_s: as `CallChannel.call_unless_still` has them.
    """

    def __init__(
        self,
        options: ServerArgs,
        args: EngineArgs,
        listeners: Sequence[socket.socket],
        started: int,
        *,
        ping_interval_s: float = PING_INTERVAL_S,
        ping_timeout_s: float = PING_TIMEOUT_S,
    ) -> None:
        self._ping_interval_s = ping_interval_s
        self._ping_timeout_s = ping_timeout_s
        self.size = options.api_server_count
        self._start = Start(options, args, self.size, started)
        self._tasks: set[asyncio.Task[None]] = set()
        self._connecting: list[asyncio.Task[list[float]]] = []
        self._is_stopping = False
        self.ended = asyncio.Event()
        """Set once a process has ended by itself."""
        self.reason = ""
        """Which one, and why."""
        self._relays: RelayServer | None = None
        self._processes: list[_Process] = []
        width = num_columns(args.data_parallel_size)
        memory = make_shared_memory(self.size, width)
        self._counters = SharedCounters(memory, self.size, 0, width)
        try:
            for index in range(1, self.size):
                self._processes.append(_spawn(index, memory, listeners))
        except BaseException:
            for each in self._processes:
                each.process.kill()
                each.process.wait()
            raise
        finally:
            os.close(memory)

    @property
    def client_group(self) -> ClientGroup:
        """What the clients of the cores have in common."""
        return ClientGroup(self.size, 0, self._counters, self._connect)

    @property
    def pids(self) -> list[int]:
        return [each.process.pid for each in self._processes]

    async def open(self, app: ASGIApp) -> None:
        """Tell the processes what to serve, and answer what they pass on.

        Args:
            app: the application without the layers around it.
        """
        self._relays = RelayServer(add_relayed_layers(app, self._start.server_args))
        for each in self._processes:
            stream = await open_stream(each.calling)
            write_frame(stream[1], self._start)
            each.channel = CallChannel(each.name, stream)
            self._relays.listen(each.receiving)
            self._begin(self._watch(each, each.channel))

    async def wait_until_ready(self) -> None:
        """Wait until all processes serve. The cores must be ready.

        Raises:
            EngineDead: a process cannot serve, or ended; `ended` is set then.
        """
        try:
            await asyncio.gather(*self._connecting)
            await self._call_all(Attach())
        except UtilityFailed as error:
            raise EngineDead(str(error)) from None
        except EngineDead:
            await self.ended.wait()
            raise EngineDead(self.reason) from None

    async def drain(self) -> None:
        """Have the processes reject new requests, and wait until theirs are done."""
        with contextlib.suppress(EngineDead):
            await self._call_all(Drain())

    async def sleep(self, level: int, mode: SleepMode) -> None:
        """Have the processes end their requests before the cores fall asleep; level 0: accept requests again.

        Raises:
            ProcessStandsStill: a process does not answer. Level 0 does not need it to: it obeys once it goes on.
            UtilityFailed, EngineDead: a process cannot.
        """
        await asyncio.gather(*(self._sleep(each, Sleep(level, mode)) for each in self._processes))

    async def metric_values(self) -> list[list[float]]:
        """Return the metrics of each process (`EngineMetrics.values`); the last known ones of one that hangs."""
        await asyncio.gather(*(self._update_metrics(each) for each in self._processes))
        return [each.metric_values for each in self._processes]

    async def stop(self, last_bytes_s: float) -> None:
        """End the processes.

        Args:
            last_bytes_s: how long answers may take to be read.
        """
        self._is_stopping = True
        for each in self._processes:
            if each.channel is None:
                each.close()  # it exits then
            else:
                self._begin(self._tell(each, Stop(last_bytes_s)))
        await asyncio.gather(
            *(
                asyncio.to_thread(end_child, each.process, each.name, last_bytes_s + EXIT_TIMEOUT_S)
                for each in self._processes
            )
        )
        if self._relays is not None:
            await self._relays.close()
        for task in (*self._tasks, *self._connecting):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._connecting, return_exceptions=True)
        for each in self._processes:
            each.close()

    def _connect(self, rank: int, directory: Path) -> None:
        """Have all processes connect to a core that has just been started."""
        call = ConnectCore(rank, str(directory))
        self._connecting += [asyncio.create_task(each.call(call)) for each in self._processes]

    async def _call_all(self, call: Call) -> None:
        await asyncio.gather(*(each.call(call) for each in self._processes))

    async def _sleep(self, each: _Process, call: Sleep) -> None:
        assert each.channel is not None, "the group is not open"
        try:
            await each.channel.call_unless_still(
                call, interval_s=self._ping_interval_s, timeout_s=self._ping_timeout_s
            )
        except ProcessStandsStill as error:
            if call.level:
                raise
            logger.warning("%s; it accepts requests again once it goes on", error)

    async def _tell(self, each: _Process, call: Call) -> None:
        with contextlib.suppress(EngineDead):
            await each.call(call)

    async def _update_metrics(self, each: _Process) -> None:
        with contextlib.suppress(TimeoutError, EngineDead):
            async with asyncio.timeout(METRICS_TIMEOUT_S):
                each.metric_values = await each.call(GetMetrics())

    async def _watch(self, each: _Process, channel: CallChannel) -> None:
        """Deliver the answers of a process until it ends."""
        await channel.read()
        code = await asyncio.to_thread(each.process.wait)
        if not self._is_stopping and not self.reason:
            self.reason = f"{each.name} (process {each.process.pid}) ended: {describe_exit(code)}"
            logger.error("%s", self.reason)
            self.ended.set()

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _spawn(index: int, memory: int, listeners: Sequence[socket.socket]) -> _Process:
    calling, answering = socket.socketpair()
    receiving, sending = socket.socketpair()
    inherited = [answering.fileno(), sending.fileno(), memory, *(each.fileno() for each in listeners)]
    safe_path = ["-P"] if sys.flags.safe_path else []
    try:
        process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
            [
                sys.executable,
                *safe_path,
                "-m",
                "argosy_engine.api.processes.api_process",
                api_server_name(index),
                str(index),
                parent_argument(),
                *map(str, inherited),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=inherited,
        )
    except BaseException:
        calling.close()
        receiving.close()
        raise
    finally:
        answering.close()
        sending.close()
    return _Process(index, process, calling, receiving)
