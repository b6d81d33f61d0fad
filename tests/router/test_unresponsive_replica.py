"""A replica that stops without dying (SIGSTOP, a frozen machine): connections stay open, nothing answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial
from itertools import pairwise

import pytest

from argosy_protocol.telemetry import Load
from argosy_router.fleet import telemetry
from argosy_router.fleet.health import SUSPECT_STEP_AGE_S
from argosy_router.http import deadlines
from argosy_router.http.upstream import FirstByteTimeout

from .fake_engine import Connection, FakeEngine, Received, Script, answer_normally, event
from .harness import DEADLINE_S, Rig, StoppedClock, raw, rig
from .raw_requests import request_bytes


class Mortal(FakeEngine):
    """Until it is stopped; then it accepts connections and does nothing."""

    is_stopped = False

    def __init__(self, script: Script = answer_normally) -> None:
        super().__init__(script=script)
        self.held: list[Connection] = []
        """Connections with requests that it does not answer."""

    async def handle(self, connection: Connection, request: Received) -> None:
        if self.is_stopped:
            if request.path.startswith("/v1/"):
                self.requests.append(request)
                self.held.append(connection)
            await connection.gone()
            return
        await super().handle(connection, request)

    def break_connections(self) -> None:
        """What happens to requests when its process is killed."""
        for connection in self.held:
            connection.die()


@contextlib.asynccontextmanager
async def mortals(*engines: Mortal) -> AsyncIterator[Rig]:
    async with rig(engines, policy="round-robin", clock=StoppedClock()) as r:
        yield r


@pytest.fixture(autouse=True)
def heartbeats_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "STALE_AFTER_S", telemetry.HEAD_TIMEOUT_S)


async def miss_heartbeats(r: Rig) -> None:
    """So much time passes that r0 is missed. The other one has a heartbeat meanwhile."""
    for _ in range(2):
        await r.pass_time(telemetry.STALE_AFTER_S / 2)
        for number in range(1, len(r.engines)):
            replica = r.replica(number)
            heard_at = replica.heard_at
            r.engines[number].announce(Load(core_step_age_s=0.0))
            await r.until(lambda replica=replica, heard_at=heard_at: replica.heard_at != heard_at)


async def test_requests_it_has_not_begun_to_answer_move_on() -> None:
    engines = Mortal(), Mortal()
    async with mortals(*engines) as r:
        engines[0].is_stopped = True
        asked = [asyncio.create_task(r.chat(str(n), stream=n % 2 == 1)) for n in range(8)]
        await r.until(lambda: len(engines[0].requests) + sum(each.done() for each in asked) >= len(asked))
        await miss_heartbeats(r)
        answers = await asyncio.gather(*asked)
        assert {answer.status_code for answer in answers} == {200}
        assert engines[0].requests, "some were sent to it"
        assert {answer.headers["x-argosy-replica"] for answer in answers} == {"r1"}
        assert r.metric('retries_total{model="tiny",reason="first_byte_timeout"}') == len(engines[0].requests)
        sent = len(engines[0].requests)
        assert {(await r.chat(str(n))).headers["x-argosy-replica"] for n in range(6)} == {"r1"}
        assert len(engines[0].requests) == sent, "a suspect gets nothing new"


async def test_a_head_alone_does_not_keep_a_stream() -> None:
    async def begin(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        await connection.gone()

    engines = Mortal(script=begin), Mortal()
    async with mortals(*engines) as r:
        asked = [asyncio.create_task(r.chat(str(n), stream=True)) for n in range(4)]
        await r.until(lambda: len(engines[0].requests) + sum(each.done() for each in asked) >= len(asked))
        assert engines[0].requests
        engines[0].is_stopped = True
        await miss_heartbeats(r)
        assert {(await answer).headers["x-argosy-replica"] for answer in asked} == {"r1"}


async def test_an_unresponsive_replica_is_used_again_once_it_continues() -> None:
    engines = Mortal(), Mortal()
    async with mortals(*engines) as r:
        engines[0].is_stopped = True
        connections = engines[0].connections
        await miss_heartbeats(r)
        assert r.replica(0).health.is_suspect
        await r.until(lambda: engines[0].connections > connections)
        engines[0].is_stopped = False
        for writer in list(engines[0].writers):
            writer.transport.abort()
        await r.until_state(0, "synced")
        assert {(await r.chat(str(n))).headers["x-argosy-replica"] for n in range(4)} == {"r0", "r1"}


async def test_without_another_replica_requests_keep_waiting() -> None:
    engine = Mortal()
    go_on = asyncio.Event()

    async def late(connection: Connection, _: Received) -> None:
        await go_on.wait()
        connection.answer(200, b'{"late":true}')

    engine.script = late
    async with mortals(engine) as r:
        answer = asyncio.create_task(r.chat())
        await r.until(lambda: bool(engine.requests))
        engine.is_stopped = True
        await miss_heartbeats(r)
        assert r.replica(0).health.is_suspect
        go_on.set()
        assert (await answer).json() == {"late": True}


async def test_streams_it_has_begun_end_once_it_is_certainly_gone() -> None:
    async def begin(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("hel"))
        await connection.gone()

    engines = Mortal(script=begin), Mortal()
    async with mortals(*engines) as r, raw(r.router) as (reader, writer):
        writer.write(request_bytes(stream=True))
        await reader.readuntil(b"hel")
        engines[0].is_stopped = True
        connections = engines[0].connections
        await miss_heartbeats(r)
        assert r.replica(0).health.is_suspect
        await r.until(lambda: engines[0].connections > connections)
        assert r.router.requests.inflight == 1, "not before a new connection went unanswered"
        await miss_heartbeats(r)
        await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), DEADLINE_S)


@pytest.mark.parametrize("end", ["silent", "broken", "stalled"])
async def test_of_many_requests_a_few_move_on_in_each_turn_of_the_loop(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Each is sent again, and thousands in one turn would hold the loop."""
    few, number = 2, 40
    monkeypatch.setattr(deadlines, "STEPS_PER_TURN", few)
    engines = Mortal(), Mortal()
    async with mortals(*engines) as r:
        engines[0].is_stopped = True
        asked = [asyncio.create_task(r.chat(str(n))) for n in range(number)]
        await r.until(lambda: len(engines[0].requests) + sum(each.done() for each in asked) == number)
        waiting = r.replica(0).inflight_attempts
        assert len(waiting) == number // 2
        if end == "broken":
            engines[0].break_connections()
        elif end == "silent":
            r.replica(0).pool.fail_requests(FirstByteTimeout("it fell silent"), include_begun=False)
        else:
            await r.pass_time(SUSPECT_STEP_AGE_S + 1.0)
            engines[0].announce(Load(core_step_age_s=SUSPECT_STEP_AGE_S + 1.0))
        before, most = number // 2, 0
        while before:
            most, before = max(most, before - len(waiting)), len(waiting)
            await asyncio.sleep(0)
        assert most <= 2 * few, "those of the turn in which they failed, and of the one after it"
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * number


async def test_a_turn_ends_with_its_time_and_survives_a_fault() -> None:
    """One request's large body, or its bug, must not hold up the others."""
    turns = deadlines.Turns(asyncio.get_running_loop())
    done: list[int] = []

    def step(number: int) -> None:
        end = time.monotonic() + deadlines.TURN_S
        while time.monotonic() < end:
            pass
        done.append(number)
        if number == 0:
            raise RuntimeError("a bug")

    for number in range(4):
        turns.run(partial(step, number))
    seen = [len(done)]
    while len(done) < 4:
        await asyncio.sleep(0)
        seen.append(len(done))
    assert done == [0, 1, 2, 3]
    assert max(after - before for before, after in pairwise([0, *seen])) == 1
