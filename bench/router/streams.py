"""Run thousands of concurrent streams through one router.

    python bench/router/streams.py [--streams 5000] [--events 20] [--interval 1.0] [--open-rate 500] [-o FILE]

Two engines in a separate process send each stream one event per interval. The client opens the streams at the given
rate and checks that each gets all its events, in order and once, and ends properly. Events carry the time at which they
were sent (one machine, one clock), which gives their delay through router and client. Exits with 1 if a stream failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import httptools
import uvloop

from argosy_router.config import RouterConfig
from argosy_router.server import Router

ENGINES = 2
MODEL = "tiny"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1}]}).encode()
DONE = b"data: [DONE]\n\n"
STARTUP_S = 60.0
PATIENCE_S = 60.0
"""Added to the streams' timeout, which is four times their nominal duration."""


def raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# engines


class Engine(asyncio.Protocol):
    """One connection to a mock engine. `streams` maps open streams to the number of their next event."""

    def __init__(self, streams: dict[Engine, int]) -> None:
        self._streams = streams
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_message_complete(self) -> None:
        if self._path == b"/v1/completions":
            self.transport.write(STREAM_HEAD)
            self._streams[self] = 0
        elif self._path in (b"/v1/models", b"/health"):
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(MODELS), MODELS))
        else:
            self.transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")


async def send_events(streams: dict[Engine, int], events: int, interval: float) -> None:
    """Send one event per interval to each stream, spread over the interval to avoid bursts."""
    while True:
        started = time.monotonic()
        waiting = list(streams)
        for turn, engine in enumerate(waiting):
            if turn % 50 == 0:
                await asyncio.sleep(max(0.0, started + interval * turn / len(waiting) - time.monotonic()))
            number = streams.get(engine)
            if number is None:
                continue
            data = b"data: %d %.6f\n\n" % (number, time.monotonic())
            engine.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
            streams[engine] = number + 1
            if number + 1 == events:
                engine.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE))
                del streams[engine]
        await asyncio.sleep(max(0.0, started + interval - time.monotonic()))


def engine_process(pipe: Connection, events: int, interval: float) -> None:
    async def serve() -> None:
        streams: dict[Engine, int] = {}
        loop = asyncio.get_running_loop()
        servers = [
            await loop.create_server(lambda: Engine(streams), "127.0.0.1", 0, backlog=4096)
            for _ in range(ENGINES)
        ]
        pipe.send([server.sockets[0].getsockname()[1] for server in servers])
        await send_events(streams, events, interval)

    raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


# router


def router_process(pipe: Connection, ports: list[int]) -> None:
    async def serve() -> None:
        urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
        router = Router(RouterConfig(replicas=urls, port=0, admin_port=-1, access_log=False))
        async with router.serving():
            async with asyncio.timeout(STARTUP_S):
                while sum(replica.is_routable for replica in router.fleet.replicas()) < len(ports):
                    await asyncio.sleep(0.01)
            pipe.send(router.address[1])
            await asyncio.Event().wait()

    raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


# client


class Stream(asyncio.Protocol):
    """One client stream, checked as it arrives."""

    def __init__(self, number: int, events: int) -> None:
        self.delays: list[float] = []
        self.outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._body = json.dumps({"model": MODEL, "prompt": f"stream {number}", "stream": True}).encode()
        self._events = events
        self._parser = httptools.HttpResponseParser(self)
        self._text = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        transport.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: b\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(self._body), self._body)
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"cut off after {len(self.delays)} events")

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        now = time.monotonic()
        *events, self._text = (self._text + data).split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                continue
            number, sent = event.removeprefix(b"data: ").split(b" ")[:2]
            if number != b"%d" % len(self.delays):
                self._end(f"expected event {len(self.delays)}, got {event[:80]!r}")
            self.delays.append(now - float(sent))

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        is_whole = status == 200 and len(self.delays) == self._events and not self._text
        self._end("ok" if is_whole else f"status {status}, {len(self.delays)} events")
        self._transport.close()

    def _end(self, outcome: str) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


async def drive(port: int, router_pid: int, arguments: argparse.Namespace) -> dict[str, object]:
    """Open the streams, wait for all of them, and return the figures."""
    loop = asyncio.get_running_loop()
    idle_bytes, idle_cpu = resident(router_pid), cpu(router_pid)
    streams: list[Stream] = []
    started = time.monotonic()
    for number in range(arguments.streams):
        await asyncio.sleep(max(0.0, started + number / arguments.open_rate - time.monotonic()))
        stream = Stream(number, arguments.events)
        streams.append(stream)
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)
    peak = 0
    async with asyncio.timeout(arguments.events * arguments.interval * 4 + PATIENCE_S):
        while not all(stream.outcome.done() for stream in streams):
            peak = max(peak, resident(router_pid))
            await asyncio.sleep(0.2)
    outcomes = Counter(stream.outcome.result() for stream in streams)
    delays = sorted(delay for stream in streams for delay in stream.delays)
    return {
        "streams": arguments.streams,
        "failed": arguments.streams - outcomes["ok"],
        "outcomes": dict(outcomes.most_common(5)),
        "events": len(delays),
        "delay_p50_ms": round(delays[len(delays) // 2] * 1e3, 2) if delays else None,
        "delay_p99_ms": round(delays[int(len(delays) * 0.99)] * 1e3, 2) if delays else None,
        "router_cpu_us_per_event": round((cpu(router_pid) - idle_cpu) / max(1, len(delays)) * 1e6, 1),
        "router_bytes_per_stream": (peak - idle_bytes) // arguments.streams,
    }


def resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu(pid: int) -> float:
    """Return a process's CPU seconds so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=5000)
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between a stream's events")
    parser.add_argument("--open-rate", type=float, default=500.0, help="streams opened per second")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    raise_file_limit()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    engines = context.Process(
        target=engine_process, args=(theirs, arguments.events, arguments.interval), daemon=True
    )
    engines.start()
    router = None
    try:
        ports = ours.recv()
        router = context.Process(target=router_process, args=(theirs, ports), daemon=True)
        router.start()
        port = ours.recv()
        assert router.pid is not None
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(drive(port, router.pid, arguments))
    finally:
        for process in (engines, router):
            if process is not None:
                process.terminate()
                process.join()
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n")
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
