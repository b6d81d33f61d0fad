"""The events of half a millisecond taken together: what network cards know as interrupt moderation.

Owns: when the event loop waits before it looks for more to read.
Must not know: what is sent, and to whom.
Invariants: nothing waits while few streams are sending; nothing waits longer than the interval, and a loop that works
for all of it does not wait at all.

An event of a stream costs a read, a write and a share of a turn of the loop, most of which is the kernel's. Where many
streams are fast, a turn per interval finds several events of a stream in one read, and sends them in one write.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

MANY: Final = 8
"""Streams that have something within an interval. Fewer are faster without a pause, which costs two or three events."""


class Moderator:
    """Slows the event loop down to a turn per interval while at least `MANY` streams have something in each."""

    def __init__(
        self,
        interval_s: float,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`interval_s` in seconds; 0 never waits."""
        self._interval_s = interval_s
        self._now = now
        self._sleep = sleep
        self._begun = 0.0
        self._streams = 0
        self._is_due = False
        self.interval = 0
        """Number of the current one: a stream counts once in each."""
        self.pauses = 0

    def count(self) -> None:
        """Another stream has sent something in this interval."""
        self._streams += 1
        if self._streams < MANY or self._is_due:
            return
        now = self._now()
        if now - self._begun < self._interval_s:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._pause)
        else:
            self._begin(now)

    def _pause(self) -> None:
        """The loop has written what this turn had to write, and reads when the interval is over."""
        self._is_due = False
        now = self._now()
        left_s = self._begun + self._interval_s - now
        if left_s > 0.0:
            self._sleep(left_s)
            self.pauses += 1
            now = self._now()
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._begun = now
        self._streams = 0
        self.interval += 1
