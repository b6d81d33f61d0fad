"""Request bodies of a given size, and several connections at once."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

from .harness import Rig, chat, raw
from .raw_requests import Streams


def body_of(size: int, **fields: object) -> bytes:
    return json.dumps(chat("x" * size, **fields)).encode()


@contextlib.asynccontextmanager
async def several(r: Rig, number: int) -> AsyncIterator[list[Streams]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(raw(r.router)) for _ in range(number)]
