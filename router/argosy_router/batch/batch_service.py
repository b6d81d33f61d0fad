"""The Batch API of one router: assembly of its parts, their tasks, metrics and end.

Owns: which parts there are. Must not know: what they do.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from argosy_router.auth.key_table import KeyTable
from argosy_router.batch.answer_memory import AnswerMemory
from argosy_router.batch.batch_lease import BatchLeases
from argosy_router.batch.batch_pace import BatchPace
from argosy_router.batch.batch_records import BatchRecords
from argosy_router.batch.batch_routes import BatchRoutes
from argosy_router.batch.batch_run import BatchRun, RunContext
from argosy_router.batch.batch_runner import BatchRunner
from argosy_router.batch.batches_api import BatchesApi
from argosy_router.batch.files_api import FilesApi
from argosy_router.batch.line_request import LineRequests
from argosy_router.config import StorageConfig
from argosy_router.fleet.fleet import Fleet
from argosy_router.flow_control.controller import FlowController
from argosy_router.metrics import definitions as define
from argosy_router.metrics.series import Series
from argosy_router.proxy.accounting.request_accounting import RequestAccounting
from argosy_router.proxy.application import RouterApplication
from argosy_router.storage.object_store import ObjectStore


class BatchService:
    """Files and batches of one router."""

    def __init__(
        self,
        config: StorageConfig,
        store: ObjectStore,
        *,
        fleet: Fleet,
        flow_control: FlowController,
        application: RouterApplication,
        accounting: RequestAccounting,
        keys: KeyTable,
    ) -> None:
        self._store = store
        self._ended = define.BATCHES_ENDED.counter()
        self._requests = define.BATCH_REQUESTS.counter()
        self._pace = BatchPace(
            fleet, flow_control, max_inflight=config.batch_max_inflight, share=config.batch_share
        )
        files = FilesApi(store, max_file_bytes=config.max_file_bytes, ttl_s=config.storage_ttl_s)
        records = BatchRecords(store)
        leases = BatchLeases(store.blobs, config.lease_s)
        context = RunContext(
            store=store,
            files=files,
            records=records,
            leases=leases,
            requests=LineRequests(
                application.answer_in_background, self._pace, lambda: self._requests.add(("retried",))
            ),
            answers=AnswerMemory(),
            account_named=keys.account_named,
            max_requests=config.batch_max_requests,
            max_pending=config.batch_max_inflight,
            on_done=lambda is_good: self._requests.add(("completed" if is_good else "failed",)),
            on_ended=lambda status: self._ended.add((status,)),
        )
        self.runner = BatchRunner(leases, lambda held: BatchRun(held, context), poll_s=leases.renew_s)
        batches = BatchesApi(
            store,
            files,
            records,
            leases,
            serves=application.serves,
            ttl_s=config.storage_ttl_s,
            on_created=self.runner.wake,
        )
        self.routes = BatchRoutes(files, batches, accounting)

    def series(self) -> tuple[Series, ...]:
        """Return the metrics of files and batches."""
        store = self._store
        return (
            define.STORED_BYTES.value(lambda: store.total.bytes),
            define.STORED_OBJECTS.value(lambda: store.total.objects),
            define.BATCHES.reading(self.runner.statuses),
            self._ended,
            self._requests,
            define.BATCH_REQUESTS_INFLIGHT.value(lambda: self._pace.inflight),
        )

    def tasks(self) -> tuple[tuple[str, Coroutine[Any, Any, None]], ...]:
        """Return what must run as long as the router, by name."""
        return ("batches", self.runner.run()), ("storage sweep", self._store.sweep_for_ever())

    def stop(self) -> None:
        """Send no further requests of batches; those in flight go on."""
        self._pace.close()
        self.runner.stop()

    async def close(self) -> None:
        """Cut everything, and release the batches for other routers."""
        self.stop()
        await self.runner.close()
        await self.routes.close()
