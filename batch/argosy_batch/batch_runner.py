"""The runner: claims batches that no other process runs, and runs them to their end.

Owns: which batches this process runs. Must not know: how one is run.
Invariants: a batch is run while its lease is held, and released when it is left. A batch whose requests have all been
refused for some time yields its place to one that waits for it, and goes behind the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from argosy_batch.batch_lease import BatchLeases, HeldLease, LeaseLost
from argosy_batch.batch_run import BatchRun
from argosy_batch.router_client import AccountGone
from argosy_protocol.errors import StorageUnavailable

log = logging.getLogger(__name__)

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
