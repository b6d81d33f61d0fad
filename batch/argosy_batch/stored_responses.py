"""Records of responses, as the storage keeps them.

Owns: the form of a document, and what a record says that is not finished. Must not know: HTTP, requests.
Invariant: a response that no router works on any more is not unfinished for ever: it has failed once it is read by a
process that has seen that router gone (`run_heartbeats`), and after `MAX_RUN_S` in any case.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from argosy_batch.run_heartbeats import RunHeartbeats
from argosy_batch.storage.blob_store import Changed
from argosy_batch.storage.object_store import ObjectStore, owner_of
from argosy_batch.storage.owner_usage import QuotaExceeded
from argosy_protocol.errors import StorageUnavailable
from argosy_protocol.response_history import StoredResponse
from argosy_protocol.response_object import ResponseState, with_status

log = logging.getLogger(__name__)

KIND: Final = "responses"
SHARE_DROPPED: Final = 20
"""One in so many records is dropped at a time, because finding the oldest lists all of them."""
MAX_DROPPED: Final = 500
"""Of them, in one go."""
MAX_RUN_S: Final = 3600.0
"""Time after which a background response is given up."""

_decode = msgspec.json.Decoder(StoredResponse).decode


def owner_of_responses(account_name: str) -> str:
    """Return the owner that stands for an account's responses. Responses have a quota of their own: as they are stored
    without being asked for, they would leave no room for files."""
    return owner_of(f"{account_name}\0{KIND}")


def _decoded(data: bytes) -> tuple[StoredResponse, ResponseState]:
    record = _decode(data)
    return record, record.state()


class StoredResponses:
    """The responses of all owners. All methods raise ApiError if the storage fails or refuses."""

    def __init__(
        self,
        storage: ObjectStore,
        *,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` is in seconds since the epoch."""
        self.heartbeats = RunHeartbeats(storage, monotonic)
        self._storage = storage
        self._now = now
        self._purges: dict[str, asyncio.Task[None]] = {}
        """Of owners whose oldest records are being deleted."""

    async def add(self, owner: str, response_id: str, record: StoredResponse) -> None:
        """Store a new record. The owner's oldest ones make room for it if need be.

        Raises:
            QuotaExceeded: it is larger than all records of one owner may be; none was dropped.
        """
        document = msgspec.json.encode(record)
        if len(document) > self._storage.max_bytes:
            raise QuotaExceeded(
                f"a response and its conversation of {len(document)} bytes exceed the limit of "
                f"{self._storage.max_bytes} bytes (--storage-max-bytes)"
            )
        while True:
            try:
                await self._storage.create(KIND, owner, response_id, document)
            except QuotaExceeded:
                if not await self._make_room(owner, len(document)):
                    raise
            else:
                return

    async def _make_room(self, owner: str, size: int) -> bool:
        """Delete the owner's oldest records until one of `size` bytes has room; return whether any was there. A page
        more of them goes in the background, so that the next record need not wait."""
        purging = self._purges.get(owner)
        if purging is not None:  # it makes room; it does not fail
            await asyncio.wait([purging])
            return True
        oldest = await self._storage.ids(KIND, owner)
        if not oldest:
            return False
        freed = number = 0
        while number < len(oldest) and freed < size:
            record = await self._storage.read(KIND, owner, oldest[number])
            await self._storage.delete(KIND, owner, oldest[number])
            freed += 0 if record is None else len(record.data)
            number += 1
        page = oldest[number : number + 1 + min(len(oldest) // SHARE_DROPPED, MAX_DROPPED)]
        if page and owner not in self._purges:
            task = self._purges[owner] = asyncio.create_task(self._purge(owner, page), name="purge")
            task.add_done_callback(lambda _: self._purges.pop(owner, None))
        return True

    async def _purge(self, owner: str, page: Sequence[str]) -> None:
        try:
            for each in page:
                await self._storage.delete(KIND, owner, each)
        except StorageUnavailable:
            log.warning("old responses could not be deleted; it will be tried again")
        except Exception:
            log.exception("old responses could not be deleted; it will be tried again")

    async def close(self) -> None:
        """End the deletion of old records."""
        tasks = list(self._purges.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a record; None if the owner has none of this id."""
        found = await self._storage.read_as(KIND, owner, response_id, _decoded)
        if found is None:
            return None
        record, state = found[0]
        if state.is_finished:
            return record
        is_late = state.created_at + MAX_RUN_S <= self._now()
        if not (is_late or await self.heartbeats.is_gone(record.runner)):
            return record
        failed = with_status(bytes(record.response), "failed", "the router that generated it has stopped")
        ended = StoredResponse(msgspec.Raw(failed), record.items)
        return ended if is_late else await self.finish(owner, response_id, ended)

    async def finish(self, owner: str, response_id: str, record: StoredResponse) -> StoredResponse | None:
        """Store the end of a response, unless it has one or was deleted; return the record that is stored now."""
        while True:
            found = await self._storage.read_as(KIND, owner, response_id, _decoded)
            if found is None:
                return None
            (before, state), version = found
            if state.is_finished:
                return before
            try:
                await self._storage.replace(KIND, owner, response_id, msgspec.json.encode(record), version)
            except Changed:
                continue
            return record

    async def remove(self, owner: str, response_id: str) -> bool:
        return await self._storage.delete(KIND, owner, response_id)
