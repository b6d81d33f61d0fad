"""Task queue: runs tasks in a few threads until none is left, and stops all of them at the first error.

Tasks may add tasks. Threads are daemons: one that waits for a dead server does not keep a program from ending. A task
that goes on after the stop must not change anything, which is why tasks check the `cancelled` event before they write.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from argosy_fetcher.retry import Cancelled

Task: TypeAlias = Callable[[], None]
_STOP_S: Final = 5.0
"""How long the end of a fetch waits for threads that are in the middle of a task."""


class TaskQueue:
    """
    Args:
        cancelled: stops the queue when it is set, as soon as a task notices.
    """

    def __init__(self, cancelled: threading.Event | None = None) -> None:
        self.cancelled = cancelled or threading.Event()
        """Set at the first error, and when the queue ends for another reason than that its tasks are done."""
        self._tasks: deque[Task] = deque()
        self._changed = threading.Condition()
        self._num_running = 0
        self._error: BaseException | None = None

    def add(self, tasks: Iterable[Task]) -> None:
        """Add tasks, which run in this order."""
        with self._changed:
            self._tasks.extend(tasks)
            self._changed.notify_all()

    def add_first(self, tasks: Iterable[Task]) -> None:
        """Add tasks that run, in this order, before those that wait."""
        with self._changed:
            self._tasks.extendleft(reversed(list(tasks)))
            self._changed.notify_all()

    def run(self, num_threads: int) -> None:
        """Run all tasks.

        Raises:
            Cancelled: the queue was stopped from outside.
            Exception: the first error of a task.
        """
        threads = [
            threading.Thread(target=self._work, daemon=True, name=f"fetch-{number}")
            for number in range(num_threads)
        ]
        try:
            for thread in threads:
                thread.start()
            with self._changed:
                self._changed.wait_for(lambda: self._is_over)
        finally:
            with self._changed:
                if self._tasks or self._num_running:
                    self.cancelled.set()
                    self._tasks.clear()
                self._changed.notify_all()
            deadline = time.monotonic() + _STOP_S
            for thread in threads:
                if thread.ident is not None:
                    thread.join(max(0.0, deadline - time.monotonic()))
        if self._error is not None:
            raise self._error
        if self.cancelled.is_set():
            raise Cancelled

    @property
    def _is_over(self) -> bool:
        return self.cancelled.is_set() or not (self._tasks or self._num_running)

    def _work(self) -> None:
        while (task := self._take()) is not None:
            error: BaseException | None = None
            try:
                task()
            except Cancelled:
                pass
            except BaseException as raised:
                error = raised
            with self._changed:
                self._num_running -= 1
                if error is not None and self._error is None and not self.cancelled.is_set():
                    self._error = error
                if error is not None:
                    self.cancelled.set()
                if self._is_over:
                    self._changed.notify_all()

    def _take(self) -> Task | None:
        """Return the next task; None if all are done or the queue was cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._tasks) or self._is_over)
            if self.cancelled.is_set() or not self._tasks:
                return None
            self._num_running += 1
            return self._tasks.popleft()
