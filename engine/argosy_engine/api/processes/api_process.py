"""ApiProcess: a further API process of an engine.

Its arguments are NAME INDEX PARENT CALLS RELAYS COUNTERS SOCKET... (`process_group` starts it).
All from CALLS on are descriptors that it inherits from the first process: the sockets of calls and of relayed requests,
the shared counters, and the listening sockets.

It ends with the first process, whose calls end then, and otherwise only when it is told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop

from argosy_engine.api.app import build_app
from argosy_engine.api.flagged_engine import make_engine, make_request_spans
from argosy_engine.api.http.http_server import HttpServer
from argosy_engine.api.http.tls import ServerCertificate
from argosy_engine.api.http_service import make_http_server, refresh_certificate
from argosy_engine.api.processes.call_channel import answer_calls
from argosy_engine.api.processes.frames import open_stream, read_frame
from argosy_engine.api.processes.process_messages import (
    Attach,
    Call,
    ConnectCore,
    Drain,
    GetMetrics,
    Ping,
    Sleep,
    Start,
    Stop,
)
from argosy_engine.api.processes.request_relay import RequestRelay
from argosy_engine.api.server_debug_signal import describe_server_on_signal
from argosy_engine.core.proc.async_core_client import AsyncMPClient
from argosy_engine.core.proc.client_group import ClientGroup, num_columns
from argosy_engine.distributed.process_name import name_process
from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_engine.osproc.child_process import die_with_parent
from argosy_engine.osproc.debug_signal import dump_stacks_on_signal
from argosy_engine.osproc.file_descriptors import raise_limit
from argosy_engine.osproc.shared_counters import SharedCounters
from argosy_protocol.program.freed_memory import return_freed_memory
from argosy_protocol.program.log_format import configure_logging


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
            app, options, raise_limit(), self._tls, self._engine.on_slow_client, application
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
