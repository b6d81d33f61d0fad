"""BackgroundRuns: responses that are generated while no client waits for them, and the events that they have had.

A client that streams a run may leave and read on later, from any event; leaving does not end the run, `cancel` does.

Owns: the tasks, and the events of the runs that were asked to stream. Must not know: HTTP.
Invariant: a run's record is stored before it begins, when it begins to generate, and when it ends. The events of all
runs take `MAX_EVENT_BYTES` at most; the longest ago begun lose theirs first.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, aclosing

from argosy_engine.api.responses.response_job import ResponseJob
from argosy_engine.api.responses.response_store import ResponseStore
from argosy_protocol.errors import ApiError, BadRequest, PayloadTooLarge

logger = logging.getLogger("argosy.api")

MAX_EVENT_BYTES = 128 << 20
"""About half a million events of a token each."""
MAX_RUNS = 4096
"""Runs whose events are kept, also of those that have ended."""

ErrorTranslation = Callable[[Exception], ApiError]


class _Run:
    """One run and its readers."""

    def __init__(self, job: ResponseJob, is_streamed: bool) -> None:
        self.job: ResponseJob | None = job
        """None when it is over: a job holds its conversation, and the events of a run are kept for long."""
        self.is_streamed = is_streamed
        self.events: list[bytes] = []
        self.num_bytes = 0
        self.is_over = False
        self.is_forgotten = False
        """Whether the events were dropped to make room."""
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake the readers."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        """Wait until there are more events, or the run is over."""
        await self._changed.wait()

    def end(self) -> None:
        """Let the readers end with the events that there are."""
        self.job = self.task = None  # a cancelled task refers to its job as well
        self.is_over = True
        self.notify()

    def forget(self) -> None:
        self.events, self.num_bytes, self.is_forgotten = [], 0, True
        self.notify()


class BackgroundRuns:
    """
    Args:
        accepted: counts a run as work of the server while it lasts.
        to_api_error: translates and logs errors.
    """

    def __init__(
        self,
        store: ResponseStore,
        accepted: Callable[[], AbstractContextManager[None]],
        to_api_error: ErrorTranslation,
        max_event_bytes: int = MAX_EVENT_BYTES,
    ) -> None:
        self.store = store
        self._accepted = accepted
        self._to_api_error = to_api_error
        self._max_event_bytes = max_event_bytes
        self._num_event_bytes = 0
        self._runs: OrderedDict[tuple[str, str], _Run] = OrderedDict()
        """Longest ago begun first."""

    async def start(self, owner: str, job: ResponseJob, *, is_streamed: bool) -> bytes:
        """Begin to generate a response, and return it, queued, as JSON."""
        run = _Run(job, is_streamed)
        record = job.record()
        await self.store.put(owner, job.response.id, record)
        key = (owner, job.response.id)
        self._runs[key] = run
        self._make_room()
        run.task = asyncio.create_task(self._work(key, run, job), name="background response")
        return bytes(record.response)

    async def cancel(self, owner: str, response_id: str) -> None:
        """End a run, if it has not ended, and store its response as cancelled."""
        run = self._runs.get((owner, response_id))
        if run is None or run.task is None or (job := run.job) is None:
            return
        run.task.cancel()
        await asyncio.wait([run.task])
        if not job.events.is_over:  # it did not end meanwhile
            job.events.cancelled()
            await self.keep(owner, job)
            run.end()

    def forget(self, owner: str, response_id: str) -> None:
        """Drop the events of a run."""
        run = self._runs.pop((owner, response_id), None)
        if run is not None:
            self._num_event_bytes -= run.num_bytes
            run.forget()

    def events(self, owner: str, response_id: str, starting_after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yield the events of a run, past ones first, until it is over.

        Args:
            starting_after: number of the last event that the client has.

        Raises:
            BadRequest: the run was not asked to stream, or its events are not kept any more.
        """
        run = self._runs.get((owner, response_id))
        if run is None or not run.is_streamed or run.is_forgotten:
            raise BadRequest(
                "only a response that was created with background and stream can be streamed, while its events are "
                "kept; retrieve it without stream",
                param="stream",
            )
        return _follow(run, starting_after + 1)

    async def close(self) -> None:
        """End all runs."""
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, key: tuple[str, str], run: _Run, job: ResponseJob) -> None:
        try:
            with self._accepted():
                await (self._stream(key, run, job) if run.is_streamed else self._complete(key, job))
        except Exception as error:
            if not job.events.is_over:
                self._add(run, job.events.failed(self._to_api_error(error)))
        await self.keep(key[0], job)
        run.end()
        if not run.is_streamed:
            self._runs.pop(key, None)

    async def _complete(self, key: tuple[str, str], job: ResponseJob) -> None:
        job.events.begin()
        await self.keep(key[0], job)
        await job.complete()

    async def _stream(self, key: tuple[str, str], run: _Run, job: ResponseJob) -> None:
        is_stored = False
        async with aclosing(job.stream(self._to_api_error)) as stream:
            async for events in stream:
                if not is_stored or job.events.is_over:  # who reads the last event may continue at once
                    is_stored = True
                    await self.keep(key[0], job)
                self._add(run, events)

    async def keep(self, owner: str, job: ResponseJob) -> None:
        """Store a response as it is by now; one that has become too large is not."""
        try:
            await self.store.put(owner, job.response.id, job.record())
        except PayloadTooLarge as error:
            logger.warning("a response is not stored: %s", error.message)

    def _add(self, run: _Run, events: Sequence[bytes]) -> None:
        if not run.is_streamed or run.is_forgotten:
            return
        size = sum(map(len, events))
        run.events += events
        run.num_bytes += size
        self._num_event_bytes += size
        self._make_room()
        run.notify()

    def _make_room(self) -> None:
        """Forget the events of the runs begun longest ago; runs that go on lose only their events."""
        if self._has_room():
            return
        for key, run in list(self._runs.items()):
            self._num_event_bytes -= run.num_bytes
            run.forget()
            if run.is_over:
                del self._runs[key]
            if self._has_room():
                return

    def _has_room(self) -> bool:
        return self._num_event_bytes <= self._max_event_bytes and len(self._runs) <= MAX_RUNS


async def _follow(run: _Run, start: int) -> AsyncGenerator[bytes, None]:
    position = start
    while True:
        if run.is_forgotten:
            return
        while position < len(run.events):
            position += 1
            yield run.events[position - 1]
        if run.is_over or run.is_forgotten:
            return
        await run.wait()
