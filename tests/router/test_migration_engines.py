"""A real engine ends under 50 open streams, killed or told to: each client gets what an undisturbed run says."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict

import pytest

from processes import Server

from .engine_processes import (
    STREAMS,
    Stream,
    calls,
    document,
)
from .harness import rig

pytestmark = pytest.mark.timeout(300)  # for processes that start beside other work


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_fifty_streams_survive(engines: list[Server], number: signal.Signals) -> None:
    async with rig(document=document(engines, 0), wait=False) as r:
        await r.until(lambda: all(replica.is_synced for replica in r.router.fleet.replicas()))
        undisturbed = await asyncio.gather(*(Stream(r, stream).read() for stream in range(STREAMS)))
        streams = [Stream(r, stream) for stream in range(STREAMS)]
        pid, load = engines[0].process.pid, r.replica(0).load
        os.kill(
            pid, signal.SIGSTOP
        )  # until all have asked: so all begin together, and none is over when it dies
        reading = asyncio.gather(*(stream.read() for stream in streams))
        await r.until(lambda: load.inflight == STREAMS)
        os.kill(pid, signal.SIGCONT)
        begun = asyncio.gather(*(stream.has_begun.wait() for stream in streams))
        await asyncio.wait({begun, reading}, return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            begun.cancel()
            await asyncio.gather(begun, return_exceptions=True)
            await reading  # a stream that was refused never begins: say why, instead of waiting for it
        r.discovery.set(document(engines, 1))
        os.kill(pid, number)
        survived = await reading
        moved = r.metric('migrations_total{model="tiny",outcome="resumed"}')
        assert moved >= STREAMS // 2, "the others had said all before the engine died"
        assert r.metric("interrupted_streams_total") == 0
    for (kind, _, body), expected, told in zip(calls(), undisturbed, survived, strict=True):
        assert told == expected, (kind, body)
    finishes: dict[str, set[str]] = defaultdict(set)
    for (kind, *_), told in zip(calls(), survived, strict=True):
        finishes[kind].update(*told["finish_reason"].values())
    assert finishes["a tool call"] == {"tool_calls"}
    assert "stop" in finishes["JSON schema"]
    assert "stop" in finishes["stop strings"]
