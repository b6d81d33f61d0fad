"""Several API processes of one engine (`--api-server-count`): the further ones, and the first one's view of them.

The first process is the whole server of an engine with one: it starts the cores, and keeps everything that is not one
request's alone. The others (`ApiProcess`, the program of this module) do what costs time per request and token (HTTP,
templates, tokens, text), with clients of their own for the cores, and pass all other requests to the first
(`request_relay`). The first one starts, tells and ends them (`ProcessGroup`), by calls that overlap: a drain may wait
for minutes while metrics are asked for.

All accept connections from the same listening sockets, which they inherit: a connection that is not accepted yet
belongs to none of them, so none is lost with one that ends or stands still.

Invariant: the processes end together. One that ends by itself ends the engine with the reason; those that are left over
end with the first one, however it ends, and otherwise only when they are told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path

import msgspec
import uvloop
from msgspec import Struct
from starlette.types import ASGIApp

from argosy_engine.api.app import (
    add_relayed_layers,
    build_app,
    describe_server_on_signal,
    make_engine,
    make_http_server,
    make_request_spans,
    refresh_certificate,
)
from argosy_engine.api.http.http_server import HttpServer, ServerCertificate
from argosy_engine.api.request_relay import (
    RelayServer,
    RequestRelay,
    Stream,
    open_stream,
    read_frame,
    write_frame,
)
from argosy_engine.api.server_args import ServerArgs
from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.async_core_client import AsyncMPClient
from argosy_engine.core.proc.core_handle import ClientGroup, num_columns
from argosy_engine.distributed.parallel_config import api_server_name, name_process
from argosy_engine.errors import EngineDead, UtilityFailed
from argosy_engine.frontend.async_llm import AsyncLLM, SleepMode
from argosy_engine.osproc import (
    EXIT_TIMEOUT_S,
    SharedCounters,
    describe_exit,
    die_with_parent,
    dump_stacks_on_signal,
    end_child,
    make_shared_memory,
    parent_argument,
    raise_descriptor_limit,
)
from argosy_protocol.program.process import configure_logging, return_freed_memory

logger = logging.getLogger("argosy.api")

METRICS_TIMEOUT_S = 2.0
"""How long a process may take to tell its metrics, before its last ones are used."""

PING_INTERVAL_S = 5.0
"""How long a call is waited for before the process is asked whether it still answers, and again."""

PING_TIMEOUT_S = 10.0
"""An event loop that answers no ping for this long serves nobody."""


class Start(Struct):
    """The first message to a process: what to serve."""

    server_args: ServerArgs
    engine_args: EngineArgs
    num_processes: int
    started: int
    """When the engine started, in seconds since the epoch."""


class ConnectCore(Struct, tag="connect_core"):
    """Connect to the core of a rank, whose sockets are in a directory. Answered once its model is loaded."""

    rank: int
    directory: str


class Attach(Struct, tag="attach"):
    """All cores are connected: load the tokenizer, and serve."""


class GetMetrics(Struct, tag="get_metrics"):
    """Answer with `EngineMetrics.values`."""


class Sleep(Struct, tag="sleep"):
    """`AsyncLLM.follow_sleep`."""

    level: int
    mode: SleepMode


class Ping(Struct, tag="ping"):
    """Answer, to show that the process does not stand still."""


class Drain(Struct, tag="drain"):
    """Reject new requests. Answered once none is running."""


class Stop(Struct, tag="stop"):
    """Accept no more connections, and exit. Answers may take so long to be read."""

    last_bytes_s: float


Call = ConnectCore | Attach | GetMetrics | Sleep | Ping | Drain | Stop


class NumberedCall(Struct):
    number: int
    call: Call


class Answer(Struct):
    """The answer to the call of that number."""

    number: int
    error: str | None = None
    values: list[float] = []


class ProcessStandsStill(UtilityFailed):
    """A process exists and does not answer: it is stopped, swapped out, or stuck in a system call."""


class CallChannel:
    """The caller's end.

    Args:
        name: the other process's, for errors.
    """

    def __init__(self, name: str, stream: Stream) -> None:
        self._name = name
        self._reader, self._writer = stream
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[list[float]]] = {}
        self.is_closed = False

    async def call(self, call: Call) -> list[float]:
        """Call the process and return its answer. A task must be in `read` meanwhile.

        Raises:
            UtilityFailed: the call failed; the message names the process.
            EngineDead: the process ended.
        """
        if self.is_closed:
            raise self._gone()
        number = next(self._numbers)
        future: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            write_frame(self._writer, NumberedCall(number, call))
            return await future
        finally:
            del self._calls[number]

    async def call_unless_still(
        self, call: Call, *, interval_s: float = PING_INTERVAL_S, timeout_s: float = PING_TIMEOUT_S
    ) -> list[float]:
        """Call the process and return its answer, however long that takes while it answers pings.

        Args:
            interval_s: between pings.
            timeout_s: of a ping.

        Raises:
            ProcessStandsStill: it did not answer a ping. It carries the call out once it goes on.
            UtilityFailed, EngineDead: as `call`.
        """
        calling = asyncio.create_task(self.call(call), name=f"call of {self._name}")
        try:
            while not calling.done():
                await asyncio.wait({calling}, timeout=interval_s)
                if not calling.done():
                    async with asyncio.timeout(timeout_s):
                        await self.call(Ping())
            return await calling
        except TimeoutError:
            raise ProcessStandsStill(f"{self._name} has not answered for {timeout_s:g} s") from None
        finally:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)

    async def read(self) -> None:
        """Deliver the answers, until the process ends."""
        decoder = msgspec.msgpack.Decoder(Answer)
        try:
            while (payload := await read_frame(self._reader)) is not None:
                answer = decoder.decode(payload)
                future = self._calls.get(answer.number)
                if future is None or future.done():
                    continue  # nobody waits any more
                if answer.error is None:
                    future.set_result(answer.values)
                else:
                    future.set_exception(UtilityFailed(f"{self._name}: {answer.error}"))
        finally:
            self.is_closed = True
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(self._gone())

    def close(self) -> None:
        self._writer.close()

    def _gone(self) -> EngineDead:
        return EngineDead(f"{self._name} has ended")


async def answer_calls(stream: Stream, handle: Callable[[Call], Awaitable[list[float]]]) -> None:
    """Answer calls, each in a task of its own, until the caller ends. Closes the stream then.

    Args:
        handle: carries a call out and returns its values; an exception of it becomes the answer.
    """
    reader, writer = stream
    decoder = msgspec.msgpack.Decoder(NumberedCall)
    tasks: set[asyncio.Task[None]] = set()

    async def answer(numbered: NumberedCall) -> None:
        try:
            reply = Answer(numbered.number, values=await handle(numbered.call))
        except Exception as error:
            reply = Answer(numbered.number, str(error) or type(error).__name__)
        write_frame(writer, reply)

    try:
        while (payload := await read_frame(reader)) is not None:
            task = asyncio.create_task(answer(decoder.decode(payload)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        for task in tasks:
            task.cancel()
        writer.close()


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
                "argosy_engine.api.api_process",
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


class ApiProcess:
    """
    Args:
        index: from 1.
        relays: socket on which the first process receives streams of relayed requests.
        group: this process's view of all of them.
    """

    def __init__(self, start: Start, index: int, relays: socket.socket, group: ClientGroup) -> None:
        options, args = start.server_args, start.engine_args
        self._options = options
        self._num_ranks = args.data_parallel_size
        self._index = index
        self._group = group
        self._clients: dict[int, AsyncMPClient] = {}
        self._spans = make_request_spans(options, args)
        self._engine = make_engine(options, args, self._spans, start.started)
        self._tls = None if options.certificate is None else ServerCertificate(options.certificate)
        application = build_app(self._engine)
        app = RequestRelay(application, self._engine, relays)
        self._server: HttpServer = make_http_server(
            app, options, raise_descriptor_limit(), self._tls, self._engine.on_slow_client, application
        )
        self._stopped = asyncio.Event()
        self._last_bytes_s = 0.0

    async def serve(self, sockets: list[socket.socket]) -> None:
        """Serve until `Stop`."""
        describe_server_on_signal(asyncio.get_running_loop(), self._engine, list)
        serving = asyncio.create_task(self._server.serve(sockets), name="http")
        refreshing = asyncio.create_task(refresh_certificate(self._options, self._tls), name="certificate")
        stopping = asyncio.create_task(self._stopped.wait(), name="stop")
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        self._server.stop(self._last_bytes_s)
        for task in (refreshing, stopping):
            task.cancel()
        await asyncio.gather(refreshing, stopping, return_exceptions=True)
        await self._engine.close()
        for client in self._clients.values():
            await client.close()
        await asyncio.gather(serving, return_exceptions=True)
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)

    async def handle(self, call: Call) -> list[float]:
        """Carry out a call of the first process."""
        engine = self._engine
        match call:
            case ConnectCore():
                self._clients[call.rank] = await AsyncMPClient.attach(Path(call.directory), self._index)
            case Attach():
                clients = [self._clients.pop(rank) for rank in range(self._num_ranks)]
                engine.attach(await AsyncLLM.attach(clients, self._group), publishes=False)
            case GetMetrics():
                return engine.metric_values()
            case Sleep():
                await engine.loaded.follow_sleep(call.level, call.mode)
            case Ping():
                pass
            case Drain():
                await engine.drain()
            case Stop():
                self._last_bytes_s = call.last_bytes_s
                self._stopped.set()
        return []


async def _run(
    name: str,
    index: int,
    calls: socket.socket,
    relays: socket.socket,
    memory: int,
    sockets: list[socket.socket],
) -> None:
    stream = await open_stream(calls)
    payload = await read_frame(stream[0])
    if payload is None:
        return  # the first process has ended
    start = msgspec.msgpack.decode(payload, type=Start)
    configure_logging(start.server_args.log_level.upper(), process=name)
    width = num_columns(start.engine_args.data_parallel_size)
    counters = SharedCounters(memory, start.num_processes, index, width)
    os.close(memory)
    process = ApiProcess(start, index, relays, ClientGroup(start.num_processes, index, counters))
    answering = asyncio.create_task(answer_calls(stream, process.handle), name="calls")
    serving = asyncio.create_task(process.serve(sockets), name="serve")
    await asyncio.wait({answering, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        os._exit(1)  # the first process has ended
    answering.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await answering
    await serving


def main(argv: Sequence[str]) -> int:
    """Run the process. Whoever started it decides when it ends: signals of a terminal or group have no effect."""
    name, index, parent = argv[0], int(argv[1]), int(argv[2])
    calls, relays, memory, *listening = map(int, argv[3:])
    name_process(name)
    dump_stacks_on_signal()
    return_freed_memory()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    sockets = [socket.socket(fileno=descriptor) for descriptor in listening]
    uvloop.run(_run(name, index, socket.socket(fileno=calls), socket.socket(fileno=relays), memory, sockets))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
