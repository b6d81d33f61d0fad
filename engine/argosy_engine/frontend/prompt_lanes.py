"""PromptLanes: threads in which prompts are made, apart by size, so that a long prompt holds up long ones only.

What fits into a few milliseconds is done on the event loop. Everything longer waits in its lane's queue, which is
bounded, and is given up when its client leaves: at once while it waits, at the next `stop_if_abandoned` while it runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import TypeVar

from argosy_engine.errors import EngineBusy
from argosy_engine.frontend.tokenizer import INLINE_CHARS

_Request = TypeVar("_Request")
_Result = TypeVar("_Result")

MAX_MEDIUM_BYTES = 256 * 1024
"""Some 60,000 tokens, made in a tenth of a second."""
MEDIUM_THREADS = 2
LONG_THREADS = 1
"""Tokenising runs beside the interpreter, what surrounds it does not: more threads would only slow the others."""
MAX_MEDIUM_JOBS = 512
"""Waiting or running; ten seconds of work or so."""
MAX_LONG_JOBS = 32
"""The same, and a gigabyte of bodies at most."""

_is_abandoned: ContextVar[threading.Event | None] = ContextVar("is_abandoned", default=None)


class Abandoned(Exception):
    """The client of this prompt has left: raised by `stop_if_abandoned`, seen by nobody."""


def stop_if_abandoned() -> None:
    """To be called between two parts of a long computation.

    Raises:
        Abandoned: it has no reader any more.
    """
    event = _is_abandoned.get()
    if event is not None and event.is_set():
        raise Abandoned


class PromptLanes:
    """The event loop for short prompts, a lane of threads for medium ones, and one for long ones."""

    def __init__(self) -> None:
        self._medium = _Lane("medium prompts", MEDIUM_THREADS, MAX_MEDIUM_JOBS)
        self._long = _Lane("long prompts", LONG_THREADS, MAX_LONG_JOBS)

    async def run(self, size: int, function: Callable[[_Request], _Result], request: _Request) -> _Result:
        """Makes a request's prompts.

        Args:
            size: of the request's body in bytes. Whatever becomes part of a prompt was in there.

        Raises:
            EngineBusy: too many prompts of about this size are waiting.
        """
        if size <= INLINE_CHARS:
            return function(request)
        lane = self._medium if size <= MAX_MEDIUM_BYTES else self._long
        return await lane.run(function, request)

    def close(self) -> None:
        """Gives up what waits; does not wait for what runs."""
        self._medium.close()
        self._long.close()


class _Lane:
    """Invariant: `_num_jobs` is the number of jobs that wait or run, those of clients who left included."""

    def __init__(self, name: str, num_threads: int, max_jobs: int) -> None:
        self._name = name
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._max_jobs = max_jobs
        self._num_jobs = 0
        self._lock = threading.Lock()

    async def run(self, function: Callable[[_Request], _Result], request: _Request) -> _Result:
        abandoned = threading.Event()

        def job() -> _Result:
            token = _is_abandoned.set(abandoned)
            try:
                return function(request)
            finally:
                _is_abandoned.reset(token)

        with self._lock:
            if self._num_jobs >= self._max_jobs:
                raise EngineBusy(f"{self._num_jobs} {self._name} are waiting to be tokenised")
            self._num_jobs += 1
        future = self._executor.submit(job)
        future.add_done_callback(self._count_end)
        try:
            return await asyncio.wrap_future(future)  # cancelling it takes a job that waits out of the queue
        finally:
            abandoned.set()

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _count_end(self, _: Future[_Result]) -> None:
        with self._lock:
            self._num_jobs -= 1
