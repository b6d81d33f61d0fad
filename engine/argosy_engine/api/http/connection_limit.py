"""ConnectionLimit: the HTTP protocol with a bound on open connections, so that clients never take the last descriptor.

Connections count from the end of their TLS handshake on; `tls_acceptor` counts those before it.

The rest of the descriptors is for what the process cannot do without: the connection to its core, the model's files,
the processes that it starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from argosy_engine.api.http.http_protocol import BoundedProtocol, HttpLimits
from argosy_protocol.errors import Unavailable

MAX_TURNED_AWAY = 16
"""Limit on excess connections that get time to read the 503; each uses a descriptor that is not for clients."""


class ConnectionLimit(BoundedProtocol):
    """Protocol that answers 503 on excess connections and closes them.

    While there are few excess connections, it discards their input for a moment first, so that the client can read the
    response.
    """

    max_connections: ClassVar[int]
    num_turned_away: ClassVar[int] = 0
    """Excess connections that are still open, counted per class, because each server has a class of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_turned_away = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) < self.max_connections:
            super().connection_made(transport)
            return
        self._is_turned_away = True
        type(self).num_turned_away += 1
        error = Unavailable("this engine has as many connections as it takes", code="too_many_connections")
        body = error.body()
        transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(body), body)
        )
        if self.num_turned_away > MAX_TURNED_AWAY:
            if transport.get_extra_info("sslcontext") is None:
                transport.close()
            else:
                transport.abort()  # TLS waits half a minute for the client's part of the end
            return
        self._linger_on(transport)
        self._hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_turned_away:
            super().connection_lost(exc)
            return
        type(self).num_turned_away -= 1
        if self._lingering is not None:
            self._lingering.lost()


def protocol_of(
    num_descriptors: int, limits: HttpLimits, on_slow_client: Callable[[], None] = lambda: None
) -> type[ConnectionLimit]:
    """Make a protocol with these limits that leaves half of the process's descriptors for other uses."""
    attributes = {
        "max_connections": num_descriptors // 2,
        "limits": limits,
        "on_slow_client": staticmethod(on_slow_client),
    }
    return type("LimitedProtocol", (ConnectionLimit,), attributes)
