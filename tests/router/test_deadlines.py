"""Deadlines on the timer wheel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest

from argosy_router.http.deadlines import HORIZON_S, STEPS_PER_TURN, Deadline, TimerWheel

from .harness import DEADLINE_S, TICK_S, StoppedClock


async def test_deadlines_move_cheaply_and_fire_once() -> None:
    loop = asyncio.get_running_loop()
    wheel = TimerWheel(loop, tick_s=0.005)
    fired: list[str] = []
    done = asyncio.Event()

    def fire(name: str) -> None:
        fired.append(name)
        if len(fired) == 2:
            done.set()

    late, early, never = (Deadline(wheel, partial(fire, name)) for name in ("late", "early", "never"))
    late.set(0.01)
    never.set(0.02)
    early.set(10.0)
    early.set(0.015)  # moved forward
    late.set(0.05)  # moved back
    never.clear()
    started = loop.time()
    async with asyncio.timeout(DEADLINE_S):
        await done.wait()
    assert sorted(fired) == ["early", "late"]
    assert loop.time() - started >= 0.045
    wheel.close()


async def test_deadlines_go_by_the_clock_that_the_wheel_is_given() -> None:
    clock = StoppedClock()
    wheel = TimerWheel(asyncio.get_running_loop(), TICK_S, clock)
    fired: list[float] = []
    for seconds in (5.0, 10.0, 20.0):
        Deadline(wheel, partial(fired.append, seconds)).set(seconds)
    async with asyncio.timeout(DEADLINE_S):
        await clock.advance(wheel, 0.0)
        assert fired == [], "ticks alone are no time"
        await clock.advance(wheel, 5.0)
        assert fired == [5.0]
        await clock.advance(wheel, 15.0)
    assert fired == [5.0, 10.0, 20.0]
    wheel.close()


@pytest.mark.parametrize("seconds", [1e9, float("inf"), float("nan")])
async def test_a_deadline_far_away_leaves_the_wheel_soon_once_it_has_ended(seconds: float) -> None:
    clock = StoppedClock()
    wheel = TimerWheel(asyncio.get_running_loop(), TICK_S, clock)
    fired: list[int] = []
    ended, kept, near = (Deadline(wheel, partial(fired.append, number)) for number in range(3))
    ended.set(seconds)
    kept.set(3 * HORIZON_S + 5.0)
    near.set(5.0)
    ended.end()
    assert len(wheel) == 3
    async with asyncio.timeout(DEADLINE_S):
        await clock.advance(wheel, HORIZON_S)
        assert fired == [2]
        assert len(wheel) == 1
        await clock.advance(wheel, HORIZON_S)
        await clock.advance(wheel, HORIZON_S)
        assert fired == [2]
        await clock.advance(wheel, 5.0)
    assert fired == [2, 1]
    wheel.close()


def test_a_stalled_loop_loses_no_deadline() -> None:
    class StalledLoop(asyncio.AbstractEventLoop):
        now = 0.0

        def time(self) -> float:
            return self.now

        def call_later(
            self, delay: float, callback: Callable[..., object], *_: object, **__: object
        ) -> asyncio.TimerHandle:
            self.timer = callback
            return asyncio.TimerHandle(delay, callback, (), self)

        def call_soon(self, callback: Callable[..., object], *_: object, **__: object) -> asyncio.Handle:
            return asyncio.Handle(callback, (), self)

        def get_debug(self) -> bool:
            return False

    loop = StalledLoop()
    wheel = TimerWheel(loop, tick_s=0.1)
    fired: list[str] = []
    moved, due = (Deadline(wheel, partial(fired.append, name)) for name in ("moved", "due"))
    moved.set(0.1)
    moved.set(0.9)
    due.set(0.3)
    loop.now = 0.65
    loop.timer()
    assert fired == ["due"]
    loop.now = 1.05
    loop.timer()
    assert fired == ["due", "moved"]


async def test_a_failing_callback_affects_no_other_deadline(caplog: pytest.LogCaptureFixture) -> None:
    wheel = TimerWheel(asyncio.get_running_loop(), tick_s=0.005)
    fired = asyncio.Event()

    def fail() -> None:
        raise ZeroDivisionError

    for callback, seconds in ((fail, 0.01), (lambda: None, 0.01), (fired.set, 0.05)):
        Deadline(wheel, callback).set(seconds)
    await asyncio.wait_for(fired.wait(), DEADLINE_S)
    assert "ZeroDivisionError" in caplog.text
    wheel.close()


async def test_of_deadlines_that_pass_at_once_a_few_fire_in_each_turn() -> None:
    """Thousands of connections whose clients were silent for equally long were refused in one turn of the loop."""
    loop, time = asyncio.get_running_loop(), [0.0]
    wheel = TimerWheel(loop, TICK_S, lambda: time[0])
    fired: list[int] = []
    turns: list[int] = []
    count = 6 * STEPS_PER_TURN
    deadlines = [Deadline(wheel, partial(fired.append, number)) for number in range(count)]
    for deadline in deadlines:
        deadline.set(1.0)

    def note_turn() -> None:
        turns.append(len(fired))
        loop.call_soon(note_turn)

    note_turn()
    time[0] += 2.0
    async with asyncio.timeout(DEADLINE_S):
        while not fired:  # noqa: ASYNC110
            await asyncio.sleep(0)
        deadlines[-1].clear()
        deadlines[-2].set(10.0)
        while wheel.turns.are_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert fired == list(range(count - 2)), "one that was cleared or set again meanwhile does not"
    assert max(after - before for before, after in pairwise(turns)) <= 2 * STEPS_PER_TURN
    assert deadlines[-2].is_set
    wheel.close()
