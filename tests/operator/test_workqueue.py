"""The queue of keys: one worker per key, back-off after failures, turns of owners; and what work costs."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from virtual_time import virtual_time

from argosy_operator.reconcile.workqueue import BACKOFF_MAX, CpuMeter, WorkQueue, run_together


@virtual_time
async def test_queue_works_on_a_key_once_at_a_time() -> None:
    queue: WorkQueue[str] = WorkQueue(owner_of=str, workers=2)
    queue.add("a")
    queue.add("a")
    assert await queue.get() == "a"
    queue.add("a")
    queue.add("b")
    assert await queue.get() == "b", "a is being worked on"
    queue.done("a")
    assert await queue.get() == "a", "it was marked meanwhile"
    queue.done("a")
    queue.done("b")
    assert queue.is_idle


@virtual_time
async def test_queue_backs_off_and_forgives() -> None:
    loop = asyncio.get_running_loop()
    queue: WorkQueue[str] = WorkQueue(owner_of=str, workers=1)
    queue.add("a")
    waits = []
    for _ in range(12):
        since = loop.time()
        await queue.get()
        waits.append(loop.time() - since)
        queue.done("a", failed=True)
    assert waits[0] == 0
    assert waits[1:5] == pytest.approx([0.25, 0.5, 1, 2])
    assert waits[-1] == pytest.approx(BACKOFF_MAX)
    queue.add("a")
    await queue.get()
    queue.done("a")
    queue.add("a")
    await queue.get()
    queue.done("a", failed=True)
    since = loop.time()
    await queue.get()
    assert loop.time() - since <= 0.25, "success ends the back-off"
    queue.close()


def owner_of(key: str) -> str:
    return key[0]


async def taken(queue: WorkQueue[str]) -> list[str]:
    """What workers take that come one after the other, until one has to wait."""
    found = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1):
            while True:
                found.append(await queue.get())
    return found


@virtual_time
async def test_owners_take_turns() -> None:
    queue: WorkQueue[str] = WorkQueue(owner_of=owner_of, workers=1)
    for key in ("a1", "a2", "a3", "b1", "b2", "c1"):
        queue.add(key)
    order = []
    while not queue.is_idle:
        order.append(await queue.get())
        queue.done(order[-1])
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


@virtual_time
async def test_owners_whose_keys_take_long_leave_workers_to_others() -> None:
    queue: WorkQueue[str] = WorkQueue(owner_of=owner_of, workers=8)
    for key in range(10):
        queue.add(f"a{key}")
    assert await taken(queue) == ["a0", "a1", "a2", "a3"]
    found = {}
    for owner in "bcd":
        for key in range(10):
            queue.add(f"{owner}{key}")
        found[owner] = await taken(queue)
    assert found == {"b": ["b0", "b1"], "c": ["c0"], "d": ["d0"]}, "each leaves one to the next"
    queue.done("a0")
    assert await taken(queue) == [], "kept for one who has none"
    queue.add("e0")
    assert await taken(queue) == ["e0"]
    for key in ("a1", "a2", "a3"):
        queue.done(key)
    assert await taken(queue) == ["a4", "c1"]


@virtual_time
async def test_a_preferred_owner_waits_for_none() -> None:
    queue: WorkQueue[str] = WorkQueue(owner_of=owner_of, workers=4, preferred="z")
    for owner in "abcdef":
        for key in range(3):
            queue.add(f"{owner}{key}")
    assert await taken(queue) == ["a0", "b0", "c0", "d0"]
    queue.add("z")
    assert await taken(queue) == ["z"]
    queue.add("z")
    assert await taken(queue) == [], "it is being worked on"
    queue.done("z")
    assert await taken(queue) == ["z"]
    queue.done("a0")
    assert await taken(queue) == ["e0"], "its worker is nobody else's, and it takes none of theirs"


@virtual_time
async def test_a_meter_adds_up_its_own_work_and_steps_and_nothing_that_runs_meanwhile() -> None:
    spent = 0.0

    async def work(seconds: float, then: float = 0.0) -> str:
        nonlocal spent
        spent += seconds
        await asyncio.sleep(1.0)
        spent += then
        return "done"

    async def whole() -> list[str]:
        found = [await work(1.0, 2.0)]
        found += await run_together([lambda: work(10.0), lambda: work(20.0, 40.0)])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await work(100.0, 1000.0)
        return found

    meter = CpuMeter(lambda: spent)
    others = [asyncio.create_task(work(10_000.0, 10_000.0)) for _ in range(3)]
    assert await meter.run(whole()) == ["done"] * 3
    assert meter.seconds == 173.0
    await asyncio.gather(*others)
    assert meter.seconds == 173.0
    with pytest.raises(ZeroDivisionError):
        await meter.run(run_together([lambda: work(1 / 0)]))
