"""How much is done at once, how often and at what cost: a queue of keys, allowances, steps that run together, a meter.

Knows nothing of what a key stands for, or what a step does. Invariants:

    WorkQueue     after client-go's, but owners of keys take turns. A key is queued at most once, and one worker at a
                  time works on it; a key that fails is queued again with exponential back-off; an owner's keys, however
                  many there are and however long each takes, delay another owner's by one of them while a worker is
                  free, and those of one owner alone leave half of the workers free; one owner may have a worker of its
                  own, which no others occupy, however many they are
    Allowance     a token bucket, for what a tenant can cause at will: within any time t at most `burst` plus
                  t / `interval` are taken
    run_together  every step ends before the caller goes on, whether it succeeded or not, so that no write of a
                  reconcile is under way when the next one observes; a reconcile has at most REQUESTS_AT_ONCE requests
                  open
    CpuMeter      what other tasks do while the metered one waits does not count
"""

from __future__ import annotations

import asyncio
import time
import types
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Generator, Hashable, Iterable
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")
BACKOFF_BASE: Final = 0.25
"""Seconds after the first failure of a key; doubled with each further one."""
BACKOFF_MAX: Final = 60.0
REQUESTS_AT_ONCE: Final = 8
"""Requests of one reconcile. With the workers' number (8) it bounds the requests of the process well below the
client's 100 connections, for which a request would have to wait within its deadline."""


class WorkQueue(Generic[Key]):
    """Keys to process. Bounded by the number of distinct keys."""

    def __init__(
        self, owner_of: Callable[[Key], Hashable], workers: int, *, preferred: Hashable | None = None
    ) -> None:
        """Of `workers` an owner gets one more while it has fewer than are free (Choudhury and Hahne, "Dynamic queue
        length thresholds"): one alone has half of them. `preferred` is an owner with one key, for which there is one
        worker more."""
        self._owner_of = owner_of
        self._workers = workers
        self._preferred = preferred
        self._waiting: dict[Hashable, deque[Key]] = {}
        """Keys by owner, that of the next turn at the front."""
        self._dirty: set[Key] = set()
        self._busy: set[Key] = set()
        self._taken: Counter[Hashable] = Counter()
        """Keys of each owner that are being processed."""
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._wakeup = asyncio.Event()

    def __len__(self) -> int:
        return len(self._dirty)

    @property
    def is_idle(self) -> bool:
        """Whether no key is queued or being processed; keys that failed may still come back."""
        return not self._dirty and not self._busy

    def has_failed(self, key: Key) -> bool:
        """Whether the last time that a key was processed was a failure."""
        return key in self._failures

    def add(self, key: Key) -> None:
        """Queue a key. One that is being processed is processed again afterwards."""
        if key in self._dirty:
            return
        self._dirty.add(key)
        if key not in self._busy:
            self._push(key)

    def add_after(self, key: Key, seconds: float) -> None:
        """Queue a key later; an earlier time that is already set stays."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= loop.time() + seconds:
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_later(seconds, self._ring, key)

    async def get(self) -> Key:
        """Wait for the next key; `done` must follow."""
        while (owner := self._next_owner()) is None:
            self._wakeup.clear()
            await self._wakeup.wait()
        keys = self._waiting.pop(owner)
        key = keys.popleft()
        if keys:
            self._waiting[owner] = keys  # behind the others
        self._dirty.discard(key)
        self._busy.add(key)
        self._taken[owner] += 1
        return key

    def done(self, key: Key, *, failed: bool = False) -> None:
        """Note that a key was processed. After a failure it is queued again with back-off."""
        self._busy.discard(key)
        owner = self._owner_of(key)
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]
        self._wakeup.set()  # its owner, or another one, may take a worker now
        if key in self._dirty:
            self._push(key)
        if failed:
            count = self._failures.get(key, 0)
            self._failures[key] = count + 1
            self.add_after(key, min(BACKOFF_MAX, BACKOFF_BASE * 2 ** min(count, 16)))
        else:
            self._failures.pop(key, None)

    def close(self) -> None:
        """Cancel what is queued for later."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _ring(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def _push(self, key: Key) -> None:
        self._waiting.setdefault(self._owner_of(key), deque()).append(key)
        self._wakeup.set()

    def _next_owner(self) -> Hashable | None:
        """Whose turn it is; None if nobody waits who may take a worker."""
        if self._preferred in self._waiting:
            return self._preferred
        free = self._workers - len(self._busy) + self._taken[self._preferred]
        return next((owner for owner in self._waiting if self._taken[owner] < free), None)


class Allowance:
    """A token bucket, full at first. Times are a monotonic clock's.

    Args:
        burst: how many may be taken at once.
        interval: seconds until one more may be.
    """

    def __init__(self, burst: float, interval: float, now: float) -> None:
        self._burst = burst
        self._interval = interval
        self._left = burst
        self._at = now

    def wait(self, now: float, reserve: float = 0.0) -> float:
        """Seconds until one may be taken that leaves `reserve` of them; 0 if it may be now."""
        self._left = min(self._burst, self._left + (now - self._at) / self._interval)
        self._at = now
        return max(0.0, (1.0 + reserve - self._left) * self._interval)

    def take(self) -> None:
        """Take the one that `wait` allowed."""
        self._left -= 1.0


async def run_together(steps: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run all steps; return their results in the steps' order.

    Raises:
        Exception: what the first step, in the steps' order, that failed has raised, once all have ended.
    """
    pending = list(steps)
    if len(pending) == 1:
        return [await pending[0]()]
    slots, meter = asyncio.Semaphore(REQUESTS_AT_ONCE), _METER.get()

    async def run(step: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            return await (step() if meter is None else meter.turns(step()))

    outcomes = await asyncio.gather(*map(run, pending), return_exceptions=True)
    results = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


class CpuMeter:
    """Adds up the CPU time of an awaitable, and of the steps that it runs together."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self.seconds = 0.0

    async def run(self, work: Awaitable[T]) -> T:
        """Wait for the awaitable, and return its result."""
        token = _METER.set(self)
        try:
            return await self.turns(work)
        finally:
            _METER.reset(token)

    @types.coroutine
    def turns(self, work: Awaitable[T]) -> Generator[Any, Any, T]:
        """Pass on what the awaitable waits for, and add up the time that it runs in between."""
        running = work.__await__()
        step: Callable[[], Any] = partial(next, running)
        while True:
            began = self._clock()
            try:
                waits_for = step()
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                self.seconds += self._clock() - began
            try:
                step = partial(running.send, (yield waits_for))
            except BaseException as error:
                step = partial(running.throw, error)


_METER: ContextVar[CpuMeter | None] = ContextVar("meter", default=None)
