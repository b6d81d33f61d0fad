"""RenderPool: renders and tokenises prompts in threads by size, so that a long prompt delays only long ones.

What else of a request takes time linear in its text, such as checking a grammar, is done together with its prompts.
Prompts that take a few milliseconds are rendered on the event loop, unless the request brings a chat template, whose
time its size does not tell: those have a thread of their own. Longer ones wait in the bounded queue of their size
class, where tenants take turns and none can fill it. When its client leaves, a prompt is dropped: at once if it waits,
at the next `stop_if_abandoned` if it runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

from argosy_engine.errors import ResourceBusy
from argosy_engine.frontend.tokenizer import INLINE_CHARS
from argosy_engine.structured.round_robin_queue import RoundRobinQueue

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
MAX_TEMPLATE_JOBS = 32
"""Maximum number of waiting and running prompts whose requests bring a chat template."""
SHARE_OF_FREE = 3
"""A tenant may have so many times as many prompts in a size class as there are free places: three quarters if it is
alone, so that others find places, and less the more others have. Clients without a named tenant are not told apart."""

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
        self._templates = _SizeClass("prompts with a chat template of their own", 1, MAX_TEMPLATE_JOBS)

    async def run(
        self, size: int, function: Callable[[_Request], _Result], request: _Request, tenant: str = ""
    ) -> _Result:
        """Render a request's prompts: call `function` with the request.

        Args:
            size: of the request's body in bytes, which bounds that of its prompts.
            tenant: the request's tenant (`headers.TENANT`).

        Raises:
            ResourceBusy: too many prompts of this size class are waiting, in all or of this tenant.
        """
        if getattr(request, "chat_template", None) is not None:
            return await self._templates.run(function, request, tenant)
        if size <= INLINE_CHARS:
            return function(request)
        size_class = self._medium if size <= MAX_MEDIUM_BYTES else self._long
        return await size_class.run(function, request, tenant)

    def close(self) -> None:
        """Drop waiting prompts; do not wait for running ones."""
        self._medium.close()
        self._long.close()
        self._templates.close()


class _Job:
    """A prompt to render for a tenant."""

    def __init__(self, tenant: str, work: Callable[[], Any]) -> None:
        self.tenant = tenant
        self.future: Future[Any] = Future()
        self.is_queued = True
        self._work = work

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._work())
        except BaseException as error:
            self.future.set_exception(error)


class _SizeClass:
    """Threads and a bounded queue for prompts of about one size.

    Invariants: `_num_jobs` is the number of jobs that wait or run, including running ones of clients that left, and
    `_num_of_tenant` that of each tenant. For each queued job the executor has a call of `_run_next`.
    """

    def __init__(self, name: str, num_threads: int, max_jobs: int) -> None:
        self._name = name
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._max_jobs = max_jobs
        self._num_jobs = 0
        self._num_of_tenant: Counter[str] = Counter()
        self._queue: RoundRobinQueue[_Job] = RoundRobinQueue()
        self._lock = threading.Lock()

    async def run(self, function: Callable[[_Request], _Result], request: _Request, tenant: str) -> _Result:
        abandoned = threading.Event()

        def work() -> _Result:
            token = _is_abandoned.set(abandoned)
            try:
                return function(request)
            finally:
                _is_abandoned.reset(token)

        job = _Job(tenant, work)
        with self._lock:
            self._check_room(tenant)
            self._executor.submit(self._run_next)
            self._num_jobs += 1
            self._num_of_tenant[tenant] += 1
            self._queue.push(tenant, job)
        job.future.add_done_callback(lambda _: self._on_end(job))
        result: asyncio.Future[_Result] = asyncio.wrap_future(job.future)
        try:
            return await result  # cancelling removes a waiting job from the queue
        finally:
            abandoned.set()

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        while (job := self._next()) is not None:
            job.future.cancel()

    def _check_room(self, tenant: str) -> None:
        if self._num_jobs >= self._max_jobs:
            raise ResourceBusy(f"{self._num_jobs} {self._name} are waiting to be tokenised")
        own, free = self._num_of_tenant[tenant], self._max_jobs - self._num_jobs - 1
        if tenant and own and own + 1 > SHARE_OF_FREE * free:
            raise ResourceBusy(f"{own} {self._name} of the same key are waiting to be tokenised")

    def _next(self) -> _Job | None:
        with self._lock:
            turn = self._queue.pop()
            if turn is None:
                return None
            turn[1].is_queued = False
            return turn[1]

    def _run_next(self) -> None:
        job = self._next()
        if job is not None:  # None: the client of a waiting one left
            job.run()

    def _on_end(self, job: _Job) -> None:
        with self._lock:
            if job.is_queued:  # cancelled
                self._queue.remove(job.tenant, job)
                job.is_queued = False
            self._num_jobs -= 1
            self._num_of_tenant[job.tenant] -= 1
            if not self._num_of_tenant[job.tenant]:
                del self._num_of_tenant[job.tenant]
