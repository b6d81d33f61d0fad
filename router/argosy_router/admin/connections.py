"""Connections of the admin port that have yet to send a request's head.

Owns: how long and how many they may be. Must not know: routes.
Invariant: at most `MAX_SILENT` of the connections uvicorn admits are silent, so there is always one for a probe.

uvicorn waits for a head for ever, and answers 503 to everybody while it has `limit_concurrency` connections: a few
hundred silent ones would have the kubelet restart the router.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_CONNECTIONS: Final = 256
MAX_SILENT: Final = 128
HEAD_TIMEOUT_S = 10.0
"""As on the main port, from accepting the connection or a request's first byte."""


class AdminConnection(HttpToolsProtocol):
    """uvicorn's protocol; `silent` has those without a whole head, oldest first."""

    def __init__(self, *args: Any, silent: dict[AdminConnection, None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._silent = silent
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._spoke()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._spoke()
        super().on_headers_complete()

    def _await_head(self) -> None:
        if self in self._silent:
            return
        self._silent[self] = None
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._cut)
        if len(self._silent) > MAX_SILENT:
            next(iter(self._silent))._cut()

    def _spoke(self) -> None:
        self._silent.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cut(self) -> None:
        self._spoke()
        self.transport.abort()
