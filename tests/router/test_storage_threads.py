"""Threads for a file system that hangs: what is refused, and that nothing of it is kept."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from functools import partial
from threading import Event

import pytest

from argosy_batch.directory_store import StorageThreads
from argosy_protocol.errors import StorageUnavailable

NUM_THREADS = 2


class Data:
    """What a call writes."""


def write(data: Data) -> None:
    pass


@pytest.fixture
def volume() -> Iterator[Event]:
    """Whether the volume answers; until then the calls that wait for it hang."""
    event = Event()
    yield event
    event.set()


async def is_refused(threads: StorageThreads, data: Data) -> bool:
    try:
        await threads.run(partial(write, data))
    except StorageUnavailable:
        return True
    return False


async def hang(threads: StorageThreads, volume: Event) -> None:
    """Have a call in each thread that has not ended by its deadline."""
    calls = [threads.run(volume.wait) for _ in range(NUM_THREADS)]
    for told in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(told, StorageUnavailable)


async def test_a_call_that_is_refused_is_not_kept(volume: Event) -> None:
    threads = StorageThreads(0.2, NUM_THREADS)
    await hang(threads, volume)
    data = Data()
    kept = weakref.ref(data)
    assert await is_refused(threads, data)
    del data
    gc.collect()
    assert kept() is None


async def test_a_call_that_is_given_up_before_it_began_is_not_kept(volume: Event) -> None:
    threads = StorageThreads(0.2, NUM_THREADS)
    data = Data()
    kept = weakref.ref(data)
    hanging = asyncio.create_task(hang(threads, volume))
    await asyncio.sleep(0)  # the task
    await asyncio.sleep(0)  # its calls
    assert await is_refused(threads, data)
    await hanging
    del data
    gc.collect()
    assert kept() is None


async def test_a_required_call_runs_once_the_volume_answers(volume: Event) -> None:
    threads = StorageThreads(0.2, NUM_THREADS)
    await hang(threads, volume)
    closing = threads.submit(lambda: "closed", is_required=True)
    assert threads.submit(lambda: "read").cancelled()
    assert not closing.done()
    volume.set()
    assert await asyncio.wrap_future(closing) == "closed"
