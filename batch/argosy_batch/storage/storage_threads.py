"""Threads for the calls of a file system that may hang, such as a network volume whose server is gone.

Owns: a few threads, which only the storage uses, and a deadline for each call. Must not know: what the calls do.
Invariants: a call that hangs holds up nothing but its own thread: neither the event loop, nor the default executor, nor
the end of the process. While all threads hang, calls are refused at once. A call that is refused or given up before a
thread has begun it is not kept, nor are its data.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition, Thread
from typing import Any, Final, TypeVar

from argosy_protocol.errors import StorageFull, StorageUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
NUM_THREADS: Final = 8
DEADLINE_S: Final = 30.0
"""Time for one call, with its wait for a thread. A call reads or writes one small file, a piece of a large one, or one
folder's listing."""


class StorageThreads:
    """Runs calls in threads of its own, which are started when needed and end with the process."""

    def __init__(self, deadline_s: float = DEADLINE_S, num_threads: int = NUM_THREADS) -> None:
        self._deadline_s = deadline_s
        self._num_threads = num_threads
        self._calls: OrderedDict[Future[Any], Callable[[], Any]] = OrderedDict()
        """Calls that no thread has begun, oldest first."""
        self._threads: list[Thread] = []
        self._changed = Condition()
        """Guards the calls and the threads; notified of each new call."""
        self._late: set[Future[Any]] = set()
        """Calls that a thread is still in after their deadline."""

    def submit(self, call: Callable[[], T], *, is_required: bool = False) -> Future[T]:
        """Run a call in a thread some time. May be called from any thread.

        Args:
            is_required: run it however late; otherwise it is cancelled at once while all threads hang.
        """
        work: Future[T] = Future()
        if self._all_hang and not is_required:
            work.cancel()
            return work
        with self._changed:
            self._calls[work] = call
            self._changed.notify()
            if len(self._threads) < self._num_threads:
                # A daemon, because one that hangs must not hold up the exit.
                self._threads.append(Thread(target=self._run, name="storage", daemon=True))
                self._threads[-1].start()
        return work

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call in a thread, and return what it returns.

        Raises:
            StorageUnavailable: it failed with an OSError, or took too long; the log has the cause.
        """
        return await self.result(self.submit(call))

    async def result(self, work: Future[T]) -> T:
        """Wait for a call of `submit`, up to the deadline; a cancelled wait also gives it that time to end.

        Raises:
            StorageUnavailable: see `run`. A call that no thread has begun will not be run any more.
        """
        if work.cancelled() or (self._all_hang and self._cancel(work)):
            raise StorageUnavailable(self._reason())
        waited = asyncio.wrap_future(work)
        try:
            done, _ = await asyncio.wait([waited], timeout=self._deadline_s)
        except asyncio.CancelledError:
            await asyncio.wait([waited], timeout=self._deadline_s)
            if not waited.done():
                self._give_up(work, waited)
            raise
        if not done:
            self._give_up(work, waited)
            log.error("storage: %s", self._reason())
            raise StorageUnavailable(self._reason())
        try:
            return waited.result()
        except OSError as error:
            log.error("storage: %s", error)
            if error.errno in _FULL:
                raise StorageFull from error
            raise StorageUnavailable from error

    @property
    def _all_hang(self) -> bool:
        return len(self._late) >= self._num_threads

    def _cancel(self, work: Future[Any]) -> bool:
        """Cancel and forget a call, unless a thread has begun it."""
        if not work.cancel():
            return False
        with self._changed:
            self._calls.pop(work, None)
        return True

    def _give_up(self, work: Future[Any], waited: asyncio.Future[Any]) -> None:
        waited.cancel()
        if not self._cancel(work):
            self._late.add(work)
            work.add_done_callback(self._late.discard)

    def _reason(self) -> str:
        return f"a call has not ended in {self._deadline_s:g} s, as on a volume whose server is gone"

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._calls:
                    self._changed.wait()
                work, call = self._calls.popitem(last=False)
            if not work.set_running_or_notify_cancel():
                continue
            try:
                work.set_result(call())
            except BaseException as error:
                work.set_exception(error)
            del work, call  # what they refer to must not stay until the next call
