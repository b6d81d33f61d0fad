"""Compare the CPU time per request of our router and of sglang-router, in alternating runs over mock engines.

    python bench/router/overhead.py [--runs 3] [--requests 3000] [--connections 16] [--processes 1] [--telemetry]
        [--compiled FOLDER] [--floor] [--sglang PYTHON] [--workloads NAME...] [-o FILE]

`--sglang` is the interpreter of an environment with `sglang-router` installed; without it only ours is measured. With
`--telemetry` the engines announce their caches to our router; without, it treats them as engines other than ours. With
`--compiled` our router also runs from FOLDER, an unpacked wheel of `make wheel`. `--floor` adds two baselines: a proxy
that only copies bytes (tcp_passthrough.py), and requests sent to an engine directly. With `--processes` so many routers
of each kind run at once, and the connections are divided among them. Each run starts new routers, warms them up, and
sends the same bodies; figures are medians over the runs. Absolute figures depend on the machine and drift, so compare
the ratios. `per core` is what one core can do, and so one process of ours, which uses one: the inverse of the CPU time.
A machine does as many times that as it has cores, with any of them: as threads of one process or as processes.

A burst of a stream's events is answered at once, which no engine does; those of `paced stream` come 20 ms apart, as an
engine's do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, product
from pathlib import Path
from typing import NamedTuple

import httptools
import uvloop

HERE = Path(__file__).resolve().parent
ENGINES = 4
EVENTS = 32


class Workload(NamedTuple):
    """What is asked for."""

    words: int
    stream: bool = False
    interval_s: float = 0.0
    """Between the events of a stream."""
    connections: int = 0
    """In place of `--connections`."""
    share: int = 1
    """One in so many of `--requests` is sent."""


WORKLOADS = {
    "20 words": Workload(20),
    "1000 words": Workload(1000),
    "32-event stream": Workload(20, stream=True, share=4),
    "paced stream": Workload(20, stream=True, interval_s=0.02, connections=256, share=2),
    "100 KB": Workload(17_000, share=4),
}
KEY = "sk-benchmark"
"""API key of every request. Our router checks it; sglang-router passes it on."""
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: b\r\nauthorization: Bearer " + KEY.encode() + b"\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
PREFIXES = 50
STARTUP_S = 60.0
COMPILED = "compiled"
"""Our router, compiled to machine code."""
DIRECT = "no router"
"""Requests sent to an engine directly."""
FLOOR = "bytes copied"
"""A proxy that only copies bytes (tcp_passthrough.py)."""
LOAD_TIMEOUT_S = 120.0


@dataclass
class Result:
    """One run of one workload through one router."""

    cpu_us: float
    kernel_us: float
    """The part of `cpu_us` spent in the kernel."""
    p50_ms: float
    p99_ms: float
    requests_per_s: float
    errors: int


def bodies(words: int, stream: bool, count: int) -> list[bytes]:
    """Return request bodies whose prompts begin with one of `PREFIXES` prefixes and end differently."""
    rng = random.Random(0)
    vocabulary = ["".join(rng.choices("abcdefghij", k=5)) for _ in range(2000)]
    prefixes = [" ".join(rng.choices(vocabulary, k=words)) for _ in range(PREFIXES)]
    return [
        json.dumps(
            {
                "model": "tiny",
                "prompt": rng.choice(prefixes) + " " + " ".join(rng.choices(vocabulary, k=20)),
                "max_tokens": 32,
                "stream": stream,
            }
        ).encode()
        for _ in range(count)
    ]


class Client(asyncio.Protocol):
    """One keep-alive connection that sends one body after another."""

    def __init__(self, work: Iterator[bytes], latencies: list[float], counts: dict[str, int]) -> None:
        self._work = work
        self._latencies = latencies
        self._counts = counts
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._next()

    def _next(self) -> None:
        body = next(self._work, None)
        if body is None:
            self._transport.close()
            if not self.done.done():
                self.done.set_result(None)
            return
        self._parser = httptools.HttpResponseParser(self)
        self._bytes = 0
        self._started = time.perf_counter()
        self._transport.write(HEAD % len(body) + body)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._is_complete = False
        self._parser.feed_data(data)
        if self._is_complete:
            self._latencies.append(time.perf_counter() - self._started)
            if self._parser.get_status_code() != 200 or self._bytes < 100:
                self._counts["errors"] += 1
            self._next()

    def on_body(self, data: bytes) -> None:
        self._bytes += len(data)

    def on_message_complete(self) -> None:
        self._is_complete = True

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self._counts["errors"] += 1
            self.done.set_result(None)


async def load(ports: list[int], requests: list[bytes], connections: int) -> tuple[list[float], int, float]:
    """Send all requests; returns latencies, the number of errors, and the elapsed seconds."""
    loop = asyncio.get_running_loop()
    work = iter(requests)
    latencies: list[float] = []
    counts = {"errors": 0}
    started = time.perf_counter()
    clients = [
        (await loop.create_connection(lambda: Client(work, latencies, counts), "127.0.0.1", port))[1]
        for _, port in zip(range(connections), cycle(ports), strict=False)
    ]
    async with asyncio.timeout(LOAD_TIMEOUT_S):
        await asyncio.gather(*(client.done for client in clients))
    return latencies, counts["errors"], time.perf_counter() - started


def cpu_seconds(root: int) -> tuple[float, float]:
    """Return the user and system time of a process and its descendants so far."""
    parents: dict[int, int] = {}
    times: dict[int, tuple[int, int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry)] = int(fields[1])
            times[int(entry)] = int(fields[11]), int(fields[12])
    family = {root}
    grown = True
    while grown:
        grown = False
        for process, parent in parents.items():
            if parent in family and process not in family:
                family.add(process)
                grown = True
    ticks = os.sysconf("SC_CLK_TCK")
    user, system = (sum(times.get(process, (0, 0))[mode] for process in family) / ticks for mode in (0, 1))
    return user, system


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listening.getsockname()[1] for listening in sockets]
    for listening in sockets:
        listening.close()
    return ports


@contextmanager
def process(*command: str, path: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Run a command until the block ends, with `path` as its PYTHONPATH if given."""
    child = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
        env={**os.environ, **({"PYTHONPATH": path} if path else {})},
    )
    try:
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def wait_until_answering(port: int) -> None:
    """Wait until one completion succeeds."""
    body = bodies(5, False, 1)[0]
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        body,
        {"content-type": "application/json", "authorization": f"Bearer {KEY}"},
    )
    deadline = time.monotonic() + STARTUP_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as response:
                if response.status == 200:
                    return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def command(router: str, sglang: str, port: int, engines: list[int], admin_port: int = -1) -> list[str]:
    urls = [f"http://127.0.0.1:{engine}" for engine in engines]
    if router in ("argosy", COMPILED):
        replicas = [part for url in urls for part in ("--replica", url)]
        return [
            sys.executable,
            *("-m", "argosy_router.main", "--port", str(port), "--admin-port", str(admin_port)),
            *("--api-key", KEY),
            *replicas,
        ]
    if router == FLOOR:
        return [sys.executable, str(HERE / "tcp_passthrough.py"), str(port), *map(str, engines)]
    return [
        sglang,
        *("-m", "sglang_router.launch_router", "--port", str(port), "--policy", "cache_aware"),
        *("--prometheus-port", str(free_ports(1)[0])),  # by default all have the same
        *("--worker-urls", *urls),
    ]


