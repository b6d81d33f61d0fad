"""The telemetry that the API process sends to routers, without an engine behind it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from argosy_engine.api.observability import telemetry
from argosy_engine.api.observability.telemetry import TelemetryHub
from argosy_engine.messages import ChunkEnd, EngineCoreOutputs, ResidencyDelta, SchedulerStats
from argosy_protocol.telemetry import MAX_FRAME_BYTES, Frame, FrameReader, Hello, Load, Removed, unpack_u64
from telemetry_hubs import make_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a hub whose heartbeat stays out of the way."""
    monkeypatch.setattr(telemetry, "HEARTBEAT_INTERVAL_S", 3600.0)
    monkeypatch.setattr(telemetry, "LOAD_INTERVAL_S", 0.02)

    return make_hub


class AskedLLM:
    """Counts how often its heartbeat's age is read, which is once for each load frame."""

    asked = 0

    @property
    def heartbeat_age_s(self) -> float:
        self.asked += 1
        return 0.0


def running(count: int) -> EngineCoreOutputs:
    return EngineCoreOutputs(stats=SchedulerStats(num_running=count))


async def test_the_last_load_is_always_sent(hub: Any) -> None:
    made: TelemetryHub = hub()
    reader, heard = FrameReader(), []

    async def listen() -> None:
        async for data in made.stream():
            heard.extend(frame.num_running for frame in reader.feed(data) if isinstance(frame, Load))
            if len(heard) > 1 and heard[-1] == 0:
                return

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0)
    for count in (1, 5, 4, 3, 2, 1, 0):
        made.on_core_outputs(running(count))
    async with asyncio.timeout(60):
        await listening
    assert len(heard) <= 4, "and those between may be left out"
    made.close()


async def test_nothing_is_sent_after_the_end(hub: Any) -> None:
    llm = AskedLLM()
    made: TelemetryHub = hub(llm)
    stream = made.stream()
    await anext(stream)
    made.on_core_outputs(running(1))
    made.on_core_outputs(running(0))
    made.close()
    asked, has_passed = llm.asked, asyncio.Event()
    asyncio.get_running_loop().call_later(telemetry.LOAD_INTERVAL_S, has_passed.set)  # after the load was due
    await has_passed.wait()
    assert llm.asked == asked
    await stream.aclose()


async def frames_of(hub: TelemetryHub, count: int) -> list[Frame]:
    """The first frames that a new reader gets."""
    reader, frames, stream = FrameReader(), [], hub.stream()
    async with asyncio.timeout(60):
        while len(frames) < count:
            frames += reader.feed(await anext(stream))
    await stream.aclose()
    return frames


async def test_a_stream_that_begins_after_the_end_ends_at_once(hub: Any) -> None:
    made: TelemetryHub = hub()
    made.drain()
    made.close()
    async with asyncio.timeout(60):
        frames = [data async for data in made.stream()]
    assert isinstance(next(iter(FrameReader().feed(frames[0]))), Hello)


async def test_the_load_of_several_cores_is_that_of_one_replica(hub: Any) -> None:
    made: TelemetryHub = hub(num_engines=3)
    reports = (
        SchedulerStats(
            num_running=3,
            num_waiting=1,
            queued_uncached_tokens=900,
            kv_cache_usage=0.9,
            prefill_tokens_per_s=4000.0,
            decode_step_s=0.02,
            longest_step_s=0.5,
            num_yielding=2,
        ),
        SchedulerStats(num_running=2, prefill_tokens_per_s=2000.0, longest_step_s=2.0),
    )
    for rank, stats in enumerate(reports):
        made.on_core_outputs(EngineCoreOutputs(stats=stats, engine_index=rank))
    hello, _, load = await frames_of(made, 3)
    assert isinstance(hello, Hello)
    assert (hello.data_parallel_size, hello.max_num_seqs, hello.kv_cache_tokens) == (3, 3, 300)
    assert isinstance(load, Load)
    assert (load.num_running, load.num_waiting, load.num_yielding) == (5, 1, 2)
    assert (load.queued_uncached_tokens, load.kv_usage) == (900, pytest.approx(0.3))
    assert (load.prefill_tokens_per_s, load.decode_step_s) == (3000.0, 0.02), "of one core; not of unmeasured"
    assert load.longest_step_s == 2.0
    made.close()


async def test_many_removals_are_sent_in_frames_of_bounded_size(hub: Any) -> None:
    """A core of several that drops its whole cache removes what the others do not hold."""
    made: TelemetryHub = hub()
    chunks = list(range(2 * MAX_FRAME_BYTES // 8))
    stored = ResidencyDelta(stored=[ChunkEnd(chunk, 16) for chunk in chunks[:10]])
    made.on_core_outputs(EngineCoreOutputs(residency=stored))
    stream = made.stream()
    for _ in range(3):
        await anext(stream)
    made.on_core_outputs(EngineCoreOutputs(residency=ResidencyDelta(removed=chunks)))
    reader, removed = FrameReader(), list[int]()
    async with asyncio.timeout(60):
        while len(removed) < len(chunks):
            for frame in reader.feed(await anext(stream)):
                assert isinstance(frame, Removed)
                removed += unpack_u64(frame.hashes)
    assert removed == chunks
    made.close()
    await stream.aclose()


async def test_many_readers_are_served_and_loads_become_rarer(hub: Any) -> None:
    """All of them together get no more load frames in a second than `PACED_READERS` do."""
    made: TelemetryHub = hub()
    streams = []
    for number in range(telemetry.MAX_READERS):
        assert made.has_room
        stream = made.stream()
        await anext(stream)
        streams.append(stream)
        expected = telemetry.LOAD_INTERVAL_S * max(1.0, (number + 1) / telemetry.PACED_READERS)
        assert made.load_interval_s == pytest.approx(expected)
    assert not made.has_room
    for stream in streams:
        await stream.aclose()
    assert made.has_room
    assert made.load_interval_s == telemetry.LOAD_INTERVAL_S
    made.close()
