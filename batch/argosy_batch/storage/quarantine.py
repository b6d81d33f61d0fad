"""Objects that cannot be read: kept aside, so that one of them stops nothing, and somebody can look at it.

quarantine/NAME     a copy; NAME is the object's key with underscores for slashes
"""

from __future__ import annotations

import contextlib
import logging
from typing import Final

from argosy_batch.storage.blob_store import AlreadyExists, BlobStore

log = logging.getLogger(__name__)

FOLDER: Final = "quarantine"


class Quarantine:
    """Takes what cannot be read."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self.num_taken = 0

    async def take(self, key: str, data: bytes, why: Exception) -> None:
        """Keep a copy of an object. What it is replaced by, or that it is deleted, is the caller's business."""
        name = f"{FOLDER}/{key.replace('/', '_')}"
        self.num_taken += 1
        log.error("storage: %s cannot be read (%s); a copy is kept as %s", key, str(why)[:200], name)
        with contextlib.suppress(AlreadyExists):
            await self._blobs.create(name, data)
