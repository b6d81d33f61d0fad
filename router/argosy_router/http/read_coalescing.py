"""Read coalescing: while many streams send, the event loop turns once per interval (as in interrupt moderation).

Owns: when the event loop pauses before it polls for more input.
Must not know: what is sent, and to whom.
Invariants: there is no pause while few streams are sending; a pause ends with the interval, and a loop that was busy
for the whole interval does not pause at all.

Each event of a stream costs a read, a write and a share of a turn of the loop, most of it in the kernel. When many
streams are fast, one turn per interval finds several events of a stream in one read, and sends them in one write.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

MANY: Final = 8
"""Streams active within one interval from which on the loop pauses. Fewer are faster without a pause, which costs as
much as two or three events."""


class ReadCoalescer:
    """Slows the event loop down to one turn per interval while at least `MANY` streams are active in each."""

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
        """Number of the current interval; a stream counts once in each."""
        self.pauses = 0

    def count_stream(self) -> None:
        """Count a stream that has sent something in this interval."""
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
        """Sleep until the interval is over; runs after this turn's writes and before the next poll."""
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
