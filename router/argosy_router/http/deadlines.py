"""Deadlines for thousands of connections: a timer wheel, where moving a deadline costs an attribute write; and turns,
in which what befalls thousands of requests at once is done a few at a time; and pauses between attempts that fail.

Owns: when a deadline fires, and when a step is done. Must not know: what they mean.
Invariants: a deadline fires once, never early, and at most one tick late unless many pass at once, which fire in turns;
steps are done in order.

A connection moves its deadline with every read, and hardly ever reaches it. `loop.call_later` would allocate and cancel
a timer each time; here, moving a deadline later only writes `_when`, and the wheel looks at it again when it reaches
the bucket the deadline is in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Final

log = logging.getLogger(__name__)

TICK_S = 0.1
"""Precision of deadlines: a tenth of the shortest default (connect, 1 s)."""
HORIZON_S = 60.0
"""The wheel looks at each deadline at least this often: one that has ended leaves it, however far away it was."""
STEPS_PER_TURN = 64
"""Steps in one turn of the event loop: a request of a replica that failed is sent again, which takes some 50 us."""
TURN_S = 0.005
"""Seconds after which a turn has no further step: one that copies a large body takes longer."""


class Deadline:
    """One re-armable deadline; `callback` runs on the loop when it passes."""

    def __init__(self, wheel: TimerWheel, callback: Callable[[], None]) -> None:
        self._wheel = wheel
        self._callback = callback
        self._when: float | None = None
        self._bucket: int | None = None

    def set(self, seconds: float) -> None:
        """Arm or re-arm: the callback runs `seconds` from now unless the deadline is set or cleared before."""
        now = self._wheel.time()
        self._when = when = now + seconds
        bucket = self._wheel.bucket_of(when, now)
        if self._bucket is None or bucket < self._bucket:
            self._wheel.put(self, bucket)

    def clear(self) -> None:
        """Disarm. The wheel drops the object when it reaches its bucket."""
        self._when = None

    def end(self) -> None:
        """Disarm for good, and drop the callback: the wheel refers to this object until it reaches its bucket, and must
        not keep the owner alive so long."""
        self._when = None
        self._callback = _nothing

    @property
    def is_set(self) -> bool:
        return self._when is not None

    def visit(self, bucket: int, now: float) -> None:
        """Called when the wheel reaches `bucket`: fire, move to a later bucket, or leave the wheel."""
        if self._bucket != bucket:
            return  # put into an earlier bucket since
        self._bucket = None
        if self._when is None:
            return
        if self._when > now:
            self._wheel.put(self, self._wheel.bucket_of(self._when, now))
            return
        # Thousands of clients that were silent for equally long are refused with a response each.
        self._wheel.turns.run(partial(self._fire, self._when))

    def _fire(self, when: float) -> None:
        """Fire unless the deadline was set or cleared since it passed."""
        if self._when == when:
            self._when = None
            self._callback()

    def place(self, bucket: int) -> None:
        self._bucket = bucket


def _nothing() -> None:
    """Callback of an ended deadline."""


class Turns:
    """Spreads steps over turns of the event loop, first come first served. One that comes alone is done at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._num_done = 0
        """In this turn of the loop."""
        self._end = 0.0
        """When the turn has no further step."""
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def are_waiting(self) -> bool:
        """Whether steps wait for a later turn."""
        return bool(self._waiting)

    def run(self, step: Callable[[], None]) -> None:
        """Do a step, in a later turn if `STEPS_PER_TURN` were done in this one."""
        if self._waiting or self._num_done >= STEPS_PER_TURN:
            self._waiting.append(step)
            return
        if not self._num_done:
            self._end = time.monotonic() + TURN_S
            self._loop.call_soon(self._next)
        self._do(step)

    def _do(self, step: Callable[[], None]) -> None:
        self._num_done += 1
        try:
            step()
        except Exception:  # one owner's bug must not cost the others their steps or deadlines
            log.exception("a step or a deadline's callback failed")
        if time.monotonic() >= self._end:
            self._num_done = STEPS_PER_TURN

    def _next(self) -> None:
        self._num_done = 0
        self._end = time.monotonic() + TURN_S
        while self._waiting and self._num_done < STEPS_PER_TURN:
            self._do(self._waiting.popleft())
        if self._num_done:
            self._loop.call_soon(self._next)


class TimerWheel:
    """Buckets of deadlines, one per tick. Ticks run only while some deadline is in a bucket."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        tick_s: float = TICK_S,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`clock` returns the time that deadlines go by, in seconds; by default `loop.time`. Ticks are the loop's."""
        self.time: Callable[[], float] = loop.time if clock is None else clock
        self.turns = Turns(loop)
        self.losses = Turns(loop)
        """Of clients that have left: thousands may at once, and what others do must not wait for it."""
        self._loop = loop
        self._tick_s = tick_s
        self._buckets: dict[int, list[Deadline]] = {}
        self._next = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Return how many deadlines it refers to, those included that have ended since."""
        return sum(map(len, self._buckets.values()))

    def bucket_of(self, when: float, now: float) -> int:
        """Return the bucket in which a deadline is looked at next."""
        horizon = now + HORIZON_S
        return int((when if when < horizon else horizon) / self._tick_s) + 1

    def put(self, deadline: Deadline, bucket: int) -> None:
        deadline.place(bucket)
        entries = self._buckets.get(bucket)
        if entries is None:
            self._buckets[bucket] = [deadline]
        else:
            entries.append(deadline)
        if self._timer is None:
            self._next = int(self.time() / self._tick_s)
            self._arm()

    def close(self) -> None:
        """Stop the ticks; deadlines still set never fire."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._buckets.clear()

    def _arm(self) -> None:
        if self._buckets and self._timer is None:
            self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        now = self.time()
        last = int(now / self._tick_s)
        while self._next <= last:
            bucket = self._next
            self._next += 1
            for deadline in self._buckets.pop(bucket, ()):
                deadline.visit(bucket, now)
        # Only now: with `_timer` unset, a deadline that moves to a later bucket would restart the wheel at the current
        # time, past the buckets not yet visited.
        self._timer = None
        self._arm()


_MAX_DOUBLINGS: Final = 16


def backoff_s(doublings: int, base_s: float, cap_s: float, rng: Random) -> float:
    """Return the pause in seconds before another attempt: the base, doubled so many times, up to the cap, and of that
    half to all, so that it is never the same for all who wait."""
    return min(cap_s, base_s * 2.0 ** min(doublings, _MAX_DOUBLINGS)) * rng.uniform(0.5, 1.0)
