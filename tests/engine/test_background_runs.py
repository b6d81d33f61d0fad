"""Background responses: their events, within a bound, and errors."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from argosy_engine.api.endpoints.responses import BackgroundRuns, ResponseStore
from argosy_protocol.errors import ApiError, BadRequest, InternalError
from argosy_protocol.response_history import StoredResponse

EVENT = b"x" * 60


class Events:
    is_over = False

    def cancelled(self) -> None:
        self.is_over = True

    def failed(self, error: ApiError) -> list[bytes]:
        self.is_over = True
        return [error.message.encode()]


class Job:
    """Stands in for `ResponseJob`: yields two events, the second one once it may."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.response = SimpleNamespace(id=name)
        self.events = Events()
        self.may_end = asyncio.Event()
        self._error = error

    def record(self) -> StoredResponse:
        status = b"completed" if self.events.is_over else b"in_progress"
        return StoredResponse(msgspec.Raw(b'{"id":"r","status":"%b"}' % status), [])

    async def stream(
        self, to_api_error: Callable[[Exception], ApiError]
    ) -> AsyncGenerator[list[bytes], None]:
        if self._error is not None:
            raise self._error
        yield [EVENT]
        await self.may_end.wait()
        self.events.is_over = True
        yield [EVENT]


def runs(**fields: Any) -> BackgroundRuns:
    return BackgroundRuns(ResponseStore(), nullcontext, lambda _: InternalError("broken"), **fields)


async def start(made: BackgroundRuns, job: Any) -> AsyncGenerator[bytes, None]:
    """Start a run, and return its events."""
    await made.start("owner", job, is_streamed=True)
    return made.events("owner", job.response.id)


async def test_a_run_is_read_from_any_event_by_its_owner() -> None:
    made, job = runs(), Job("a")
    events = await start(made, job)
    assert await anext(events) == EVENT
    job.may_end.set()
    assert [event async for event in events] == [EVENT]
    assert [event async for event in made.events("owner", "a", 0)] == [EVENT]
    assert [event async for event in made.events("owner", "a", 7)] == []
    with pytest.raises(BadRequest):
        made.events("other", "a")


async def test_the_events_of_the_run_begun_longest_ago_are_forgotten_first() -> None:
    made = runs(max_event_bytes=3 * len(EVENT))
    one, two = Job("a"), Job("b")
    of_one, of_two = await start(made, one), await start(made, two)
    assert [await anext(of_one), await anext(of_two)] == [EVENT, EVENT]
    two.may_end.set()
    assert await anext(of_two) == EVENT
    one.may_end.set()
    rest = [event async for event in of_one]
    assert rest in ([], [EVENT]), "a reader ends with what it has"
    with pytest.raises(BadRequest):
        made.events("owner", "a")
    assert [event async for event in made.events("owner", "b")] == [EVENT, EVENT]
    record = await made.store.get("owner", "a")
    assert record is not None
    assert record.state().status == "completed"


async def test_a_run_that_cannot_begin_has_failed() -> None:
    made = runs()
    assert [event async for event in await start(made, Job("a", ValueError("x")))] == [b"broken"]
    record = await made.store.get("owner", "a")
    assert record is not None
    assert record.state().is_finished


async def test_closing_ends_all_runs() -> None:
    made, job = runs(), Job("a")
    events = await start(made, job)
    assert await anext(events) == EVENT
    await made.close()
    assert not job.events.is_over
    await events.aclose()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_run_that_is_over_keeps_its_events_and_not_its_conversation(is_cancelled: bool) -> None:
    made, job = runs(), Job("a")
    events = await start(made, job)
    assert await anext(events) == EVENT
    if is_cancelled:
        await made.cancel("owner", "a")
    job.may_end.set()
    rest = [event async for event in events]
    assert rest == ([] if is_cancelled else [EVENT])
    held = weakref.ref(job)
    del job
    gc.collect()
    assert held() is None
    assert [event async for event in made.events("owner", "a")] == [EVENT, *rest]
