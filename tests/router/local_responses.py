"""Stored responses without a way to `argosy batch`: its records, in the process of the test."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

from argosy_batch.stored_responses import StoredResponses
from argosy_protocol import batch_program
from argosy_protocol.response_history import StoredResponse
from argosy_protocol.responses import ID_PREFIX
from argosy_router.responses.response_store import ResponseStore

DAY_S = 86400.0


class _LocalHeartbeat:
    def __init__(self, stored: StoredResponses) -> None:
        self._stored = stored
        self._current = ""

    async def begin(self) -> str:
        self._current = self._current or await self._stored.heartbeats.begin()
        return self._current

    async def beat(self, runners: Any) -> None:
        await self._stored.heartbeats.beat(runners)


class LocalResponses:
    """What a router keeps, as `argosy batch` does."""

    def __init__(self, stored: StoredResponses) -> None:
        self._stored = stored
        self.heartbeat = _LocalHeartbeat(stored)

    def new_id(self) -> str:
        return batch_program.new_id(ID_PREFIX, time.time(), DAY_S)

    async def add(self, account: str, response_id: str, record: StoredResponse) -> None:
        await self._stored.add(account, response_id, record)

    async def find(
        self, account: str, response_id: str, reserve: Callable[[int], None] | None = None
    ) -> StoredResponse | None:
        return await self._stored.find(account, response_id)

    async def finish(
        self, account: str, response_id: str, record: StoredResponse, *, is_read: bool = True
    ) -> StoredResponse | None:
        return await self._stored.finish(account, response_id, record)


def local_responses(stored: StoredResponses) -> ResponseStore:
    return cast(ResponseStore, LocalResponses(stored))
