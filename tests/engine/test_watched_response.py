"""WatchedResponse ends its work when the client leaves, and only then."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Send

from argosy_engine.api.http.http_responses import WatchedResponse


class Client:
    """The server's end of one request."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)


class Work:
    """Work that waits until it may go on."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.ended_by: str | None = None

    async def __call__(self, send: Send, send_body: Send) -> None:
        self.has_begun.set()
        try:
            await self.may_end.wait()
            await send({"type": "http.response.start"})
            self.ended_by = "itself"
        except asyncio.CancelledError:
            self.ended_by = "cancellation"
            raise


async def begin(work: Work, client: Client) -> asyncio.Task[Any]:
    task = asyncio.create_task(WatchedResponse(work)({"type": "http"}, client.receive, client.send))
    await work.has_begun.wait()
    return task


async def test_a_client_that_stays_gets_its_answer_and_nobody_watches_on() -> None:
    work, client = Work(), Client()
    before = asyncio.all_tasks()
    task = await begin(work, client)
    work.may_end.set()
    await task
    await asyncio.sleep(0)
    assert (work.ended_by, len(client.sent)) == ("itself", 1)
    assert asyncio.all_tasks() == before
    assert not task.cancelling()


async def test_a_client_that_leaves_cancels_the_work_and_no_more() -> None:
    work, client = Work(), Client()
    task = await begin(work, client)
    client.left.set()
    await task  # the server's task is not cancelled
    assert (work.ended_by, client.sent) == ("cancellation", [])
    assert not task.cancelling()


async def test_a_server_that_ends_cancels_the_work_and_the_task() -> None:
    work, client = Work(), Client()
    task = await begin(work, client)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.ended_by == "cancellation"


async def test_a_server_that_ends_as_the_client_leaves_is_not_held_up() -> None:
    work, client = Work(), Client()
    task = await begin(work, client)
    client.left.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_failure_of_the_work_is_raised() -> None:
    async def fail(send: Send, send_body: Send) -> None:
        raise KeyError("x")

    client = Client()
    with pytest.raises(KeyError):
        await WatchedResponse(fail)({"type": "http"}, client.receive, client.send)


async def test_a_client_that_left_before_the_work_began_cancels_it() -> None:
    work, client = Work(), Client()
    client.left.set()
    await asyncio.create_task(WatchedResponse(work)({"type": "http"}, client.receive, client.send))
    assert work.ended_by == "cancellation"
