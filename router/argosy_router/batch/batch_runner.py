"""The runner: claims batches that no other router runs, and runs them to their end.

Owns: which batches this router runs. Must not know: how one is run.
Invariant: a batch is run while its lease is held, and released when it is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from argosy_router.batch.batch_lease import BatchLeases, HeldLease, LeaseLost
from argosy_router.batch.batch_run import AccountGone, BatchRun
from argosy_router.metrics.series import Labels
from argosy_router.storage.blob_store import StorageUnavailable

log = logging.getLogger(__name__)

MAX_RUNNING: Final = 16
"""Batches that one router runs at a time."""
MAX_RUNNING_OF_OWNER: Final = 4
"""Of one key, so that others need not wait for its batches to end."""


class BatchRunner:
    """Runs batches in the background of one router."""

    def __init__(
        self, leases: BatchLeases, new_run: Callable[[HeldLease], BatchRun], *, poll_s: float
    ) -> None:
        """`poll_s` is how soon a batch is noticed that was made through another router."""
        self._leases = leases
        self._new_run = new_run
        self._poll_s = poll_s
        self._runs: dict[str, tuple[str, BatchRun, asyncio.Task[None]]] = {}
        """By the batch's id: owner, run and its task."""
        self._num_waiting = 0
        self._wake = asyncio.Event()
        self._is_stopping = False

    def wake(self) -> None:
        """Look for batches now."""
        self._wake.set()

    def statuses(self) -> Iterator[tuple[Labels, float]]:
        """Yield the number of batches that have not ended: by status those that this router runs, and all others as
        `elsewhere`."""
        running = Counter(run.status for _, run, _ in self._runs.values())
        for status in ("validating", "in_progress", "finalizing", "cancelling"):
            yield (status,), running[status]
        yield ("elsewhere",), self._num_waiting

    async def run(self) -> None:
        """Claim and run batches until cancelled, or stopped."""
        while not self._is_stopping:
            self._wake.clear()
            try:
                await self._claim()
            except StorageUnavailable:
                log.warning("batches could not be looked for; it will be tried again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._wake.wait()

    def stop(self) -> None:
        """Claim no further batches, and send no further requests of those that run."""
        self._is_stopping = True
        self._wake.set()
        for _, run, _ in self._runs.values():
            run.stop()

    async def close(self) -> None:
        """Cut what still runs, and release the leases."""
        self.stop()
        tasks = [task for _, _, task in self._runs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _claim(self) -> None:
        waiting = [each for each in await self._leases.batches() if each[1] not in self._runs]
        self._num_waiting = len(waiting)
        for owner, batch_id in waiting:
            if len(self._runs) >= MAX_RUNNING or self._is_stopping:
                return
            if sum(running == owner for running, _, _ in self._runs.values()) >= MAX_RUNNING_OF_OWNER:
                continue
            held = await self._leases.take(owner, batch_id)
            if held is not None:
                run = self._new_run(held)
                task = asyncio.create_task(self._run(held, run), name=f"batch {batch_id}")
                self._runs[batch_id] = owner, run, task
                self._num_waiting -= 1

    async def _run(self, held: HeldLease, run: BatchRun) -> None:
        try:
            await run.run()
        except StorageUnavailable:
            log.warning("batch %s: the storage does not answer; it will be tried again", held.batch_id)
        except LeaseLost:
            log.warning("batch %s: another router may have taken over", held.batch_id)
        except AccountGone:
            log.warning("batch %s: no key has its account; it will be tried again", held.batch_id)
        except Exception:
            log.exception("batch %s failed; it will be tried again", held.batch_id)
        else:
            if held.is_lost:  # with the end of the batch: there is room for another one
                self._wake.set()
        finally:
            del self._runs[held.batch_id]
            with contextlib.suppress(StorageUnavailable):
                await self._leases.release(held)
