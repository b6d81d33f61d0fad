"""Records of responses, as the storage keeps them, and the heartbeats of routers that generate responses in the
background, so that others notice when one has died.

Owns: the form of a document, what a record says that is not finished, the heartbeats and what was seen of them. Must
not know: HTTP, requests.
Invariants: a response that no router works on any more is not unfinished for ever: it has failed once it is read by a
process that has seen that router gone, and after `MAX_RUN_S` in any case. A router counts as gone only if its heartbeat
did not change for `GONE_S` by this process's clock, in looks that all succeeded and were at most `MAX_GAP_S` apart. So
the storage has worked meanwhile, and clocks need not agree.

    work/ROUTER_ID.json     changes every `batch_program.BEAT_S` while the router generates; the
                            sweep removes it at the end of the id
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from argosy_batch.object_store import AlreadyExists, Changed, ObjectStore, QuotaExceeded, owner_of
from argosy_protocol import batch_program
from argosy_protocol.errors import StorageUnavailable
from argosy_protocol.response_history import StoredResponse
from argosy_protocol.responses import ResponseProgress, with_status

MAX_GAP_S: Final = 30.0
"""Clients poll more often."""
GONE_S: Final = 60.0
ID_PREFIX: Final = "router-"
TTL_S: Final = 7 * 86400.0
"""Of one id; a router takes another one after a day, and no run takes so long as the rest."""
_MAX_SEEN: Final = 1024


class _Seen(NamedTuple):
    version: str
    since: float
    """When it was seen first."""
    last: float


class RunHeartbeats:
    """The heartbeats that one process writes for routers, and reads. Times are a monotonic clock's."""

    def __init__(self, storage: ObjectStore, now: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage
        self._now = now
        self._own: dict[str, tuple[str, float]] = {}
        """Of each heartbeat that this process has written of late, its version and when it was written."""
        self._num_beats = 0
        self._writer = secrets.token_hex(8).encode()
        """Some storages tell versions by their content: no other process may write the same."""
        self._writing = asyncio.Lock()
        self._seen: dict[str, _Seen] = {}
        """Of others; longest ago seen first."""

    async def begin(self) -> str:
        """Return the id of a new heartbeat, which was written just now."""
        async with self._writing:
            runner = self._storage.new_id(ID_PREFIX, TTL_S)
            await self._write(runner)
            return runner

    async def beat(self, runners: Iterable[str]) -> None:
        """Write heartbeats again."""
        async with self._writing:
            for runner in runners:
                if batch_program.is_id(runner) and runner.startswith(ID_PREFIX):
                    await self._write(runner)
            now = self._now()
            self._own = {runner: own for runner, own in self._own.items() if now - own[1] < GONE_S}

    async def _write(self, runner: str) -> None:
        self._num_beats += 1
        data = b'{"beats":%d,"writer":"%b"}' % (self._num_beats, self._writer)
        blobs, key = self._storage.blobs, _key(runner)
        for _ in range(3):  # what was written last may be another process's, which is noticed in two attempts
            try:
                if runner in self._own:
                    version = await blobs.replace(key, data, self._own[runner][0])
                else:
                    version = await blobs.create(key, data)
            except AlreadyExists:  # a write before this one failed, but was made
                found = await blobs.get(key)
                if found is not None:
                    self._own[runner] = found.version, self._now()
            except Changed:
                del self._own[runner]
            else:
                self._own[runner] = version, self._now()
                return
        raise StorageUnavailable

    async def is_gone(self, runner: str) -> bool:
        """Look whether a router is gone. The first look is never enough."""
        own = self._own.get(runner)
        if (own is not None and self._now() - own[1] < GONE_S) or not batch_program.is_id(runner):
            return False
        try:
            blob = await self._storage.blobs.get(_key(runner))
        except StorageUnavailable:
            self._seen.pop(runner, None)
            raise
        now, version = self._now(), "" if blob is None else blob.version
        seen = self._seen.pop(runner, None)
        if seen is None or seen.version != version or now - seen.last > MAX_GAP_S:
            seen = _Seen(version, now, now)
        if len(self._seen) >= _MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        self._seen[runner] = seen._replace(last=now)
        return now - seen.since >= GONE_S


def _key(runner: str) -> str:
    return f"work/{runner}.json"


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


def _decoded(data: bytes) -> tuple[StoredResponse, ResponseProgress]:
    record = _decode(data)
    return record, record.progress()


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
