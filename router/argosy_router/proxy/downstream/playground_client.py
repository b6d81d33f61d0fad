"""A client without a connection: a request that the admin page sends through this router.

Owns: the answer until it is read. Must not know: HTTP framing, routes.
Invariant: at most `MAX_HELD_BYTES` and one write of the exchange are held; a reader that stops reading ends the
exchange as a client that disconnects does.
"""

# Not compiled: has an asynchronous generator, which mypyc does not support.

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from argosy_router.http.interfaces import ClientListener
from argosy_router.http.messages import Headers

MAX_HELD_BYTES = 256 * 1024


class AnswerCut(Exception):
    """The answer is incomplete and cannot be continued."""


class InnerClient:
    """The client of one exchange, which reads the answer as an async iterator."""

    def __init__(self) -> None:
        self.head: asyncio.Future[tuple[int, Headers]] = asyncio.get_running_loop().create_future()
        """Resolves to the answer's status and headers."""
        self._exchange: ClientListener | None = None
        self._pieces: deque[bytes] = deque()
        self._held_bytes = 0
        self._is_paused = False
        self._is_complete = False
        self._is_cut = False
        self._news = asyncio.Event()

    # what the exchange calls

    def attach(self, exchange: ClientListener) -> None:
        self._exchange = exchange

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
        self._news.set()
        if self._held_bytes > MAX_HELD_BYTES and self._exchange is not None and not self._is_paused:
            self._is_paused = True
            self._exchange.on_client_paused()

    def finish(self) -> None:
        self._exchange = None
        self._is_complete = True
        self._news.set()

    def abort(self) -> None:
        self._is_cut = True
        self.finish()

    # what the reader calls

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the answer as it arrives.

        Raises:
            AnswerCut: the answer is incomplete.
        """
        try:
            while True:
                while self._pieces:
                    yield self._take()
                if self._is_cut:
                    raise AnswerCut
                if self._is_complete:
                    return
                self._news.clear()
                await self._news.wait()
        finally:
            self.leave()

    def _take(self) -> bytes:
        piece = self._pieces.popleft()
        self._held_bytes -= len(piece)
        if self._is_paused and not self._pieces and self._exchange is not None:
            self._is_paused = False
            self._exchange.on_client_resumed()
        return piece

    def leave(self) -> None:
        """Stop reading; does nothing if the answer is complete."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.on_client_lost()
