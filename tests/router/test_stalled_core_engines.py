"""The core of a real engine is stopped under open streams: each stream moves and arrives whole."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from processes import Server

from .engine_processes import Stream, document
from .harness import rig

pytestmark = pytest.mark.timeout(300)  # for processes that start beside other work

STREAMS = 20


def descendants(pid: int) -> list[int]:
    """Processes that `pid` and its children have started."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


async def test_streams_leave_a_stopped_core(engines: list[Server]) -> None:
    async with rig(document=document(engines, 0), wait=False) as r:
        await r.until(lambda: all(replica.is_synced for replica in r.router.fleet.replicas()))
        undisturbed = await asyncio.gather(*(Stream(r, stream).read() for stream in range(STREAMS)))
        streams = [Stream(r, stream) for stream in range(STREAMS)]
        cores = descendants(engines[0].process.pid)
        assert cores
        begun = [asyncio.create_task(stream.read()) for stream in streams[: STREAMS // 2]]
        await asyncio.wait([asyncio.create_task(s.has_begun.wait()) for s in streams[: STREAMS // 2]])
        for pid in cores:
            os.kill(pid, signal.SIGSTOP)
        load = r.replica(0).load
        try:
            waiting = [asyncio.create_task(stream.read()) for stream in streams[STREAMS // 2 :]]
            await r.until(lambda: load.inflight == len(waiting) + sum(not task.done() for task in begun))
            r.discovery.set(document(engines, 1))
            async with asyncio.timeout(200):
                survived = await asyncio.gather(*begun, *waiting)
        finally:
            for pid in cores:
                os.kill(pid, signal.SIGCONT)
        assert survived == undisturbed
        assert r.metric('retries_total{model="tiny",reason="stalled"}') >= STREAMS // 2
        assert r.metric("interrupted_streams_total") == 0
        assert not r.replica(0).health.is_ejected
        await r.until(lambda: load.inflight == 0)
