"""BoundedThread: short native calls on a thread that is given up when one of them takes too long.

A step of a matcher is native code that cannot be interrupted, and there are grammars for which it takes seconds. The
native code releases the interpreter, so the caller can go on without the thread that is stuck in it. What is measured
is the thread's own CPU time: a machine that is busy with other things fails nobody.
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
"""Of the bound, for calls behind several that were given up in the same run."""


class TookTooLong(Exception):
    """A call used more CPU time than its bound; it still runs, and nobody waits for it."""

    def __init__(self, cpu_s: float) -> None:
        super().__init__(f"more than {cpu_s:g} s of CPU time")
        self.cpu_s = cpu_s


class TooManyStuck(Exception):
    """The call was not made: as many threads as may be are stuck in others."""


class BoundedThread:
    """One caller at a time.

    Args:
        max_given_up: threads stuck at once. While there are as many no call is made, because it might not come back.
        cpu_s: CPU time that one call may use. Behind each call of a run that is given up it is half of that, down to
            `_LEAST_SHARE`: the caller waits for all of them.
    """

    def __init__(self, cpu_s: float, max_given_up: int = 64) -> None:
        self._cpu_s = cpu_s
        self._max_given_up = max_given_up
        self._worker: _Worker | None = None
        self._given_up: list[_Worker] = []

    @property
    def num_given_up(self) -> int:
        """Threads that are still stuck in a call that took too long."""
        self._given_up = [worker for worker in self._given_up if worker.is_alive]
        return len(self._given_up)

    def run(
        self, calls: Sequence[Callable[[], object]], on_given_up: Callable[[int], None] = lambda index: None
    ) -> dict[int, Exception]:
        """Makes the calls in order; what they raised, by index. `TookTooLong` for one that was given up: whatever it
        still writes to must not be used again, for which there is `on_given_up(index)`, before the next call.
        `TooManyStuck` for those that were not made."""
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
    """Calls from `index` on. The lock decides whether a call ended before it was given up."""

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
        """None when the batch is done, or the index of the call that has used up its time."""
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
        """The thread ends when its call does, at the lowest priority."""
        self.end()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._thread.native_id or 0, _NICENESS)

    def end(self) -> None:
        self._inbox.put(None)

    def _work(self) -> None:
        while (batch := self._inbox.get()) is not None:
            batch.run()
            self._ended.put(None)
