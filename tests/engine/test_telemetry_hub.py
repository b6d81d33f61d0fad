"""The telemetry that the API process sends to routers, without an engine behind it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from argosy_engine.api.observability import telemetry
from argosy_engine.api.observability.telemetry import TelemetryHub
from argosy_engine.messages.core_messages import EngineCoreOutputs, SchedulerStats
from argosy_protocol.telemetry import FrameReader, Load
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
    async with asyncio.timeout(10):
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
