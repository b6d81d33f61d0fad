"""Calls that many wait for at once, such as listings of one owner's objects: one at a time for each key.

Invariant: the call whose result a caller gets has begun after the caller asked, so it sees what the caller has done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedCalls(Generic[T]):
    """While a call for a key runs, all further callers wait for one more, which follows it."""

    def __init__(self, call: Callable[[str], Awaitable[T]]) -> None:
        """`call` gets the key."""
        self._call = call
        self._running: dict[str, asyncio.Task[T]] = {}
        self._next: dict[str, asyncio.Task[T]] = {}
        """Calls that have not begun."""

    async def run(self, key: str) -> T:
        """Return what the key's next call returns, or raise what it raises. The call goes on without its callers."""
        task = self._next.get(key)
        if task is None:
            task = asyncio.create_task(self._after(self._running.get(key), key), name=f"shared call {key}")
            task.add_done_callback(_retrieve)
            self._next[key] = task
        return await asyncio.shield(task)

    async def _after(self, running: asyncio.Task[T] | None, key: str) -> T:
        try:
            if running is not None:
                await asyncio.wait([running])
        finally:
            task = self._next.pop(key)
        self._running[key] = task
        try:
            return await self._call(key)
        finally:
            del self._running[key]


def _retrieve(task: asyncio.Task[T]) -> None:
    """Take a failure whose callers are all gone."""
    if not task.cancelled():
        task.exception()
