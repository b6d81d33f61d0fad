"""Requests whose time passes while their replica computes: they are too long, and say nothing about the replica."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from argosy_protocol.telemetry import Load
from argosy_router.fleet.health import CONSECUTIVE_FAILURES

from .failure_scripts import never_answer
from .fake_engine import FakeEngine
from .harness import Rig, rig

TIMEOUT_S = 0.05
STEP_S = 0.001


@contextlib.asynccontextmanager
async def late(*, num_running: int) -> AsyncIterator[Rig]:
    """Three replicas that never answer, and report so many requests."""
    engines = [FakeEngine(script=never_answer) for _ in range(3)]
    times = {"request_timeout_s": TIMEOUT_S, "first_byte_timeout_s": TIMEOUT_S}
    async with rig(engines, policy="round-robin", **times) as r:
        for engine in engines:
            engine.announce(Load(core_step_age_s=0.0, num_running=num_running, decode_step_s=STEP_S))
        await r.until(lambda: all(each.load.decode_step_s == STEP_S for each in r.router.fleet.replicas()))
        yield r


@pytest.mark.parametrize("stream", [False, True])
async def test_they_eject_no_replica_that_computes(stream: bool) -> None:
    async with late(num_running=1) as r:
        answers = await asyncio.gather(
            *(r.chat(str(n), stream=stream, max_tokens=1) for n in range(3 * CONSECUTIVE_FAILURES))
        )
        assert {answer.status_code for answer in answers} == {504}
        assert r.metric("ejections_total") == 0
        assert "must be streamed" in answers[0].text or stream


async def test_they_eject_a_replica_that_does_not() -> None:
    async with late(num_running=0) as r:
        await asyncio.gather(*(r.chat(str(n), max_tokens=1) for n in range(3 * CONSECUTIVE_FAILURES)))
        assert r.metric("ejections_total") > 0


@pytest.mark.parametrize(("stream", "num_running", "attempts"), [(False, 1, 1), (True, 1, 3), (False, 0, 3)])
async def test_only_a_unary_one_is_not_repeated(stream: bool, num_running: int, attempts: int) -> None:
    async with late(num_running=num_running) as r:
        assert (await r.chat(stream=stream, max_tokens=1)).status_code == 504
        assert sum(len(engine.requests) for engine in r.engines) == attempts
