"""The runs of batches: the runner claims batches that no other process runs; each goes from the file that was uploaded
to the files of results.

Owns: which batches this process runs, the order of a run's steps, and what ends it: all requests answered, its window
over, a cancellation. Must not know: how a request is routed.
Invariants: every step can be repeated by a process that takes over: results are known by their parts, ids of the files
of results are stored before the files. A batch is run, and written to, while its lease is held, and released when it is
left. A batch whose requests have all been refused for some time yields its place to one that waits for it, and goes
behind the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from argosy_batch.batch_lines import (
    MAX_LINE_BYTES,
    BatchResults,
    InputLine,
    Tokens,
    answered,
    decode_line,
    split_lines,
    tokens_of,
    unanswered,
    usage_of,
    validate,
)
from argosy_batch.batches import BatchLeases, BatchRecords, HeldLease, LeaseLost, with_batch
from argosy_batch.files_api import FilesApi
from argosy_batch.line_requests import LineRequests, LineWaits, PaceClosed
from argosy_batch.object_store import AlreadyExists, ObjectStore
from argosy_batch.router_client import AccountGone, AnswerMemory, HeldAnswer
from argosy_protocol import batch_program
from argosy_protocol.batch_program import ENDED, LineError, LineErrors, RequestCounts, StoredBatch, StoredFile
from argosy_protocol.errors import StorageUnavailable

log = logging.getLogger(__name__)

MAX_PENDING_BYTES: Final = 16 * 1024 * 1024
"""Bytes of one batch's requests in memory, in flight or not; a larger request is alone."""
ORPHAN_S: Final = 3600.0
"""A lease without a batch is removed when it is older; a younger one may be of a batch that is being made. Longer than
all calls of the storage that make one may take together, each with its retries."""

