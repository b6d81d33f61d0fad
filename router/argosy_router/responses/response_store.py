"""Stored responses, as `argosy batch` keeps them for this router.

Owns: the calls, the records that are being written, and this router's heartbeat. Must not know: HTTP of clients.
Invariants: nobody waits for a write longer than `PATIENCE_S`: it then goes on by itself; the records that are being
written take no more than `MAX_WRITING_BYTES`. What could not be written is counted and logged, and the response is not
there for who asks for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import msgspec

from argosy_protocol import object_ids
from argosy_protocol.batch_program import (
    BEAT_S,
    BEATS_FOR_S,
    HEARTBEATS_PATH,
    RESPONSES_PATH,
    Heartbeat,
    Heartbeats,
)
from argosy_protocol.errors import ApiError, ResponseNotFound, StorageUnavailable, Unavailable
from argosy_protocol.response_history import StoredResponse
from argosy_protocol.response_object import ID_PREFIX
from argosy_router.batch.batch_client import BatchClient
from argosy_router.http.body_memory import BodyMemory
from argosy_router.metrics import definitions as define
from argosy_router.metrics.series import Series
from argosy_router.proxy.request.ended_response import decoded_record

log = logging.getLogger(__name__)

PATIENCE_S: Final = 2.0
"""How long the end of an answer waits for its response to be stored."""
MAX_WRITING_BYTES: Final = 128 * 1024 * 1024
"""An account's records may take three times as much as is free of it (`BodyMemory`). A record alone may be larger."""
_decode_heartbeat: Final = msgspec.json.Decoder(Heartbeat).decode


ReadOf = Callable[[str, bytes, bool], Awaitable[StoredResponse]]
"""Reads a record of an account, with its output or without (`LargeBodies.read_record`)."""


async def _read_at_once(_: str, record: bytes, __: bool) -> StoredResponse:
    return decoded_record(record)


