"""The client of a chat in the admin page's playground: it has no connection, and is read as an async iterator.

Owns: the part of the answer that has not been read. Must not know: HTTP framing, routes.
Invariant: at most `MAX_HELD_BYTES` and one write of the exchange are held; a reader that stops reading ends the
exchange as a client that disconnects does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from argosy_router.http.messages import ClientListener, Headers

# Not compiled: has an asynchronous generator, which mypyc does not support.


MAX_HELD_BYTES = 256 * 1024


class IncompleteAnswer(Exception):
    """The answer was cut, and the rest of it is lost."""


class PlaygroundClient:
    """Holds the answer of one exchange until it is read."""

    def __init__(self) -> None:
        self.head: asyncio.Future[tuple[int, Headers]] = asyncio.get_running_loop().create_future()
        """Resolves to the answer's status and headers."""
        self._listener: ClientListener | None = None
        self._pieces: deque[bytes] = deque()
        self._held_bytes = 0
        self._is_paused = False
        self._is_complete = False
        self._is_incomplete = False
        self._has_changed = asyncio.Event()

    # called by the exchange

    def attach(self, listener: ClientListener) -> None:
        self._listener = listener

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        self.start(status, headers, body)
        self.finish()

    def start(self, status: int, headers: bytes, first: bytes) -> None:
        lines = [line.split(b": ", 1) for line in headers.split(b"\r\n") if line]
        self.head.set_result((status, [(name, value) for name, value in lines]))
        self.send(first)

    def send(self, data: bytes) -> None:
        self._pieces.append(data)
        self._held_bytes += len(data)
        self._has_changed.set()
        if self._held_bytes > MAX_HELD_BYTES and self._listener is not None and not self._is_paused:
            self._is_paused = True
            self._listener.on_client_paused()

    def finish(self) -> None:
        self._listener = None
        self._is_complete = True
        self._has_changed.set()

    def abort(self) -> None:
        self._is_incomplete = True
        self.finish()

    # called by the reader

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the answer as it arrives.

        Raises:
            IncompleteAnswer: the answer is incomplete.
        """
        try:
            while True:
                while self._pieces:
                    yield self._take()
                if self._is_incomplete:
                    raise IncompleteAnswer
                if self._is_complete:
                    return
                self._has_changed.clear()
                await self._has_changed.wait()
        finally:
            self.leave()

    def _take(self) -> bytes:
        piece = self._pieces.popleft()
        self._held_bytes -= len(piece)
        if self._is_paused and not self._pieces and self._listener is not None:
            self._is_paused = False
            self._listener.on_client_resumed()
        return piece

    def leave(self) -> None:
        """Stop reading; does nothing if the answer is complete."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.on_client_lost()