Ending = Literal["completed", "expired", "cancelled", "failed"]
_INTERNAL: Final = "this request could not be executed; the log of argosy batch has the cause"
_EXPIRED: Final = "this request could not be executed before the completion window expired"


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What all batches of one process share."""

    store: ObjectStore
    files: FilesApi
    records: BatchRecords
    leases: BatchLeases
    requests: LineRequests
    answers: AnswerMemory
    max_requests: int
    """In one batch."""
    max_pending: int
    """Requests of one batch in memory, in flight or not."""
    on_done: Callable[[bool], None]
    """Called for each request that has a result, with whether it succeeded."""
    on_ended: Callable[[str], None]
    """Called for each batch that has ended, with its status."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class BatchRun:
    """Runs one batch whose lease this process holds."""

    def __init__(self, held: HeldLease, context: RunContext) -> None:
        self._held = held
        self._owner, self._batch_id = held.owner, held.batch_id
        self._context = context
        self._results: BatchResults | None = None
        self._interrupted = asyncio.Event()
        """Set when no further request is to be sent."""
        self._is_cancelled = self._is_stopping = False
        self._is_over = False
        """Whether the batch has ended, so that the lease need not be renewed."""
        self._failure: Exception | None = None
        self._waits = LineWaits()
        self.is_yielding = False
        """Whether it ends so that another batch has its place."""
        self.status = "validating"
        """The batch's, as last seen."""

    def stop(self) -> None:
        """Send no further requests; `run` ends when those in flight have been answered."""
        self._is_stopping = True
        self._interrupted.set()

    @property
    def may_yield(self) -> bool:
        """Whether all its requests have been refused for some time, so that it only waits."""
        return self.status == "in_progress" and self._waits.is_all

    def yield_place(self) -> None:
        """Send no further requests, and give up those that wait; `run` ends when those in flight have been answered."""
        self.is_yielding = True
        self.stop()
        self._waits.end()

    async def run(self) -> None:
        """Run the batch until it has ended, the lease is lost, or it is stopped.

        Raises:
            StorageUnavailable, AccountGone: it can be tried again later.
            LeaseLost: another process goes on, and nothing more was written.
        """
        work = asyncio.create_task(self._work(), name=f"batch {self._batch_id}")
        beat = asyncio.create_task(self._beat(work), name=f"lease {self._batch_id}")
        try:
            await asyncio.wait([work, beat], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, beat):
                task.cancel()
            await asyncio.gather(work, beat, return_exceptions=True)
        for task in (beat, work):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    # the lease, and what others change

    async def _beat(self, work: asyncio.Task[None]) -> None:
        """Renew the lease, keep results, and notice a cancellation and the end of the window."""
        leases = self._context.leases
        while self._is_over or leases.is_held(self._held):
            await self._context.sleep(leases.renew_s)
            if self._is_over:
                continue
            with contextlib.suppress(StorageUnavailable):
                await leases.renew(self._held)
                if leases.is_held(self._held):
                    await self._note_progress()
        log.warning("batch %s: another process may have taken over", self._batch_id)
        work.cancel()

    async def _note_progress(self) -> None:
        results = self._results
        counts = None
        if results is not None:
            await results.flush()
            counts = self._counts(results)

        def changed(stored: StoredBatch) -> StoredBatch | None:
            if counts is None or stored.batch.status in ENDED or stored.batch.request_counts == counts:
                return None
            return with_batch(stored, request_counts=counts)

        stored = await self._update(changed)
        if stored is None or stored.batch.status == "cancelling":
            self._is_cancelled = True
            self._interrupted.set()
        elif await self._is_expired(stored):
            self._interrupted.set()

    async def _is_expired(self, stored: StoredBatch) -> bool:
        return await self._context.store.has_come(stored.batch.expires_at)

    async def _update(self, change: Callable[[StoredBatch], StoredBatch | None]) -> StoredBatch | None:
        stored = await self._context.records.update(self._owner, self._batch_id, change)
        self.status = "" if stored is None else stored.batch.status
        return stored

    # the steps

    async def _work(self) -> None:
        stored = await self._update(lambda _: None)
        if stored is None:
            if await self._context.store.has_come(batch_program.created_at(self._batch_id) + ORPHAN_S):
                await self._remove()
            return
        if stored.batch.status == "validating":
            stored = await self._validate(stored)
        ending: Ending | None = None
        if stored is not None and not stored.ending and stored.batch.status in ("in_progress", "cancelling"):
            ending = await self._send_requests(stored)
            if ending is None:
                return
        if stored is not None and stored.batch.status not in ENDED:
            stored = await self._finish(ending)
        if stored is not None and stored.batch.status in ENDED:
            self._context.on_ended(stored.batch.status)
            log.info("batch %s: %s, %s", self._batch_id, stored.batch.status, stored.batch.request_counts)
        await self._remove()

    async def _remove(self) -> None:
        """Remove what is left of a batch that has ended, the lease last."""
        self._is_over = True
        await BatchResults(self._context.store.blobs, self._batch_id, 0, 0).remove()
        await self._context.leases.remove(self._owner, self._batch_id)
        self._held.is_lost = True

    def _input(self, stored: StoredBatch) -> AsyncGenerator[bytes, None]:
        return self._context.files.chunks(self._owner, stored.batch.input_file_id)

    async def _validate(self, stored: StoredBatch) -> StoredBatch | None:
        found = await validate(self._input(stored), stored.batch.endpoint, self._context.max_requests)
        now = self._context.records.now()

        def validated(stored: StoredBatch) -> StoredBatch | None:
            if found.errors:
                errors = LineErrors(data=found.errors)
                return with_batch(stored, status="failed", failed_at=now, errors=errors)
            is_going_on = stored.batch.status == "validating"
            return with_batch(
                stored,
                status="in_progress" if is_going_on else stored.batch.status,
                in_progress_at=now if is_going_on else None,
                model=found.model,
                request_counts=RequestCounts(total=found.total),
            )

        return await self._update(validated)

    async def _open_results(self, total: int) -> BatchResults:
        if self._results is None:
            results = BatchResults(self._context.store.blobs, self._batch_id, self._held.term, total)
            await results.load()
            self._results = results
        return self._results

    async def _send_requests(self, stored: StoredBatch) -> Ending | None:
        """Send the requests that have no result; return what the batch ends as, None if another process goes on."""
        results = await self._open_results(stored.batch.request_counts.total)
        self._is_cancelled = stored.batch.status == "cancelling"
        if self._is_cancelled or await self._is_expired(stored):
            self._interrupted.set()
        pending: dict[asyncio.Task[None], int] = {}
        interrupted = asyncio.create_task(self._interrupted.wait())
        try:
            chunks = self._input(stored)
            async with aclosing(chunks), aclosing(split_lines(chunks, MAX_LINE_BYTES)) as lines:
                index = -1
                async for _, line in lines:
                    index += 1
                    if index >= stored.batch.request_counts.total or results.is_done(index) or line is None:
                        continue
                    while len(pending) >= self._context.max_pending or (
                        pending and sum(pending.values()) + len(line) > MAX_PENDING_BYTES
                    ):
                        if self._interrupted.is_set():
                            break
                        await self._wait(pending, interrupted)
                    if self._interrupted.is_set():
                        break
                    task = asyncio.create_task(self._run_line(results, index, line, stored.account))
                    pending[task] = len(line)
            while pending and (not self._interrupted.is_set() or self._is_stopping):
                await self._wait(pending, None if self._is_stopping else interrupted)
        finally:
            interrupted.cancel()
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            with contextlib.suppress(StorageUnavailable, AlreadyExists):
                if self._context.leases.is_held(self._held):
                    await results.flush()
        if self._failure is not None:
            raise self._failure
        await results.flush()
        if self._is_cancelled:
            return "cancelled"
        if await self._is_expired(stored):
            return "expired"
        if self._is_stopping:
            return None
        return "completed" if results.num_done >= stored.batch.request_counts.total else "failed"

    async def _wait(
        self, pending: dict[asyncio.Task[None], int], interrupted: asyncio.Task[bool] | None
    ) -> None:
        """Wait until a request has its result, or an interruption."""
        waited: set[asyncio.Task[None] | asyncio.Task[bool]] = {*pending}
        if interrupted is not None:
            waited.add(interrupted)
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in pending if task.done()]:
            del pending[task]

    async def _run_line(self, results: BatchResults, index: int, line: bytes, account: str) -> None:
        try:
            request = decode_line(line)
            with self._context.answers.answer(account) as held:
                if await self._has_room(results):
                    result, tokens, is_error = await self._result(request, account, held)
                else:
                    result, tokens, is_error = self._without_room(request), (0, 0, 0, 0), True
                results.add(index, result, tokens, is_error=is_error)
                self._context.on_done(not is_error)
                if results.is_large:
                    await results.flush()
        except PaceClosed:
            self.stop()
        except Exception as error:
            self._failure = error
            self._interrupted.set()

    async def _has_room(self, results: BatchResults) -> bool:
        """Whether further results may be kept. A quota does not refuse those of a batch that it let begin, up to as
        much again."""
        store = self._context.store
        return await store.kept_bytes(self._owner) + results.num_bytes <= 2 * store.max_bytes

    def _without_room(self, request: InputLine) -> bytes:
        """Return the line of a request that was not sent because its result could not be kept."""
        message = (
            f"this key's files and the results of this batch exceed twice the limit of {self._context.store.max_bytes} "
            "bytes (--storage-max-bytes); delete some files, and send this request in another batch"
        )
        return unanswered(request.custom_id, "storage_quota_exceeded", message)

    async def _result(self, request: InputLine, account: str, held: HeldAnswer) -> tuple[bytes, Tokens, bool]:
        """Return a request's line of the results, its tokens, and whether it failed."""
        try:
            answer = await self._context.requests.answer(request, account, self._waits, held)
            is_error = answer.status != 200
            tokens = (0, 0, 0, 0) if is_error else tokens_of(answer.body)
            return answered(request.custom_id, answer), tokens, is_error
        except (PaceClosed, AccountGone):
            raise
        except Exception:  # it would come again each time that the request is tried
            log.exception("batch %s: the request %r failed", self._batch_id, request.custom_id)
            return unanswered(request.custom_id, "internal_error", _INTERNAL), (0, 0, 0, 0), True

    # the end

    async def _finish(self, ending: Ending | None) -> StoredBatch | None:
        """Write the files of results, and end the batch."""
        context = self._context
        now = context.records.now()

        def finalizing(stored: StoredBatch) -> StoredBatch | None:
            if stored.ending:
                return None
            named = msgspec.structs.replace(
                stored,
                ending=ending or "failed",
                output_id=context.store.new_id(batch_program.FILE_ID_PREFIX, stored.output_ttl_s),
                error_id=context.store.new_id(batch_program.FILE_ID_PREFIX, stored.output_ttl_s),
            )
            if named.batch.status == "cancelling":
                return msgspec.structs.replace(named, ending="cancelled")
            return with_batch(named, status="finalizing", finalizing_at=now)

        stored = await self._update(finalizing)
        if stored is None:
            return None
        results = await self._open_results(stored.batch.request_counts.total)
        output_id = await self._write(
            stored.output_id, "output", results.lines(of_errors=False), results.num_completed
        )
        errors = self._errors(stored, results)
        num_errors = results.num_failed
        if stored.ending == "expired":
            num_errors += stored.batch.request_counts.total - results.num_done
        error_id = await self._write(stored.error_id, "errors", errors, num_errors)
        await context.leases.confirm(self._held)
        at, counts, usage = context.records.now(), self._counts(results), usage_of(results.tokens)

        def ended(stored: StoredBatch) -> StoredBatch | None:
            if stored.batch.status in ENDED or not stored.ending:
                return None
            changed = with_batch(
                stored,
                status=stored.ending,
                output_file_id=output_id,
                error_file_id=error_id,
                request_counts=counts,
                usage=usage,
                **{f"{stored.ending}_at": at},
            )
            return with_batch(changed, errors=_INPUT_GONE) if stored.ending == "failed" else changed

        return await self._update(ended)

    async def _write(
        self, file_id: str, what: str, lines: AsyncGenerator[bytes, None], num_lines: int
    ) -> str | None:
        """Write a file of results; return its id, None if it would be empty."""
        context = self._context
        async with aclosing(lines):
            if not num_lines:
                return None
            size = await context.store.upload(
                batch_program.FILES, self._owner, file_id, self._while_held(lines), is_counted=False
            )
        name = f"{self._batch_id}_{what}.jsonl"
        file = StoredFile(id=file_id, filename=name, purpose="batch_output", bytes=size)
        with contextlib.suppress(AlreadyExists):
            await context.files.add(self._owner, file, is_counted=False)
        return file_id

    async def _while_held(self, lines: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Yield lines, and raise LeaseLost at their end if another process may have written them: it removes the
        results of a batch that has ended, so these lines may not be all."""
        async for each in lines:
            yield each
        await self._context.leases.confirm(self._held)

    async def _errors(self, stored: StoredBatch, results: BatchResults) -> AsyncGenerator[bytes, None]:
        """Yield the lines of the file of errors: failed requests, and of an expired batch those without a result."""
        async with aclosing(results.lines(of_errors=True)) as lines:
            async for failed in lines:
                yield failed
        if stored.ending != "expired":
            return
        chunks = self._input(stored)
        async with aclosing(chunks), aclosing(split_lines(chunks, MAX_LINE_BYTES)) as inputs:
            index = -1
            async for _, line in inputs:
                index += 1
                if line is None or index >= stored.batch.request_counts.total or results.is_done(index):
                    continue
                yield unanswered(decode_line(line).custom_id, "batch_expired", _EXPIRED) + b"\n"

    @staticmethod
    def _counts(results: BatchResults) -> RequestCounts:
        return RequestCounts(total=results.total, completed=results.num_completed, failed=results.num_failed)


_INPUT_GONE: Final = LineErrors(
    data=[
        LineError(
            code="input_file_unavailable",
            message="the input file was deleted or expired before its last request",
        )
    ]
)


MAX_RUNNING: Final = 16
"""Batches that one process runs at a time."""
MAX_RUNNING_OF_OWNER: Final = 4
"""Of one key, so that others need not wait for its batches to end."""


class BatchRunner:
    """Runs batches in the background of one process."""

    def __init__(
        self, leases: BatchLeases, new_run: Callable[[HeldLease], BatchRun], *, poll_s: float
    ) -> None:
        """`poll_s` is how soon a batch is noticed that was made through another process."""
        self._leases = leases
        self._new_run = new_run
        self._poll_s = poll_s
        self._runs: dict[str, tuple[str, BatchRun, asyncio.Task[None]]] = {}
        """By the batch's id: owner, run and its task."""
        self._num_waiting = 0
        self._yielded: dict[str, int] = {}
        """Batches that have yielded their place, in order."""
        self._num_yielded = 0
        self._wake = asyncio.Event()
        self._is_stopping = False

    def wake(self) -> None:
        """Look for batches now."""
        self._wake.set()

    def statuses(self) -> Iterator[tuple[str, float]]:
        """Yield the number of batches that have not ended: by status those that this process runs, and all others as
        `elsewhere`."""
        running = Counter(run.status for _, run, _ in self._runs.values())
        for status in ("validating", "in_progress", "finalizing", "cancelling"):
            yield status, running[status]
        yield "elsewhere", self._num_waiting

    async def run(self) -> None:
        """Claim and run batches until cancelled, or stopped."""
        while not self._is_stopping:
            self._wake.clear()
            try:
                await self._claim()
            except StorageUnavailable:
                log.warning("batches could not be looked for; it will be tried again")
            except Exception:  # one object must not keep the other batches from being run
                log.exception("batches could not be looked for; it will be tried again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._wake.wait()

    def stop(self) -> None:
        """Claim no further batches, and send no further requests of those that run."""
        self._is_stopping = True
        self._wake.set()
        for _, run, _ in self._runs.values():
            run.stop()

    async def idle(self, timeout_s: float) -> None:
        """Wait until no batch runs here, for `timeout_s` at most."""
        tasks = [task for _, _, task in self._runs.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def close(self) -> None:
        """Cut what still runs, and release the leases."""
        self.stop()
        tasks = [task for _, _, task in self._runs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _claim(self) -> None:
        batches = await self._leases.batches()
        ids = {batch_id for _, batch_id in batches}
        self._yielded = {batch_id: order for batch_id, order in self._yielded.items() if batch_id in ids}
        waiting = [each for each in batches if each[1] not in self._runs]
        waiting.sort(key=lambda each: self._yielded.get(each[1], 0))  # those that have yielded are the last
        self._num_waiting = len(waiting)
        for owner, batch_id in waiting:
            if self._is_stopping:
                return
            if in_the_way := self._in_the_way(owner):
                await self._make_room(owner, batch_id, in_the_way)
                continue
            held = await self._leases.take(owner, batch_id)
            if held is not None:
                run = self._new_run(held)
                task = asyncio.create_task(self._run(held, run), name=f"batch {batch_id}")
                self._runs[batch_id] = owner, run, task
                self._num_waiting -= 1

    def _in_the_way(self, owner: str) -> list[BatchRun]:
        """Return the runs of which one must end before another batch of `owner` can begin; none if there is room."""
        of_owner = [run for running, run, _ in self._runs.values() if running == owner]
        if len(of_owner) >= MAX_RUNNING_OF_OWNER:
            return of_owner
        return [run for _, run, _ in self._runs.values()] if len(self._runs) >= MAX_RUNNING else []

    async def _make_room(self, owner: str, batch_id: str, in_the_way: list[BatchRun]) -> None:
        """Have one of the runs that only wait end, if this process could run the batch in its place."""
        only_wait = [run for run in in_the_way if run.may_yield]
        if not only_wait or any(run.is_yielding for run in in_the_way):
            return
        held = await self._leases.take(owner, batch_id)
        if held is not None:  # no other process runs it
            await self._leases.release(held)
            only_wait[0].yield_place()

    async def _run(self, held: HeldLease, run: BatchRun) -> None:
        try:
            await run.run()
        except StorageUnavailable:
            log.warning("batch %s: the storage does not answer; it will be tried again", held.batch_id)
        except LeaseLost:
            log.warning("batch %s: another process may have taken over", held.batch_id)
        except AccountGone:
            log.warning("batch %s: no key has its account; it will be tried again", held.batch_id)
        except Exception:
            log.exception("batch %s failed; it will be tried again", held.batch_id)
        else:
            if held.is_lost or run.is_yielding:  # there is room for another one
                self._wake.set()
        finally:
            if run.is_yielding:
                self._num_yielded += 1
                self._yielded[held.batch_id] = self._num_yielded
            try:
                with contextlib.suppress(StorageUnavailable):
                    await self._leases.release(held)
            finally:
                del self._runs[held.batch_id]  # not before, or it would be taken again meanwhile
