"""The queue of keys to reconcile, after client-go's workqueue.

Owns when which key is worked on: a key waits at most once, is worked on by one worker at a time, and comes
back later, and later still, when it fails. Knows nothing of what a key stands for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

BACKOFF_BASE: Final = 0.25
BACKOFF_MAX: Final = 60.0


class WorkQueue(Generic[Key]):
    """Keys to work on. Bounded by the number of distinct keys."""

    def __init__(self) -> None:
        self._waiting: deque[Key] = deque()
        self._dirty: set[Key] = set()
        self._busy: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._wakeup = asyncio.Event()

    def __len__(self) -> int:
        return len(self._dirty)

    @property
    def is_idle(self) -> bool:
        """Nothing waits, nothing is worked on; keys that failed may still come back."""
        return not self._dirty and not self._busy

    def add(self, key: Key) -> None:
        """Marks a key dirty. One that is being worked on is worked on again afterwards."""
        if key in self._dirty:
            return
        self._dirty.add(key)
        if key not in self._busy:
            self._push(key)

    def add_after(self, key: Key, seconds: float) -> None:
        """Marks a key dirty later; a sooner time that is already set stays."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= loop.time() + seconds:
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_later(seconds, self._ring, key)

    async def get(self) -> Key:
        """The next key; `done` must follow."""
        while not self._waiting:
            self._wakeup.clear()
            await self._wakeup.wait()
        key = self._waiting.popleft()
        self._dirty.discard(key)
        self._busy.add(key)
        return key

    def done(self, key: Key, *, failed: bool = False) -> None:
        """Work on a key has ended. After a failure it comes back, each time twice as late."""
        self._busy.discard(key)
        if key in self._dirty:
            self._push(key)
        if failed:
            count = self._failures.get(key, 0)
            self._failures[key] = count + 1
            self.add_after(key, min(BACKOFF_MAX, BACKOFF_BASE * 2 ** min(count, 16)))
        else:
            self._failures.pop(key, None)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _ring(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def _push(self, key: Key) -> None:
        self._waiting.append(key)
        self._wakeup.set()
