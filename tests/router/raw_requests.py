"""Requests as bytes and responses from a stream reader, for tests that look at connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

from argosy_router.config import ServerLimits

from .fake_engine import Connection, FakeEngine, Received, completion
from .harness import DEADLINE_S, Rig, chat, read_all, rig

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"


def request(body: bytes, head: bytes = HEAD) -> bytes:
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def request_bytes(**fields: object) -> bytes:
    return request(json.dumps(chat(**fields)).encode())  # type: ignore[arg-type]


HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Gate:
    """Engines answer when it opens."""

    def __init__(self) -> None:
        self.opens = asyncio.Event()

    async def __call__(self, connection: Connection, _: Received) -> None:
        await self.opens.wait()
        connection.answer(200, completion())


@contextlib.asynccontextmanager
async def limited_to(count: int, **limits: Any) -> AsyncIterator[tuple[Rig, Gate]]:
    """A router with this connection limit; a connection over it may be silent for as long as a test takes."""
    gate = Gate()
    given = ServerLimits(max_connections=count, **{"surplus_timeout_s": DEADLINE_S, **limits})
    async with rig([FakeEngine(script=gate)], server=given) as r:
        yield r, gate


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """The next response with a length."""
    async with asyncio.timeout(DEADLINE_S):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = head.rstrip().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        return int(status.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


async def is_closed(reader: asyncio.StreamReader) -> bool:
    return await read_all(reader) == b""


async def ask(r: Rig, streams: Streams) -> None:
    """Sends a chat; returns when the engine has it."""
    before = len(r.engines[0].requests)
    streams[1].write(request_bytes())
    await r.until(lambda: len(r.engines[0].requests) > before)


async def keep(streams: Streams) -> None:
    """Has the connection answered once, and idle from then on."""
    streams[1].write(HEALTH)
    assert (await answer(streams[0]))[0] == 200


def stop_reading(r: Rig, writer: asyncio.StreamWriter) -> None:
    """Leave what a client does not read to the router: the kernel takes little of it."""
    for connection in r.router.server.connections:
        end = connection.transport.get_extra_info("socket")
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
