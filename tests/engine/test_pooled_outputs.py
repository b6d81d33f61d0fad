"""Answers of many vectors: the JSON that they become, and the turns that other requests have meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec

from argosy_engine.api.endpoints.pooling import written
from argosy_protocol.pooling import Embedding


async def test_many_vectors_are_written_while_others_have_turns() -> None:
    num_turns = 0

    async def other_requests() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    items = [Embedding(index=index, embedding=[index / 7] * 4096) for index in range(100)]  # 8 MB
    others = asyncio.create_task(other_requests())
    await asyncio.sleep(0)
    num_turns = 0
    try:
        answer = await written(items)
    finally:
        others.cancel()
        with suppress(asyncio.CancelledError):
            await others
    assert num_turns >= 5
    assert msgspec.json.encode(answer) == msgspec.json.encode(items)
