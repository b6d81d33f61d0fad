"""BoundedThread: runs short native calls in a thread that is abandoned if one of them takes too long.

A step of a grammar matcher is native code that cannot be interrupted, and for some grammars it takes seconds. The
native code releases the GIL, so the caller can continue without the thread that is stuck in it. The limit applies to
the thread's own CPU time, so that a busy machine does not make calls fail.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence

_MIN_WAIT_S = 0.01
_NICENESS = 19


_LEAST_SHARE = 0.1
"""Smallest share of the limit, for calls after several abandoned ones in the same run."""


class TookTooLong(Exception):
    """A call has used more CPU time than its limit and was abandoned; it may still be running."""

    def __init__(self, cpu_s: float) -> None:
        super().__init__(f"more than {cpu_s:g} s of CPU time")
        self.cpu_s = cpu_s


class TooManyStuck(Exception):
    """A call was not made, because too many threads are stuck in abandoned calls."""


class BoundedThread:
    """Thread for calls with a CPU time limit. Only one thread at a time may use it.

    Args:
        cpu_s: CPU time that a call may use. It is halved after each abandoned call of the same run, down to
            `_LEAST_SHARE`, because the caller waits for all of them.
        max_given_up: maximum number of stuck threads. While there are so many, no call is made, because it might get
            stuck too.
    """

    def __init__(self, cpu_s: float, max_given_up: int = 64) -> None:
        self._cpu_s = cpu_s
        self._max_given_up = max_given_up
        self._worker: _Worker | None = None
        self._given_up: list[_Worker] = []

    @property
    def num_given_up(self) -> int:
        """Number of threads that are still stuck in abandoned calls."""
        self._given_up = [worker for worker in self._given_up if worker.is_alive]
        return len(self._given_up)

    def run(
        self, calls: Sequence[Callable[[], object]], on_given_up: Callable[[int], None] = lambda index: None
    ) -> dict[int, Exception]:
        """Make the calls in order and return the exceptions that they raised, by index.

        A call that was abandoned has `TookTooLong`, one that was not made `TooManyStuck`. An abandoned call may still
        write to its data, which must therefore not be used again; `on_given_up(index)` is called before the next call,
        so that the caller can replace it.
        """
        errors: dict[int, Exception] = {}
        start, cpu_s = 0, self._cpu_s
        while start < len(calls):
            if self._given_up and self.num_given_up >= self._max_given_up:
                errors |= {index: TooManyStuck() for index in range(start, len(calls))}
                break
            batch = _Batch(calls, start, errors)
            worker = self._worker or self._start()
            if worker is None:  # the system has no more threads
                batch.run()
                break
            worker.begin(batch)
            overdue = worker.wait(batch, cpu_s)
            if overdue is None:
                break
            worker.give_up()
            self._given_up.append(worker)
            self._worker = None
            errors[overdue] = TookTooLong(cpu_s)
            cpu_s = max(cpu_s / 2, _LEAST_SHARE * self._cpu_s)
            on_given_up(overdue)
            start = overdue + 1
        return errors

    def close(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _start(self) -> _Worker | None:
        try:
            self._worker = _Worker()
        except RuntimeError:
            return None
        return self._worker


class _Batch:
    """Calls from `index` on. The lock decides whether a call ended before it was abandoned."""

    def __init__(
        self, calls: Sequence[Callable[[], object]], start: int, errors: dict[int, Exception]
    ) -> None:
        self.lock = threading.Lock()
        self.index = start
        self.call_began_cpu_s = 0.0
        self.is_given_up = False
        self._calls = calls
        self._errors = errors

    def run(self) -> None:
        while self.index < len(self._calls):
            error = None
            try:
                self._calls[self.index]()
            except Exception as raised:
                error = raised
            with self.lock:
                if self.is_given_up:
                    return
                if error is not None:
                    self._errors[self.index] = error
                self.index += 1
                self.call_began_cpu_s = time.thread_time()

    @property
    def is_done(self) -> bool:
        return self.index >= len(self._calls)


class _Worker:
    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name="grammar steps")
        self._thread.start()
        self._clock = time.pthread_getcpuclockid(self._thread.ident or 0)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def begin(self, batch: _Batch) -> None:
        batch.call_began_cpu_s = time.clock_gettime(self._clock)
        self._inbox.put(batch)

    def wait(self, batch: _Batch, cpu_s: float) -> int | None:
        """Wait until the batch is done (None) or a call has used up its CPU time (its index)."""
        wait_s = cpu_s
        while True:
            with contextlib.suppress(queue.Empty):
                self._ended.get(timeout=wait_s)
                return None
            with batch.lock:
                if batch.is_done:
                    wait_s = _MIN_WAIT_S
                    continue
                left_s = cpu_s - (time.clock_gettime(self._clock) - batch.call_began_cpu_s)
                if left_s <= 0.0:
                    batch.is_given_up = True
                    return batch.index
            wait_s = max(left_s, _MIN_WAIT_S)

    def give_up(self) -> None:
        """Lower the thread's priority, and let it end when its call returns."""
        self.end()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._thread.native_id or 0, _NICENESS)

    def end(self) -> None:
        self._inbox.put(None)

    def _work(self) -> None:
        while (batch := self._inbox.get()) is not None:
            batch.run()
            self._ended.put(None)
