"""Request bodies of a given size, and several connections at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from .harness import Rig, chat, raw

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def body_of(size: int, **fields: object) -> bytes:
    return json.dumps(chat("x" * size, **fields)).encode()


def request(body: bytes, head: bytes = HEAD) -> bytes:
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


@contextlib.asynccontextmanager
async def several(r: Rig, number: int) -> AsyncIterator[list[Stream]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(raw(r.router)) for _ in range(number)]
