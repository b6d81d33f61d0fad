"""Records of responses, as the router's storage keeps them.

Owns: the form of a document, and what a record says that is not finished. Must not know: HTTP, requests.
Invariant: a response that no router works on any more is not unfinished for ever: it has failed once it is read through
a router that has seen the other one gone (`run_heartbeats`), and after `MAX_RUN_S` in any case.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from argosy_protocol.response_history import StoredResponse
from argosy_protocol.response_object import ID_PREFIX, ResponseState, with_status
from argosy_router.responses.run_heartbeats import RunHeartbeats
from argosy_router.storage.blob_store import Changed
from argosy_router.storage.object_store import ObjectStore, owner_of
from argosy_router.storage.owner_usage import QuotaExceeded

KIND: Final = "responses"
SHARE_DROPPED: Final = 20
"""One in so many records is dropped at a time, because finding the oldest lists all of them."""
MAX_RUN_S: Final = 3600.0
"""Time after which a background response is given up."""

_decode = msgspec.json.Decoder(StoredResponse).decode
_decode_state = msgspec.json.Decoder(ResponseState).decode


def owner_of_responses(account_name: str) -> str:
    """Return the owner that stands for an account's responses. Responses have a quota of their own: as they are stored
    without being asked for, they would leave no room for files."""
    return owner_of(f"{account_name}\0{KIND}")


def is_response(data: bytes) -> bool:
    """Whether an engine's answer, given as JSON, is a response that has ended: only such a one can be stored."""
    try:
        return _decode_state(data).is_finished
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


class StoredResponses:
    """The responses of all owners. All methods raise ApiError if the storage fails or refuses."""

    def __init__(
        self,
        storage: ObjectStore,
        ttl_s: float,
        *,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ttl_s` is how long a response is kept; `now` is in seconds since the epoch."""
        self.heartbeats = RunHeartbeats(storage, monotonic)
        self._storage = storage
        self._ttl_s = ttl_s
        self._now = now

    def new_id(self) -> str:
        return self._storage.new_id(ID_PREFIX, self._ttl_s)

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
                oldest = await self._storage.ids(KIND, owner)
                if not oldest:
                    raise
                for each in oldest[: 1 + len(oldest) // SHARE_DROPPED]:
                    await self._storage.delete(KIND, owner, each)
            else:
                return

    async def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a record; None if the owner has none of this id."""
        document = await self._storage.read(KIND, owner, response_id)
        if document is None:
            return None
        record = _decode(document.data)
        state = record.state()
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
            document = await self._storage.read(KIND, owner, response_id)
            if document is None:
                return None
            before = _decode(document.data)
            if before.state().is_finished:
                return before
            try:
                await self._storage.replace(
                    KIND, owner, response_id, msgspec.json.encode(record), document.version
                )
            except Changed:
                continue
            return record

    async def remove(self, owner: str, response_id: str) -> bool:
        return await self._storage.delete(KIND, owner, response_id)