class ResponseStore:
    """The responses of all accounts, by the account's name. All methods raise ApiError if the storage fails or
    refuses."""

    def __init__(
        self,
        program: BatchClient,
        ttl_s: float,
        *,
        patience_s: float = PATIENCE_S,
        now: Callable[[], float] = time.time,
        read: ReadOf = _read_at_once,
    ) -> None:
        """`ttl_s` is how long a response is kept; `now` is in seconds since the epoch; `read` reads records."""
        self._read = read
        self.heartbeat = RunHeartbeat(program)
        self._program = program
        self._ttl_s = ttl_s
        self._patience_s = patience_s
        self._now = now
        self._writes: set[asyncio.Task[None]] = set()
        self._writing = BodyMemory(MAX_WRITING_BYTES)
        self._outcomes = define.RESPONSE_WRITES.counter()

    def series(self) -> tuple[Series, ...]:
        """Return the metrics of stored responses."""
        return (
            self._outcomes,
            define.RESPONSE_WRITING_BYTES.value(lambda: self._writing.held),
        )

    def new_id(self) -> str:
        return object_ids.new_id(ID_PREFIX, self._now(), self._ttl_s)

    async def keep(self, account: str, response_id: str, record: StoredResponse) -> None:
        """Store the record of a response that has ended; return once it is stored, or cannot be, or `PATIENCE_S` have
        passed."""
        document = record.encoded()
        size = min(len(document), MAX_WRITING_BYTES)
        try:
            self._writing.reserve(size, account or None, 0)
        except Unavailable:
            self.count_unstored()
            log.warning(
                "a response was not stored: too many are being stored already, of its account or in all"
            )
            return
        task = asyncio.create_task(self._keep(account, response_id, document), name="store a response")
        self._writes.add(task)
        task.add_done_callback(lambda task: self._on_written(task, account, size))
        done, _ = await asyncio.wait([task], timeout=self._patience_s)
        if not done:
            self._outcomes.add(("late",))

    def count_unstored(self) -> None:
        """Count a response that is not stored for want of memory."""
        self._outcomes.add(("refused",))

    async def _keep(self, account: str, response_id: str, document: bytes) -> None:
        try:
            await self._program.call("POST", f"{RESPONSES_PATH}/{response_id}", account, document)
        except ApiError as error:
            self._outcomes.add(("failed",))
            log.warning("a response could not be stored: %s", error.message)
        except Exception:
            self._outcomes.add(("failed",))
            log.exception("a response could not be stored")
        else:
            self._outcomes.add(("stored",))

    def _on_written(self, task: asyncio.Task[None], account: str, size: int) -> None:
        self._writes.discard(task)
        self._writing.release(size, account or None)

    async def add(self, account: str, response_id: str, record: StoredResponse) -> None:
        """Store a new record."""
        await self._program.call("POST", f"{RESPONSES_PATH}/{response_id}", account, record.encoded())

    async def find(
        self,
        account: str,
        response_id: str,
        reserve: Callable[[int], None] | None = None,
        *,
        has_output: bool = False,
    ) -> StoredResponse | None:
        """Return a record; None if the account has none of this id.

        Args:
            reserve: called with its size before it is read, and may refuse that by an ApiError.
            has_output: whether the state of its response must have the output, because a request continues it.
        """
        if not object_ids.is_id(response_id):
            return None
        try:
            answer = await self._program.call(
                "GET", f"{RESPONSES_PATH}/{response_id}", account, reserve=reserve
            )
        except ResponseNotFound:
            return None
        return await self._decoded(account, answer.body, has_output=has_output)

    async def finish(
        self, account: str, response_id: str, record: StoredResponse, *, is_read: bool = True
    ) -> StoredResponse | None:
        """Store the end of a response, unless it has one or was deleted; return the record that is stored now, if that
        `is_read`: a long one takes the event loop's time."""
        try:
            answer = await self._program.call(
                "PUT", f"{RESPONSES_PATH}/{response_id}", account, record.encoded()
            )
        except ResponseNotFound:
            return None
        return await self._decoded(account, answer.body) if is_read else None

    async def _decoded(self, account: str, record: bytes, *, has_output: bool = False) -> StoredResponse:
        try:
            return await self._read(account, record, has_output)
        except ValueError as error:  # msgspec's, too
            raise StorageUnavailable from error

    async def remove(self, account: str, response_id: str) -> bool:
        if not object_ids.is_id(response_id):
            return False
        try:
            await self._program.call("DELETE", f"{RESPONSES_PATH}/{response_id}", account)
        except ResponseNotFound:
            return False
        return True

    async def close(self) -> None:
        """Wait a moment for what is being written; give up the rest."""
        tasks = list(self._writes)
        if tasks:
            await asyncio.wait(tasks, timeout=self._patience_s)
        for task in self._writes:
            task.cancel()
        await asyncio.gather(*self._writes, return_exceptions=True)


class RunHeartbeat:
    """This router's heartbeat, by which others notice that it does not generate its background responses any more."""

    def __init__(self, program: BatchClient, now: Callable[[], float] = time.monotonic) -> None:
        self._program = program
        self._now = now
        self._current = ""
        self._made = self._written = 0.0
        self._beating = asyncio.Lock()

    async def begin(self) -> str:
        """Return the id of the heartbeat, for a run that begins. It was written just now."""
        async with self._beating:
            now = self._now()
            if not self._current or now - self._made > BEATS_FOR_S:
                answer = await self._program.call("POST", HEARTBEATS_PATH, "")
                self._current = _decode_heartbeat(answer.body).id
                self._made = self._written = now
            elif now - self._written >= BEAT_S:
                await self._write([self._current])
            return self._current

    async def beat(self, runners: Iterable[str]) -> None:
        """Write the heartbeats that runs of this router have."""
        async with self._beating:
            await self._write(sorted(set(runners)))

    async def _write(self, runners: list[str]) -> None:
        await self._program.call("PUT", HEARTBEATS_PATH, "", msgspec.json.encode(Heartbeats(runners[:1024])))
        if self._current in runners:
            self._written = self._now()
