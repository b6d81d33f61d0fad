"""The queue of keys: one worker per key, back-off after failures."""

from __future__ import annotations

import asyncio

import pytest
from virtual_time import virtual_time

from argosy_operator.reconcile.workqueue import BACKOFF_MAX, WorkQueue


@virtual_time
async def test_queue_works_on_a_key_once_at_a_time() -> None:
    queue: WorkQueue[str] = WorkQueue()
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
    queue: WorkQueue[str] = WorkQueue()
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
