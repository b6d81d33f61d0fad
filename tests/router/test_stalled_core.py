"""A stalled core behind a live HTTP server (SIGSTOP, a hung kernel): its requests move to another replica."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from argosy_protocol.telemetry import Load
from argosy_router.config import UpstreamLimits
from argosy_router.fleet.health import MIN_STALL_S, STALL_STEPS, SUSPECT_STEP_AGE_S, stall_bound_s

from .fake_engine import Connection, FakeEngine, Received, answer_normally, completion
from .harness import Rig, StoppedClock, chat, rig
from .resumable_stream import ResumableStream, events, fold

STEP_S = 0.05


class Core:
    """A script that sends this many bytes of the stream, and then stops until it is woken up."""

    def __init__(self, said_bytes: int = 0) -> None:
        self.said_bytes = said_bytes
        self.stopped = asyncio.Event()
        self.awake = asyncio.Event()
        self.aborted = 0

    async def __call__(self, connection: Connection, request: Received) -> None:
        data = b"".join(events(request)) if request.json.get("stream") else b""
        if self.said_bytes:
            connection.begin_stream()
            connection.chunk(data[: self.said_bytes])
        await connection.writer.drain()
        self.stopped.set()
        woken = asyncio.create_task(self.awake.wait())
        gone = asyncio.create_task(connection.gone())
        await asyncio.wait([woken, gone], return_when=asyncio.FIRST_COMPLETED)
        woken.cancel()
        if gone.done():
            self.aborted += 1
            raise ConnectionResetError
        gone.cancel()
        if not data:
            connection.answer(200, completion())
            return
        if not self.said_bytes:
            connection.begin_stream()
        connection.chunk(data[self.said_bytes :])
        connection.end_stream()


@contextlib.asynccontextmanager
async def stopping(
    core: Core, *others: FakeEngine, **config: Any
) -> AsyncIterator[tuple[Rig, asyncio.Task[Any], list[float]]]:
    """A replica r0 whose core has stopped under a request, and the time that has passed since, to be set."""
    passed = [0.0]
    fields = {"policy": "round-robin", **config}
    stream = fields.pop("stream", True)
    async with rig([FakeEngine(script=core), *others], **fields) as r:
        r.router.requests.shared.now = lambda: time.monotonic() + passed[0]
        while True:
            asked = asyncio.create_task(r.chat("tell", stream=stream))
            stopped = asyncio.create_task(core.stopped.wait())
            await asyncio.wait([asked, stopped], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if core.stopped.is_set():
                break
        yield r, asked, passed
        core.awake.set()
        asked.cancel()


async def tell(r: Rig, number: int = 0, **fields: Any) -> None:
    """A heartbeat of this replica arrives."""
    r.engines[number].announce(
        Load(**{"core_step_age_s": 0.0, "num_running": 1, "longest_step_s": STEP_S, **fields})
    )
    replica = r.replica(number)
    await r.until(lambda: replica.health.core_step_age_s == fields.get("core_step_age_s", 0.0))


def healthy() -> FakeEngine:
    return FakeEngine(script=ResumableStream())


@pytest.mark.parametrize("said_bytes", [0, 400, 900])
async def test_a_stream_moves_on(said_bytes: int) -> None:
    core = Core(said_bytes)
    async with stopping(core, healthy()) as (r, asked, passed):
        passed[0] = MIN_STALL_S + 1
        await tell(r, core_step_age_s=MIN_STALL_S + 0.5)
        answer = await asked
        told = fold(answer.content)
        assert told["choices"][0]["text"] == "0.0 0.1 0.2 "
        await r.until(lambda: core.aborted == 1)
        assert r.replica(0).state == "suspect"
        assert not r.replica(0).health.is_ejected
        names = {(await r.chat(str(number))).headers["x-argosy-replica"] for number in range(4)}
        assert names == {"r1"}, "nothing new is sent to it"


async def test_a_unary_request_moves_on() -> None:
    core = Core()
    async with stopping(core, FakeEngine(), stream=False) as (r, asked, passed):
        passed[0] = MIN_STALL_S + 1
        await tell(r, core_step_age_s=MIN_STALL_S + 0.5)
        assert (await asked).headers["x-argosy-replica"] == "r1"
        assert r.metric('retries_total{model="tiny",reason="stalled"}') == 1


@pytest.mark.parametrize(
    ("passed_s", "load"),
    {
        "it is not silent for long enough": (100.0, {"core_step_age_s": MIN_STALL_S - 0.1}),
        "its steps are long": (
            100.0,
            {"core_step_age_s": 3 * MIN_STALL_S, "longest_step_s": 4 * MIN_STALL_S / STALL_STEPS},
        ),
        "it does not tell how long its steps are": (
            100.0,
            {"core_step_age_s": SUSPECT_STEP_AGE_S - 1, "longest_step_s": 0.0},
        ),
        "the request came after the last step of an idle core": (
            MIN_STALL_S - 1,
            {"core_step_age_s": 1000.0, "num_running": 0},
        ),
    }.values(),
)
async def test_a_stream_stays(passed_s: float, load: dict[str, Any]) -> None:
    core = Core(400)
    async with stopping(core, healthy()) as (r, asked, passed):
        passed[0] = passed_s
        await tell(r, **load)
        core.awake.set()
        assert (await asked).headers["x-argosy-replica"] == "r0"
        assert core.aborted == 0
        assert r.metric('migrations_total{model="tiny",outcome="resumed"}') == 0


@pytest.mark.parametrize("said_bytes", [0, 400])
async def test_a_stream_waits_without_another_healthy_replica(said_bytes: int) -> None:
    core = Core(said_bytes)
    async with stopping(core, healthy()) as (r, asked, passed):
        passed[0] = 100.0
        await tell(r, 1, core_step_age_s=SUSPECT_STEP_AGE_S + 1)
        await r.until(lambda: r.replica(1).health.is_suspect)
        await tell(r, core_step_age_s=60.0)
        core.awake.set()
        answer = await asked
        assert (answer.status_code, answer.headers["x-argosy-replica"]) == (200, "r0")
        assert b'"error"' not in answer.content
        fold(answer.content)


async def test_a_stream_that_cannot_be_resumed_waits() -> None:
    core = Core(400)
    async with stopping(core, FakeEngine(script=ResumableStream(), hello={"model_fingerprint": "g"})) as (
        r,
        asked,
        passed,
    ):
        passed[0] = 100.0
        await tell(r, core_step_age_s=60.0)
        core.awake.set()
        assert fold((await asked).content)["choices"][0]["text"] == "0.0 0.1 0.2 "


async def test_an_idle_core_is_no_suspect_before_long() -> None:
    async with rig([FakeEngine(), FakeEngine()], policy="round-robin") as r:
        await tell(r, core_step_age_s=SUSPECT_STEP_AGE_S - 1, num_running=0)
        assert not r.replica(0).health.is_suspect
        names = {(await r.chat(str(number))).headers["x-argosy-replica"] for number in range(4)}
        assert names == {"r0", "r1"}


@pytest.mark.parametrize(
    ("longest_s", "bound_s"), [(0.0, SUSPECT_STEP_AGE_S), (0.01, MIN_STALL_S), (10.0, 10.0 * STALL_STEPS)]
)
def test_the_bound_follows_the_core_s_own_steps(longest_s: float, bound_s: float) -> None:
    assert stall_bound_s(longest_s) == bound_s


# pauses in streams


@pytest.mark.usefixtures("ejections_last")
@pytest.mark.parametrize(
    ("load", "is_blamed"),
    [
        ({"num_running": 3}, False),
        ({"num_running": 0}, True),
    ],
)
async def test_a_pause_is_no_fault_while_the_engine_computes(load: dict[str, Any], is_blamed: bool) -> None:
    engines = [FakeEngine(script=Core(400)), healthy(), healthy()]
    async with rig(engines, policy="round-robin", clock=StoppedClock()) as r:
        pausing = r.replica(0).inflight_attempts
        for _ in range(12):
            await tell(r, **load)
            asked = asyncio.create_task(r.chat("tell", stream=True))
            await r.until(lambda asked=asked: asked.done() or any(each.is_answering for each in pausing))
            if not asked.done():
                await r.pass_time(UpstreamLimits().idle_timeout_s)
            fold((await asked).content)
        failed = r.metric('upstream_failures_total{model="tiny",reason="idle_timeout",replica="r0"}')
        assert failed == (3 if is_blamed else 4), "then it is ejected"
        assert r.metric("ejections_total") == is_blamed


# probes


async def test_a_probe_is_judged_by_its_first_event() -> None:
    core = Core(400)
    async with rig([FakeEngine(script=core), FakeEngine()], policy="round-robin") as r:
        health = r.replica(0).health
        assert health.failed(r.router.requests.now() - 100.0, may_eject=True, refused=True)
        r.router.fleet.changed()
        assert r.replica(0).state == "half-open"
        async with contextlib.AsyncExitStack() as stack:
            while not core.stopped.is_set():
                stream = await stack.enter_async_context(
                    r.http.stream("POST", "/v1/chat/completions", json=chat("tell", stream=True))
                )
                await anext(stream.aiter_lines())
            await r.until(lambda: not health.is_ejected)
            r.engines[0].script = answer_normally
            names = {(await r.chat(str(number))).headers["x-argosy-replica"] for number in range(4)}
            assert names == {"r0", "r1"}, "others are sent to it while the probe goes on"
        core.awake.set()


async def test_a_probe_that_dies_after_its_first_event_renews_the_ejection() -> None:
    engines = [FakeEngine(script=ResumableStream(deaths=[400])), healthy()]
    async with rig(engines, policy="round-robin") as r:
        health = r.replica(0).health
        assert health.failed(r.router.requests.now() - 100.0, may_eject=True, refused=True)
        r.router.fleet.changed()
        for number in range(2):
            fold((await r.chat(str(number), stream=True)).content)
        assert health.is_ejected
