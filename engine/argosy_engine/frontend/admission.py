"""Admission: bounds on requests that wait for their prompts to be rendered, for the core, or for their first token.

`QueueLimits` rejects calls while too many requests are in flight (`--max-num-queued-reqs`, waiting and running) or too
many prompt tokens wait for their first output (`--max-num-queued-tokens`: about the target TTFT times the prefill
rate), as in vLLM. A rejection has a retry time, computed from measured rates. The limits are those of all data-parallel
ranks and API processes together: processes tell each other their counts in shared memory. A request that chooses its
rank must also fit into the rank's equal share, so that those who choose the same rank leave room for the others.

`RenderPool` renders and tokenises prompts in threads by size, so that a long prompt delays only long ones. What else of
a request takes time linear in its text, such as checking a grammar, is done together with its prompts. Prompts that
take a few milliseconds are rendered on the event loop, unless the request brings a chat template, whose time its size
does not tell: those have a thread of their own. Longer ones wait in the bounded queue of their size class, where
tenants take turns and none can fill it. When its client leaves, a prompt is dropped: at once if it waits, at the next
`stop_if_abandoned` if it runs.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

from argosy_engine.errors import EngineBusy, InvalidRequest, ResourceBusy
from argosy_engine.fair_shares import RoundRobinQueue, TenantShares
from argosy_engine.frontend.tokenizer import INLINE_CHARS
from argosy_engine.osproc import SharedCounters

MIN_RETRY_S = 1.0

MAX_RETRY_S = 60.0

_FINISHES = 64
"""Number of finished requests from which the completion rate is measured."""


class _Load:
    """Requests of all ranks, or of one.

    Args:
        counters: of several API processes.
        column: the first of two columns for this load.
    """

    def __init__(self, counters: SharedCounters | None = None, column: int = 0) -> None:
        self._num_reqs = 0
        self._num_queued_tokens = 0
        self._counters = counters
        self._column = column

    @property
    def num_reqs(self) -> int:
        others = 0 if self._counters is None else self._counters.others(self._column)
        return self._num_reqs + others

    @property
    def num_queued_tokens(self) -> int:
        others = 0 if self._counters is None else self._counters.others(self._column + 1)
        return self._num_queued_tokens + others

    def count(self, num_reqs: int, num_queued_tokens: int) -> None:
        """Add to the counts of this process."""
        self._num_reqs += num_reqs
        self._num_queued_tokens += num_queued_tokens
        if self._counters is not None:
            self._counters.set(self._column, self._num_reqs)
            self._counters.set(self._column + 1, self._num_queued_tokens)


class QueueLimits:
    """
    Invariant: `num_queued_tokens` is the sum over requests that entered, did not leave and have no first token.

    Args:
        max_num_queued_tokens: None: no limit. A request that is alone in the queue is never rejected for its length.
        num_ranks: number of data-parallel ranks.
        on_rejected: called with the name of the limit and the rank, if one was chosen, for each rejection.
        counters: of several API processes; two columns, and two for each rank.
        num_processes: number of API processes.
    """

    def __init__(
        self,
        max_num_queued_reqs: int,
        max_num_queued_tokens: int | None,
        clock: Callable[[], float] = time.monotonic,
        num_ranks: int = 1,
        on_rejected: Callable[[str, int | None], None] | None = None,
        counters: SharedCounters | None = None,
        num_processes: int = 1,
    ) -> None:
        self.max_num_queued_reqs = max_num_queued_reqs
        self.max_num_queued_tokens = max_num_queued_tokens
        self.prefill_tokens_per_s = 0.0
        """Prefill rate in tokens per second, as the core measured it; 0 while unknown."""
        self._clock = clock
        self._on_rejected = on_rejected
        self._num_tokens: dict[str, int] = {}
        """Queued prompt tokens of each request in flight; 0 from its first token on."""
        self._ranks: dict[str, int] = {}
        """Ranks of the requests in flight, as far as they are known."""
        self._total = _Load(counters)
        self._loads = [_Load(counters, 2 * (1 + rank)) for rank in range(num_ranks)]
        self._num_processes = num_processes
        self._finishes: deque[float] = deque(maxlen=_FINISHES)

    @property
    def num_reqs(self) -> int:
        """Requests in flight, of all API processes."""
        return self._total.num_reqs

    @property
    def num_queued_tokens(self) -> int:
        return self._total.num_queued_tokens

    def check(self, num_reqs: int, num_tokens: int = 0, rank: int | None = None) -> None:
        """Check that a number of requests, with a number of prompt tokens in total, may enter.

        Args:
            rank: data-parallel rank that they choose; None: any.

        Raises:
            EngineBusy: too many requests or tokens are queued; `retry_after_s` says when to try again.
            InvalidRequest: there are more than an idle engine, or rank, accepts.
        """
        if rank is not None and len(self._loads) > 1:
            where = f"data-parallel rank {rank}"
            self._check(
                num_reqs, num_tokens, rank, self._loads[rank], where, f" in {where}", len(self._loads)
            )
        self._check(num_reqs, num_tokens, rank, self._total, "this engine", "", 1)

    def _check(
        self, num_reqs: int, num_tokens: int, rank: int | None, load: _Load, who: str, where: str, shares: int
    ) -> None:
        """Check one load against an equal share of the limits."""
        max_num_reqs = -(-self.max_num_queued_reqs // shares)
        if num_reqs > max_num_reqs:
            raise InvalidRequest(
                f"the call asks for {num_reqs} choices at once, {who} takes {max_num_reqs} "
                "(--max-num-queued-reqs)",
                param="n",
            )
        excess = load.num_reqs + num_reqs - max_num_reqs
        if excess > 0:
            self._reject("max_num_queued_reqs", rank)
            raise EngineBusy(
                f"{load.num_reqs} requests are waiting or running{where}, at most {max_num_reqs} may",
                retry_after_s=_retry_after(excess, self._finish_rate() / shares),
            )
        if self.max_num_queued_tokens is not None and load.num_queued_tokens:
            max_num_tokens = -(-self.max_num_queued_tokens // shares)
            excess = load.num_queued_tokens + num_tokens - max_num_tokens
            if excess > 0:
                self._reject("max_num_queued_tokens", rank)
                raise EngineBusy(
                    f"{load.num_queued_tokens} prompt tokens are waiting{where}, at most {max_num_tokens} may",
                    retry_after_s=_retry_after(excess, self.prefill_tokens_per_s / shares),
                )

    def _reject(self, limit: str, rank: int | None) -> None:
        if self._on_rejected is not None:
            self._on_rejected(limit, rank)

    def enter(self, request_id: str, num_tokens: int, rank: int | None = None) -> None:
        """Count a request that passed the check.

        Args:
            rank: data-parallel rank that it chooses; None: `place` tells it later.
        """
        self._num_tokens[request_id] = num_tokens
        self._total.count(1, num_tokens)
        if rank is not None:
            self.place(request_id, rank)

    def place(self, request_id: str, rank: int) -> None:
        """Record the data-parallel rank of a request. Does nothing if that is known, or the request has left."""
        if request_id in self._num_tokens and request_id not in self._ranks:
            self._ranks[request_id] = rank
            self._loads[rank].count(1, self._num_tokens[request_id])

    def start(self, request_id: str) -> None:
        """Record that the request has its first token."""
        num_tokens = self._num_tokens.get(request_id, 0)
        self._num_tokens[request_id] = 0
        for load in self._loads_of(request_id):
            load.count(0, -num_tokens)

    def leave(self, request_id: str) -> None:
        """Record that the request ended, for whatever reason."""
        num_tokens = self._num_tokens.pop(request_id)
        for load in self._loads_of(request_id):
            load.count(-1, -num_tokens)
        self._ranks.pop(request_id, None)
        self._finishes.append(self._clock())

    def _loads_of(self, request_id: str) -> Iterator[_Load]:
        yield self._total
        rank = self._ranks.get(request_id)
        if rank is not None:
            yield self._loads[rank]

    def _finish_rate(self) -> float:
        """Recent completion rate in requests per second, if other API processes have the same; 0 if unknown."""
        if len(self._finishes) < 2:
            return 0.0
        elapsed = self._clock() - self._finishes[0]
        return self._num_processes * len(self._finishes) / elapsed if elapsed > 0 else 0.0


def _retry_after(amount: float, rate: float) -> float:
    """Return the seconds until an amount of work is done at a rate, within bounds."""
    seconds = amount / rate if rate > 0 else MIN_RETRY_S
    return min(max(math.ceil(seconds), MIN_RETRY_S), MAX_RETRY_S)


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
        self._medium = BoundedThreads("medium prompts", MEDIUM_THREADS, MAX_MEDIUM_JOBS)
        self._long = BoundedThreads("long prompts", LONG_THREADS, MAX_LONG_JOBS)
        self._templates = BoundedThreads("prompts with a chat template of their own", 1, MAX_TEMPLATE_JOBS)

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


class BoundedThreads:
    """Threads and a bounded queue, in which tenants take turns, for prompts of about one size, or for images.

    Invariants: `_jobs` counts the jobs that wait or run, including running ones of clients that left. For each queued
    job the executor has a call of `_run_next`.
    """

    def __init__(self, name: str, num_threads: int, max_jobs: int, done: str = "tokenised") -> None:
        self._name = name
        self._done = done
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._jobs = TenantShares(max_jobs)
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
            self._jobs.add(tenant, 1)
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
        if self._jobs.is_full(1):
            raise ResourceBusy(f"{self._jobs.total} {self._name} are waiting to be {self._done}")
        if self._jobs.exceeds_share(tenant, 1):
            own = self._jobs.held_by(tenant)
            raise ResourceBusy(f"{own} {self._name} of the same key are waiting to be {self._done}")

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
            self._jobs.remove(job.tenant, 1)
