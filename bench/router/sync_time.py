"""Measure how long a starting router takes to fill its prefix index from its engines.

    python bench/router/sync_time.py [--runs 3] [--chunks 250000]

Four engines hold CHUNKS random chunks each (of 64 tokens) and announce them to a router that starts. Times count from
the start of its process; the figures are medians of the runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import statistics
import time
import urllib.error
import urllib.request
from multiprocessing.connection import Connection

import uvloop
from mock_engine import MockEngine, idle
from overhead import command, free_ports, process
from telemetry_announcer import Announcer

ENGINES = 4
DEADLINE_S = 120.0
STATES = "argosy_router_replica_state{"
CHUNKS = "argosy_router_index_chunks{"


async def announce(ports: list[int], chunks: int, ready: Connection) -> None:
    """Serve engines that hold chunks from the beginning."""
    rng = random.Random(0)
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        for port in ports:
            held = {rng.getrandbits(64): 64 * (number % 64 + 1) for number in range(chunks)}
            announcer = Announcer(str(port), idle, kv_cache_tokens=64 * chunks, max_num_seqs=256)
            announcer.announce(list(held), list(held.values()))
            tasks.create_task(announcer.report_load())
            await loop.create_server(lambda a=announcer: MockEngine(1, a), "127.0.0.1", port)
        ready.send(None)
        await asyncio.Event().wait()


def engines(ports: list[int], chunks: int, ready: Connection) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(announce(ports, chunks, ready))


def read(port: int) -> str:
    """Return the metrics at a router's admin port; empty until it answers."""
    with contextlib.suppress(urllib.error.URLError, ConnectionError):
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S).read().decode()
    return ""


def sample(metrics: str, name: str) -> list[tuple[str, float]]:
    lines = (line.rpartition(" ") for line in metrics.splitlines() if line.startswith(name))
    return [(labels, float(value)) for labels, _, value in lines]


def start(port: int, chunks: int) -> tuple[float, float]:
    """Return the seconds until the router answers, and until it knows `chunks` chunks and all engines are synced."""
    started = time.monotonic()
    answers_after = 0.0
    while (passed := time.monotonic() - started) < DEADLINE_S:
        metrics = read(port)
        if metrics and not answers_after:
            answers_after = passed
        known = sum(value for _, value in sample(metrics, CHUNKS))
        synced = [labels for labels, value in sample(metrics, STATES) if value and 'state="synced"' in labels]
        if known >= chunks and len(synced) == ENGINES:
            return answers_after, passed
        time.sleep(0.02)
    raise SystemExit("the router did not get all chunks")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=250_000)
    arguments = parser.parse_args()
    *ports, router, admin = free_ports(ENGINES + 2)
    ours, theirs = multiprocessing.Pipe()
    playing = multiprocessing.Process(target=engines, args=(ports, arguments.chunks, theirs), daemon=True)
    playing.start()
    ours.recv()
    took = []
    for _ in range(arguments.runs):
        with process(*command("argosy", "", router, ports, admin), path=os.environ.get("PYTHONPATH", "")):
            took.append(start(admin, ENGINES * arguments.chunks))
    answers, knows = (statistics.median(seconds) for seconds in zip(*took, strict=True))
    print(f"answers after {answers:.2f} s, knows {ENGINES * arguments.chunks} chunks after {knows:.2f} s")
    playing.kill()


if __name__ == "__main__":
    main()
