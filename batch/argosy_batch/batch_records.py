"""The documents of batches in the storage.

Owns: their updates, in which no process's change is lost. Must not know: why they change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from argosy_batch.storage.blob_store import Changed
from argosy_batch.storage.object_store import ObjectStore
from argosy_protocol import batch_objects
from argosy_protocol.batch_objects import BatchObject, StoredBatch
from argosy_protocol.errors import StorageUnavailable

_ATTEMPTS: Final = 20
"""Two processes and a client change a batch at a time."""


class BatchRecords:
    """The batches of all keys."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def now(self) -> int:
        """Seconds since the epoch."""
        return int(self._store.now())

    async def create(self, owner: str, stored: StoredBatch) -> None:
        await self._store.create(batch_objects.KIND, owner, stored.batch.id, msgspec.json.encode(stored))

    async def read(self, owner: str, batch_id: str) -> StoredBatch | None:
        """Return a batch; None if the owner has none of this id."""
        found = await self._store.read_as(batch_objects.KIND, owner, batch_id, batch_objects.decode_stored)
        return None if found is None else found[0]

    async def ids(self, owner: str) -> list[str]:
        """Return the ids of an owner's batches, oldest first."""
        return await self._store.ids(batch_objects.KIND, owner)

    async def update(
        self, owner: str, batch_id: str, change: Callable[[StoredBatch], StoredBatch | None]
    ) -> StoredBatch | None:
        """Change a batch; return it as it is then, or None if there is none.

        Args:
            change: returns the changed batch, or None to leave it; called again if another change came first.
        """
        for _ in range(_ATTEMPTS):
            found = await self._store.read_as(
                batch_objects.KIND, owner, batch_id, batch_objects.decode_stored
            )
            if found is None:
                return None
            stored, version = found
            changed = change(stored)
            if changed is None:
                return stored
            try:
                await self._store.replace(
                    batch_objects.KIND, owner, batch_id, msgspec.json.encode(changed), version
                )
            except Changed:
                continue
            return changed
        raise StorageUnavailable


def with_batch(stored: StoredBatch, **fields: object) -> StoredBatch:
    """Return a document with other values of its batch's fields."""
    batch: BatchObject = msgspec.structs.replace(stored.batch, **fields)
    return msgspec.structs.replace(stored, batch=batch)