def measure(router: str, workload: Workload, requests: list[bytes], arguments: argparse.Namespace) -> Result:
    count = 1 if router == DIRECT else arguments.processes
    connections = workload.connections or arguments.connections
    *ports, engine = free_ports(count + ENGINES)
    engines = [engine, *ports[count:]]
    ports = ports[:count]
    mocks = [sys.executable, str(HERE / "mock_engine.py"), ",".join(map(str, engines))]
    mocks += ["--events", str(EVENTS), "--interval", str(workload.interval_s)]
    if arguments.telemetry:
        mocks.append("--telemetry")
    with ExitStack() as stack:
        children = [stack.enter_context(process(*mocks))]
        if router == DIRECT:
            ports = engines[:1]
        else:
            path = arguments.compiled if router == COMPILED else ""
            children = [
                stack.enter_context(process(*command(router, arguments.sglang, port, engines), path=path))
                for port in ports
            ]
        for port in ports:
            wait_until_answering(port)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(load(ports, requests[: len(requests) // 5], connections))
            before = [cpu_seconds(child.pid) for child in children]
            latencies, errors, seconds = runner.run(load(ports, requests, connections))
        after = [cpu_seconds(child.pid) for child in children]
        user, system = (
            sum(now[mode] - then[mode] for now, then in zip(after, before, strict=True)) for mode in (0, 1)
        )
    latencies.sort()
    sent = len(requests)
    return Result(
        cpu_us=(user + system) / sent * 1e6,
        kernel_us=system / sent * 1e6,
        p50_ms=latencies[len(latencies) // 2] * 1e3,
        p99_ms=latencies[int(len(latencies) * 0.99)] * 1e3,
        requests_per_s=sent / seconds,
        errors=errors,
    )


def median(results: list[Result]) -> Result:
    return Result(
        **{
            name: statistics.median(getattr(result, name) for result in results)
            for name in asdict(results[0])
        }
    )


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--telemetry", action="store_true")
    parser.add_argument("--compiled", default="", metavar="FOLDER")
    parser.add_argument("--floor", action="store_true")
    parser.add_argument("--sglang", default="", metavar="PYTHON")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    ours = ["argosy"] + [COMPILED] * bool(arguments.compiled)
    others = [DIRECT, FLOOR] * arguments.floor + ["sglang-router"] * bool(arguments.sglang)
    routers = [*ours, *others]
    table: dict[str, dict[str, Result]] = {}
    for name in arguments.workloads:
        workload = WORKLOADS[name]
        requests = bodies(workload.words, workload.stream, arguments.requests // workload.share)
        results: dict[str, list[Result]] = {router: [] for router in routers}
        for _ in range(arguments.runs):
            for router in routers:
                results[router].append(measure(router, workload, requests, arguments))
        table[name] = {router: median(runs) for router, runs in results.items()}
        for router, result in table[name].items():
            each = EVENTS if workload.stream else 1
            unit = "events" if workload.stream else "requests"
            per_core = each * 1e6 / result.cpu_us if result.cpu_us else 0.0
            print(
                f"{name:16} {router:14} CPU {result.cpu_us:6.1f} us/request, kernel {result.kernel_us:6.1f}  "
                f"p50 {result.p50_ms:6.2f} ms  p99 {result.p99_ms:6.2f} ms  "
                f"{result.requests_per_s:7.0f}/s  per core {per_core:7.0f} {unit}/s  errors {result.errors:g}"
            )
        for own, other in product(ours, others):
            mine, theirs = table[name][own], table[name][other]
            print(
                f"{name:16} {own} / {other}: CPU {mine.cpu_us / theirs.cpu_us:.2f}  "
                f"p50 {mine.p50_ms / theirs.p50_ms:.2f}"
            )
    if arguments.output:
        arguments.output.write_text(
            json.dumps({w: {r: asdict(x) for r, x in row.items()} for w, row in table.items()}, indent=1)
        )


if __name__ == "__main__":
    main()
