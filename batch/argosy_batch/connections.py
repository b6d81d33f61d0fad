"""Connections of routers: bounds on heads, and on connections that have no request.

Must not know: routes, keys. uvicorn waits for ever for a head of any size, and answers 503 to everybody while it has
`limit_concurrency` connections, silent ones as well.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_IDLE: Final = 1024
"""Connections without a request; the one that has been so for longest gives way."""
HEAD_TIMEOUT_S: Final = 10.0
MAX_HEAD_BYTES: Final = 64 * 1024
MAX_HEADERS: Final = 100


class RouterConnection(HttpToolsProtocol):
    """uvicorn's protocol with those bounds; `idle` is shared, and ordered by age."""

    def __init__(self, *args: Any, idle: dict[RouterConnection, None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle = idle
        self._deadline: asyncio.TimerHandle | None = None
        self._has_head = self._is_lost = False
        self._head_bytes = self._num_headers = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_idle(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._end_idle()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._has_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if not self._has_head and self._head_bytes > MAX_HEAD_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_headers = 0
        self._end_idle()
        self._begin_idle(HEAD_TIMEOUT_S)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            raise ValueError("too many headers")  # uvicorn answers 400, and closes
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_head = True
        self._end_idle()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._has_head, self._head_bytes = False, 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._begin_idle(None)

    def _begin_idle(self, seconds: float | None) -> None:
        if self._is_lost or self in self._idle:
            return
        self._idle[self] = None
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, self.transport.abort)
        if len(self._idle) > MAX_IDLE:
            next(iter(self._idle)).give_way()

    def give_way(self) -> None:
        """Close the connection, which has no request."""
        self._end_idle()
        self.transport.abort()

    def _end_idle(self) -> None:
        self._idle.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
