"""Clients that leave while they are answered: the protocol tells the response, and only while it is made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from argosy_engine.api.http.http_responses import WatchedResponse
from argosy_http.bounded_protocol import BoundedProtocol, client_connection

REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


class Application:
    """Answers each request once the test allows it, and says how each answer ended."""

    def __init__(self) -> None:
        self.started: asyncio.Queue[asyncio.Event] = asyncio.Queue()
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self.num_tasks = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert client_connection(scope) is not None
        while (await receive())["more_body"]:
            pass

        async def work(send: Any, send_body: Any) -> None:
            may_end = asyncio.Event()
            self.started.put_nowait(may_end)
            self.num_tasks = len(asyncio.all_tasks())
            try:
                await may_end.wait()
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send_body({"type": "http.response.body", "body": b"ok"})
                self.ended.put_nowait("answered")
            except asyncio.CancelledError:
                self.ended.put_nowait("left")
                raise

        await WatchedResponse(work)(scope, receive, send)


@asynccontextmanager
async def connected(
    application: Application,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    config = uvicorn.Config(application, http=BoundedProtocol, lifespan="off", log_level="critical")
    config.load()
    loop, state = asyncio.get_running_loop(), ServerState()
    server = await loop.create_server(
        lambda: BoundedProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("num_pipelined", [0, 1])
async def test_work_ends_when_its_client_leaves(num_pipelined: int) -> None:
    application = Application()
    num_tasks = len(asyncio.all_tasks())  # not later: a task accepts the connection
    async with connected(application) as (_, writer):
        writer.write(REQUEST * (1 + num_pipelined))
        await application.started.get()
        assert application.num_tasks == num_tasks + 1  # no task waits for the client's end
        writer.close()
        assert await asyncio.wait_for(application.ended.get(), 10) == "left"
        await asyncio.sleep(0)
    assert application.started.empty()


async def test_a_client_that_leaves_after_its_answer_ends_no_other_work() -> None:
    application = Application()
    async with connected(application) as (reader, writer):
        writer.write(REQUEST * 2)
        (await application.started.get()).set()
        assert await application.ended.get() == "answered"
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        await application.started.get()  # the one behind it
        writer.close()
        assert await asyncio.wait_for(application.ended.get(), 10) == "left"
