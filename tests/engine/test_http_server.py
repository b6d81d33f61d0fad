"""The API server's end: responses are delivered, and nothing else holds it up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
import uvicorn

from argosy_engine.api.http.http_server import HttpServer
from argosy_http.bounded_protocol import ConnectionLimit, HttpLimits

FOR_EVER_S = 3600.0
REQUEST = b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n"

pytestmark = pytest.mark.timeout(60)


class Served:
    """A server whose path /slow answers when `may_end` is set, and /huge with more than any buffer holds."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.is_asked = asyncio.Event()
        config = uvicorn.Config(
            self._answer,
            http=ConnectionLimit.for_server(max_connections=50, limits=HttpLimits()),
            lifespan="off",
            log_config=None,
            log_level="critical",
            interface="asgi3",
        )
        self.server = HttpServer(config)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self.writers: list[asyncio.StreamWriter] = []
        self.serving = asyncio.create_task(self.server.serve([self.listener]))

    async def _answer(self, scope: Any, _: Any, send: Callable[..., Any]) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"x-path", scope["raw_path"])]}
        )
        self.is_asked.set()
        if scope["path"] == "/slow":
            await self.may_end.wait()
        while scope["path"] == "/huge":
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        await send({"type": "http.response.body", "body": b"the end"})

    async def ask(self, path: bytes) -> asyncio.StreamReader:
        """Connect and ask; return what the server sends once it works on the answer."""
        self.is_asked.clear()
        reader = await self.connect(host="127.0.0.1", port=self.port)
        self.writers[-1].write(REQUEST % path)
        await self.is_asked.wait()
        return reader

    async def connect(self, **address: Any) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(**address)
        self.writers.append(writer)
        return reader

    async def close(self) -> None:
        self.may_end.set()
        self.server.stop(0)
        await self.serving
        for writer in self.writers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = Served()
    yield made
    await made.close()


async def test_a_response_is_delivered_and_idle_connections_are_closed_meanwhile(served: Served) -> None:
    idle = await served.ask(b"/quick")
    slow = await served.ask(b"/slow")
    served.server.stop(FOR_EVER_S)
    assert (await idle.read()).endswith(b"the end\r\n0\r\n\r\n")
    assert not served.serving.done()
    served.may_end.set()
    assert (await slow.read()).endswith(b"the end\r\n0\r\n\r\n")
    await served.serving


async def test_a_connection_that_is_accepted_at_the_end_does_not_hold_it_up(served: Served) -> None:
    await served.ask(b"/slow")
    config, state = served.server.config, served.server.server_state
    early = await served.connect(host="127.0.0.1", port=served.port)
    while len(state.connections) < 2:  # noqa: ASYNC110 (the server, which accepts it later, has no event for it)
        await asyncio.sleep(0)
    served.server.stop(FOR_EVER_S)
    assert not await early.read()
    theirs, ours = socket.socketpair()
    await asyncio.get_running_loop().connect_accepted_socket(
        lambda: config.http_protocol_class(config=config, server_state=state, app_state={}), theirs
    )
    late = await served.connect(sock=ours)
    assert not await late.read()
    served.may_end.set()
    await served.serving


async def test_a_client_that_does_not_read_is_cut_off(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    await served.ask(b"/huge")
    served.server.stop(0.1)
    await served.serving
    assert "1 connections are broken" in caplog.text
