"""RenderPool: renders and tokenises prompts in threads by size, so that a long prompt delays only long ones.

Prompts that take a few milliseconds are rendered on the event loop. Longer ones wait in the bounded queue of their size
class. When its client leaves, a prompt is dropped: at once if it waits, at the next `stop_if_abandoned` if it runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import TypeVar

from argosy_engine.errors import ResourceBusy
from argosy_engine.frontend.tokenizer import INLINE_CHARS

_Request = TypeVar("_Request")
_Result = TypeVar("_Result")

MAX_MEDIUM_BYTES = 256 * 1024
"""About 60,000 tokens, which are tokenised in a tenth of a second."""
MEDIUM_THREADS = 2
LONG_THREADS = 1
"""Only tokenising runs without the GIL; more threads would slow down the others."""
MAX_MEDIUM_JOBS = 512
"""Maximum number of waiting and running medium prompts, about ten seconds of work."""
MAX_LONG_JOBS = 32
"""Maximum number of waiting and running long prompts, a gigabyte of bodies at most."""

_is_abandoned: ContextVar[threading.Event | None] = ContextVar("is_abandoned", default=None)


class Abandoned(Exception):
    """Raised by `stop_if_abandoned` if the client of this prompt has left. Nobody waits for the result then."""


def stop_if_abandoned() -> None:
    """End a long computation whose client has left. Call it between two parts of the computation.

    Raises:
        Abandoned: the client has left.
    """
    event = _is_abandoned.get()
    if event is not None and event.is_set():
        raise Abandoned


class RenderPool:
    """Runs short prompts on the event loop, medium ones in threads, and long ones in another thread."""

    def __init__(self) -> None:
        self._medium = _SizeClass("medium prompts", MEDIUM_THREADS, MAX_MEDIUM_JOBS)
        self._long = _SizeClass("long prompts", LONG_THREADS, MAX_LONG_JOBS)

    async def run(self, size: int, function: Callable[[_Request], _Result], request: _Request) -> _Result:
        """Render a request's prompts: call `function` with the request.

        Args:
            size: of the request's body in bytes, which bounds that of its prompts.

        Raises:
            ResourceBusy: too many prompts of this size class are waiting.
        """
        if size <= INLINE_CHARS:
            return function(request)
        size_class = self._medium if size <= MAX_MEDIUM_BYTES else self._long
        return await size_class.run(function, request)

    def close(self) -> None:
        """Drop waiting prompts; do not wait for running ones."""
        self._medium.close()
        self._long.close()


class _SizeClass:
    """Threads and a bounded queue for prompts of about one size.

    Invariant: `_num_jobs` is the number of jobs that wait or run, including those of clients that left.
    """

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
                raise ResourceBusy(f"{self._num_jobs} {self._name} are waiting to be tokenised")
            self._num_jobs += 1
        future = self._executor.submit(job)
        future.add_done_callback(self._count_end)
        try:
            return await asyncio.wrap_future(future)  # cancelling removes a waiting job from the queue
        finally:
            abandoned.set()

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _count_end(self, _: Future[_Result]) -> None:
        with self._lock:
            self._num_jobs -= 1
