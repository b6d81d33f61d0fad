"""A file on its way to the client.

Owns: the pace, which is the client's. Must not know: where the file comes from.
Invariant: at most one piece waits for a client that does not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from argosy_router.http.server_interface import Client


class ClientGone(Exception):
    """The client has disconnected."""


class PendingAnswer:
    """The client of a request that is answered later. A `ClientListener`."""

    def __init__(self, client: Client) -> None:
        self._client: Client | None = client
        self.on_lost: Callable[[], object] = lambda: None
        """Called when the client has disconnected, also after the answer."""
        self._may_write = asyncio.Event()
        self._may_write.set()
        client.attach(self)

    def on_client_lost(self) -> None:
        self._client = None
        self._may_write.set()
        self.on_lost()

    def on_client_paused(self) -> None:
        self._may_write.clear()

    def on_client_resumed(self) -> None:
        self._may_write.set()

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """Answer, unless the client is gone."""
        client, self._client = self._client, None
        if client is not None:
            client.respond(status, headers, body)

    async def stream(self, headers: bytes, chunks: AsyncGenerator[bytes, None]) -> None:
        """Answer with status 200 and a body in pieces; cut the connection if `chunks` raises after the first one.

        Raises:
            Exception: of `chunks`, before the first piece; nothing was sent.
        """
        async with aclosing(chunks):
            first = await anext(chunks, b"")
            if not first:
                self.respond(200, headers, b"")
                return
            try:
                self._writable().start(200, headers, first)
                async for chunk in chunks:
                    await self._may_write.wait()
                    self._writable().send(chunk)
                self._writable().finish()
            except ClientGone:
                return
            except Exception:
                if self._client is not None:
                    self._client.abort()
                raise
            finally:
                self._client = None

    def _writable(self) -> Client:
        if self._client is None:
            raise ClientGone
        return self._client
