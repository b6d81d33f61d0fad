"""Stored responses, as `argosy batch` keeps them for this router.

Owns: the calls, the records that are being written, this router's heartbeat, and which part of an answer is stored.
Invariants: a client that has read the last event of its answer can continue the response at once, unless the storage is
slow: nobody waits for a write longer than `PATIENCE_S`, it then goes on by itself. The records that are being written
take no more than `MAX_WRITING_BYTES`; what waits for the storage counts in the memory of bodies. A response that could
not be stored is answered all the same, counted and logged, and not there for who asks for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import msgspec

from argosy_protocol import batch_program
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
from argosy_protocol.responses import ID_PREFIX
from argosy_router import metrics as define
from argosy_router.batch import BatchClient
from argosy_router.http.limits import BodyMemory, BodyReservation
from argosy_router.http.messages import Client, ClientListener
from argosy_router.metric_series import Series
from argosy_router.proxy.ended_response import AdoptedAnswer, Find, begins_last, decoded_record, find_at_once

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
        return (self._outcomes, define.RESPONSE_WRITING_BYTES.value(lambda: self._writing.held))

    def new_id(self) -> str:
        return batch_program.new_id(ID_PREFIX, self._now(), self._ttl_s)

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
        if not batch_program.is_id(response_id):
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
        if not batch_program.is_id(response_id):
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


MAX_KEPT_BYTES: Final = 64 * 1024 * 1024
"""Size of the largest answer that is stored."""
MAX_BEHIND_BYTES: Final = 64 * 1024
"""What may come behind the last event of a stream: `[DONE]`, in bytes."""
HELD_TWICE: Final = 2
"""The last event waits for the storage, and so does the response that was read from it."""

Store = Callable[[msgspec.Raw], Awaitable[None]]


class StoringClient:
    """Wraps a client. A `Client`, and the `ClientListener` of the one it wraps."""

    def __init__(
        self,
        client: Client,
        response_id: str,
        store: Store,
        reserved: BodyReservation,
        on_unstored: Callable[[], None],
        find: Find = find_at_once,
        owner: str = "",
    ) -> None:
        """
        Args:
            response_id: engines of other makes choose their own, which is replaced by this one.
            store: stores the response, given as JSON.
            reserved: gets what is kept of an answer until that is stored.
            on_unstored: called if there is no memory for that, so that it is not stored.
            find: finds the response in the answer, for its `owner`.
        """
        self._client = client
        self._adopted = AdoptedAnswer(response_id)
        self._store = store
        self._reserved = reserved
        self._on_unstored = on_unstored
        self._find = find
        self._owner = owner
        self._listener: ClientListener | None = None
        self._is_stream = False
        self._parts: list[bytes] = []
        """The answer, if it is no stream."""
        self._size = 0
        self._held: list[bytes] = []
        """The end of a stream; its last event is in the first piece."""
        self._is_unstored = False
        """Whether there was no memory to hold the end of a stream."""
        self._behind = 0
        """Bytes behind the piece that has its last event."""
        self._has_ended = False
        """Whether what answers is not listened to any more: it goes on behind the last event."""
        self._start: tuple[int, bytes] | None = None
        """Status and headers of an answer that begins with its end."""
        self._is_gone = False
        self._task: asyncio.Task[None] | None = None

    # called by what answers

    def attach(self, listener: ClientListener) -> None:
        self._listener = listener
        self._client.attach(self)

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        if status != 200:
            self._client.respond(status, headers, body)
            return
        body = self._adopted.renamed(body)
        if not self._reserve(len(body)):
            self._client.respond(status, headers, body)
            return
        self._finish(body, lambda: self._client.respond(status, headers, body))

    def start(self, status: int, headers: bytes, first: bytes) -> None:
        self._is_stream = b"text/event-stream" in headers
        first = self._adopted.renamed(first)
        if self._is_last(first) and self._hold(first):
            self._start = status, headers
            return
        self._client.start(status, headers, first)
        self._keep(first)

    def send(self, data: bytes) -> None:
        if self._has_ended:
            return
        if self._held:
            self._behind += len(data)
            if self._behind > MAX_BEHIND_BYTES:
                self._end_at_last()
                return
        data = self._adopted.renamed(data)
        if (self._held or self._is_last(data)) and self._hold(data):
            return
        self._keep(data)
        self._client.send(data)

    def _end_at_last(self) -> None:
        """Answer with what has come, and have the replica stop: nothing paces what is not sent on."""
        listener = self._listener
        self.finish()
        self._has_ended = True
        if listener is not None:
            listener.on_client_lost()

    def finish(self) -> None:
        if self._has_ended:
            return
        end = b"".join(self._held[:1] if self._is_stream else self._parts)
        self._parts = []
        self._finish(end, self._send_end)

    def abort(self) -> None:
        self._reserved.release()
        if not self._has_ended:
            self._client.abort()

    # called by the client

    def on_client_lost(self) -> None:
        self._is_gone = True
        if self._task is None:
            self._parts, self._held = [], []
            self._reserved.release()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.on_client_lost()

    def on_client_paused(self) -> None:
        if self._listener is not None:
            self._listener.on_client_paused()

    def on_client_resumed(self) -> None:
        if self._listener is not None:
            self._listener.on_client_resumed()

    def _send_end(self) -> None:
        self._send_held()
        self._client.finish()

    def _send_held(self) -> None:
        held, self._held = self._held, []
        start, self._start = self._start, None
        for piece in held:
            if start is not None:
                self._client.start(*start, piece)
                start = None
            else:
                self._client.send(piece)

    def _hold(self, events: bytes) -> bool:
        """Hold the end of a stream until its response is stored; return whether there is memory for it. Without, the
        response is not stored, and its end is sent as it comes."""
        if not self._is_unstored and self._reserve(HELD_TWICE * len(events)):
            self._held.append(events)
            return True
        self._is_unstored = True
        self._send_held()
        self._reserved.release()
        return False

    def _keep(self, data: bytes) -> None:
        """Keep a piece of an answer that is no stream; nothing of one that is too large."""
        if self._is_stream:
            return
        self._size += len(data)
        if self._size <= MAX_KEPT_BYTES and self._reserve(len(data)):
            self._parts.append(data)
        else:
            self._size = MAX_KEPT_BYTES  # nothing more of it is kept
            self._parts = []
            self._reserved.release()

    def _reserve(self, size: int) -> bool:
        try:
            self._reserved.grow(size)
        except Unavailable:
            self._on_unstored()
            log.warning("a response is not stored: its answer exceeds the memory for request bodies")
            return False
        return True

    def _is_last(self, events: bytes) -> bool:
        """Whether one of some whole events ends the response."""
        return self._is_stream and begins_last(events)

    def _finish(self, end: bytes, answer: Callable[[], None]) -> None:
        """Store the response that is in the end of the answer, if there is one, and then answer."""
        self._listener = None
        self._task = asyncio.create_task(self._work(end, answer), name="store a response")

    async def _work(self, end: bytes, answer: Callable[[], None]) -> None:
        try:
            found = await self._find(self._owner, end, self._is_stream, {})
            if found.is_ended:
                await self._store(found.response_in(end))
            elif found.end:
                log.warning("an answer to a request for a response is none; it was not stored")
        except Exception:
            log.exception("a response could not be stored")
        finally:
            self._parts = []
            self._reserved.release()
            if not self._is_gone:
                answer()
