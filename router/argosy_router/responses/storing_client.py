"""The client of a response that is stored: it sees the end of the answer once that is stored.

Owns: which part of an answer is the response. Must not know: where it is stored.
Invariants: a client that has read the last event can continue the response at once, unless the storage is slow. A
response that could not be stored is answered all the same; a count and the log say so. What waits for the storage
counts in the memory of bodies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from argosy_protocol.errors import Unavailable
from argosy_router.http.body_memory import BodyReservation
from argosy_router.http.server_interface import Client, ClientListener
from argosy_router.proxy.request.ended_response import AdoptedAnswer, Find, begins_last, find_at_once

log = logging.getLogger(__name__)

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
    ) -> None:
        """
        Args:
            response_id: engines of other makes choose their own, which is replaced by this one.
            store: stores the response, given as JSON.
            reserved: gets what is kept of an answer until that is stored.
            on_unstored: called if there is no memory for that, so that it is not stored.
            find: finds the response in the answer.
        """
        self._client = client
        self._adopted = AdoptedAnswer(response_id)
        self._store = store
        self._reserved = reserved
        self._on_unstored = on_unstored
        self._find = find
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
            found = await self._find(end, self._is_stream, {})
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
