"""Limit on silent connections of the admin port, which have not sent a whole request head yet.

Owns: how long connections may be silent, and how many. Must not know: routes.
Invariant: at most `MAX_SILENT` of the connections that uvicorn admits are silent, so that a probe always gets one.

uvicorn waits for a request head for ever, and answers 503 to everybody while it has `limit_concurrency` connections: a
few hundred silent ones would make the kubelet restart the router.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_CONNECTIONS: Final = 256
MAX_SILENT: Final = 128
HEAD_TIMEOUT_S = 10.0
"""From accepting the connection, or from a request's first byte; as on the main port."""


class AdminConnection(HttpToolsProtocol):
    """uvicorn's protocol with a deadline for the request head; `silent` is shared, and ordered by age."""

    def __init__(self, *args: Any, silent: dict[AdminConnection, None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._silent = silent
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_silence()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._end_silence()
        super().on_headers_complete()

    def _await_head(self) -> None:
        if self in self._silent:
            return
        self._silent[self] = None
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._cut)
        if len(self._silent) > MAX_SILENT:
            next(iter(self._silent))._cut()

    def _end_silence(self) -> None:
        self._silent.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cut(self) -> None:
        self._end_silence()
        self.transport.abort()
