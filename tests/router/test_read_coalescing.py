"""Read coalescing: events of many fast streams are read together; few or slow streams never wait."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from argosy_router.config import ConfigError
from argosy_router.http.server_connection import MANY, ReadCoalescer
from argosy_router.main import build_parser, config_of

from .fake_engine import DONE, Connection, FakeEngine, Received, event
from .harness import DEADLINE_S, Rig, chat, rig

INTERVAL_S = 1.0
ROUNDS = 20


class Time:
    """Stands still but for naps and work."""

    def __init__(self) -> None:
        self.now = 100.0
        self.naps: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


def coalescer(time: Time, interval_s: float = INTERVAL_S) -> ReadCoalescer:
    made = ReadCoalescer(interval_s, now=lambda: time.now, sleep=time.sleep)
    send(made, MANY)  # the first interval begins
    return made


def send(to: ReadCoalescer, streams: int) -> None:
    for _ in range(streams):
        to.count_stream()


async def turn() -> None:
    """One of the loop."""
    await asyncio.sleep(0)


async def test_many_streams_wait_out_the_interval() -> None:
    time = Time()
    coalescing = coalescer(time)
    time.now += 0.25
    send(coalescing, 3 * MANY)
    assert time.naps == [], "what was sent in this turn leaves first"
    await turn()
    assert time.naps == [0.75]
    send(coalescing, MANY)
    await turn()
    assert time.naps == [0.75, 1.0]
    assert coalescing.pauses == 2


async def test_few_streams_never_wait() -> None:
    time = Time()
    coalescing = coalescer(time)
    send(coalescing, MANY - 1)
    await turn()
    assert time.naps == []


async def test_slow_streams_never_wait() -> None:
    time = Time()
    coalescing = coalescer(time)
    for _ in range(3 * MANY):
        time.now += INTERVAL_S / (MANY - 1)
        send(coalescing, 1)
        await turn()
    assert time.naps == []


async def test_a_busy_loop_never_waits() -> None:
    time = Time()
    coalescing = coalescer(time)
    send(coalescing, MANY)
    time.now += 2 * INTERVAL_S
    await turn()
    assert time.naps == []
    assert coalescing.pauses == 0


async def test_an_interval_of_zero_never_waits() -> None:
    time = Time()
    coalescing = coalescer(time, 0.0)
    send(coalescing, 3 * MANY)
    await turn()
    assert time.naps == []


async def speak(connection: Connection, _: Received) -> None:
    """One event per turn of the loop."""
    connection.begin_stream()
    for number in range(ROUNDS):
        connection.chunk(event(str(number)))
        await turn()
    connection.chunk(event("", "stop") + DONE)
    connection.end_stream()


async def streamed(r: Rig, streams: int) -> list[httpx.Response]:
    async with httpx.AsyncClient(base_url=r.router.url, timeout=DEADLINE_S) as http:
        asked = (http.post("/v1/chat/completions", json=chat(stream=True)) for _ in range(streams))
        return await asyncio.gather(*asked)


def naps_of(r: Rig) -> list[float]:
    """The router's pauses from now on, none of which it takes."""
    naps: list[float] = []
    r.router.server.read_coalescer = ReadCoalescer(
        DEADLINE_S, sleep=naps.append
    )  # an interval that all of the test is within
    return naps


async def test_many_streams_arrive_whole() -> None:
    async with rig([FakeEngine(script=speak)]) as r:
        naps = naps_of(r)
        answers = await streamed(r, 2 * MANY)
        assert r.metric("stream_pauses_total") == len(naps) > 0
    told = b"".join(event(str(number)) for number in range(ROUNDS)) + event("", "stop") + DONE
    assert {answer.content for answer in answers} == {told}
    assert all(0.0 < nap <= DEADLINE_S for nap in naps)


async def test_a_stream_counts_once_however_fast_it_is() -> None:
    async with rig([FakeEngine(script=speak)]) as r:
        naps = naps_of(r)
        await streamed(r, MANY - 1)
        assert naps == []


@pytest.mark.parametrize("asked", ["-1", "10001"])
def test_the_interval_is_bounded(asked: str) -> None:
    flags = ["--replica", "http://a:1", f"--stream-moderation-us={asked}"]
    with pytest.raises(ConfigError, match="--stream-moderation-us"):
        config_of(build_parser().parse_args(flags), {})
    flags[-1] = "--stream-moderation-us=250"
    assert config_of(build_parser().parse_args(flags), {}).server.stream_moderation_us == 250
