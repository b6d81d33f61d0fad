"""/v1/batches: create, list, retrieve, cancel.

Owns: what a client may ask of a batch. Must not know: connections, how a batch is run.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from argosy_batch.batch_lease import BatchLeases
from argosy_batch.batch_records import BatchRecords, with_batch
from argosy_batch.files_api import FilesApi
from argosy_batch.listing import in_order, limit_of, page_of
from argosy_batch.storage.blob_store import AlreadyExists
from argosy_batch.storage.object_store import ObjectStore
from argosy_protocol import batch_objects
from argosy_protocol.batch_objects import ENDED, BatchObject, StoredBatch, no_such_batch
from argosy_protocol.errors import BadRequest, StorageUnavailable
from argosy_protocol.file_objects import Page

log = logging.getLogger(__name__)

_DEFAULT_LIMIT: Final = 20


class BatchesApi:
    """The batches of all keys."""

    def __init__(
        self,
        store: ObjectStore,
        files: FilesApi,
        records: BatchRecords,
        leases: BatchLeases,
        *,
        ttl_s: float,
        on_created: Callable[[], None],
    ) -> None:
        """
        Args:
            ttl_s: how long batches live, and the files of their results.
            on_created: called when there is a batch to run.
        """
        self._store = store
        self._files = files
        self._records = records
        self._leases = leases
        self._ttl_s = ttl_s
        self._on_created = on_created
        self._ended: set[str] = set()
        """Stored batches that were seen to have ended, whose documents a sweep need not read again."""

    async def create(self, owner: str, account: str, body: bytes) -> BatchObject:
        """Make a batch of `account`.

        Raises:
            BadRequest: the request is not as documented, or names a file that the owner does not have.
        """
        create = batch_objects.decode_create(body)
        file = await self._files.find(owner, create.input_file_id)
        if file is None or file.purpose != "batch":
            raise BadRequest(
                f"there is no file {create.input_file_id!r} with purpose batch; upload it to /v1/files first",
                param="input_file_id",
            )
        batch_id = self._store.new_id(batch_objects.ID_PREFIX, max(self._ttl_s, 2 * batch_objects.WINDOW_S))
        stored = batch_objects.new_batch(batch_id, create, account, self._ttl_s)
        # A lease without a batch is removed by whoever finds it; a batch without a lease would never run.
        await self._leases.create(owner, batch_id)
        try:
            await self._records.create(owner, stored)
        except StorageUnavailable:
            raise  # the batch may have been stored all the same
        except Exception:
            await self._leases.remove(owner, batch_id)
            raise
        with contextlib.suppress(StorageUnavailable):  # then the next sweep does it
            await self._lease_again(owner, batch_id)
        self._on_created()
        return stored.batch

    async def lease_again(self, documents: Iterable[str]) -> None:
        """Make the leases of batches that have not ended and have none, so that they end.

        Args:
            documents: where the documents of the storage are, as `ObjectStore.sweep` found them.
        """
        stored = set()
        for document in documents:
            parts = document.split("/")
            if len(parts) == 4 and parts[2] == batch_objects.KIND:
                stored.add((parts[1], parts[3]))
        self._ended &= {batch_id for _, batch_id in stored}
        leased = set(await self._leases.batches())
        for owner, batch_id in stored - leased:
            if batch_id not in self._ended and await self._lease_again(owner, batch_id):
                log.warning("batch %s had no lease, and has one again", batch_id)
                self._on_created()

    async def _lease_again(self, owner: str, batch_id: str) -> bool:
        """Make the lease of a batch that has not ended, if it is gone; return whether it was."""
        if await self._leases.exists(owner, batch_id):
            return False
        stored = await self._records.read(owner, batch_id)
        if stored is None:
            return False
        if stored.batch.status in ENDED:
            self._ended.add(batch_id)
            return False
        with contextlib.suppress(AlreadyExists):
            await self._leases.create(owner, batch_id)
            return True
        return False

    async def get(self, owner: str, batch_id: str) -> BatchObject:
        """Raises NotFound if the owner has no such batch, as `cancel`."""
        stored = await self._records.read(owner, batch_id)
        if stored is None:
            raise no_such_batch(batch_id)
        return stored.batch

    async def cancel(self, owner: str, batch_id: str) -> BatchObject:
        """Ask for a batch to be cancelled; the program that runs it does so."""

        def cancelling(stored: StoredBatch) -> StoredBatch | None:
            status = stored.batch.status
            if status in ("cancelling", "cancelled"):
                return None
            if status not in ("validating", "in_progress"):
                raise BadRequest(f"a batch with status {status!r} cannot be cancelled")
            return with_batch(stored, status="cancelling", cancelling_at=self._records.now())

        stored = await self._records.update(owner, batch_id, cancelling)
        if stored is None:
            raise no_such_batch(batch_id)
        self._on_created()
        return stored.batch

    async def list(self, owner: str, query: Mapping[str, str]) -> Page[BatchObject]:
        """Return a page of the owner's batches, the newest first."""
        limit = limit_of(query, _DEFAULT_LIMIT, batch_objects.MAX_LISTED)
        asked = {"after": query.get("after", "")}
        ids = in_order(await self._records.ids(owner), asked, batch_objects.ID_PREFIX)

        async def read(batch_id: str) -> BatchObject | None:
            stored = await self._records.read(owner, batch_id)
            return None if stored is None else stored.batch

        return await page_of(ids, limit, read)
