"""The admin port's server: uvicorn in the router's event loop, with limits on connections: those in their TLS
handshake, and silent ones, on which no whole request is being answered to a client that reads.

Owns: how long connections may be silent, and how many. Must not know: routes, but those of probes.
Invariants: at most `MAX_SILENT` connections are silent, and none for longer than its deadline; probes are answered
whatever else is connected.

uvicorn answers 503 to everybody while it has `limit_concurrency` connections: a few hundred silent ones would make the
kubelet restart the router.
"""

from __future__ import annotations

import socket
import ssl
from typing import Final

import uvicorn
from starlette.applications import Starlette

from argosy_http.bounded_protocol import BoundedProtocol, HttpLimits
from argosy_http.server import EmbeddedServer

MAX_CONNECTIONS: Final = 256
MAX_HANDSHAKES = 128
MAX_SILENT: Final = 128
REQUEST_TIMEOUT_S = 10.0
"""From accepting the connection to the end of its TLS handshake, and from there, a request's first byte or an answer
until a head has come, as on the main port, and the time of which a body's bytes are counted."""
READ_TIMEOUT_S = 30.0
"""How long a client may leave the write buffer full."""
MAX_HEADERS: Final = 100
"""As of the main port: each takes a hundred bytes and more, whatever it has."""
_PROBES: Final = frozenset((b"/health", b"/ready"))


class AdminConnection(BoundedProtocol):
    """A connection whose probes are answered, whatever else is connected."""

    def on_headers_complete(self) -> None:
        is_probe = self.url.partition(b"?")[0] in _PROBES
        self.limit_concurrency = None if is_probe else MAX_CONNECTIONS
        super().on_headers_complete()


class AdminServer(EmbeddedServer):
    def __init__(self, app: Starlette, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """`tls` is the port's SSL context; None for plain HTTP."""
        limits = HttpLimits(
            max_headers=MAX_HEADERS,
            header_timeout_s=REQUEST_TIMEOUT_S,
            body_timeout_s=REQUEST_TIMEOUT_S,
            write_stall_s=READ_TIMEOUT_S,
            max_silent=MAX_SILENT,
        )
        config = uvicorn.Config(
            app,
            http=AdminConnection.for_server(limits=limits),
            host=host,
            port=port,
            log_config=None,
            log_level="warning",
            ws="none",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=REQUEST_TIMEOUT_S,  # type: ignore[arg-type]  # fractions work as well
        )
        config.load()
        super().__init__(config)
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on `sockets`."""
        tls = self._tls
        if tls is None:
            await super().startup(sockets)
            return
        for listening in sockets or ():
            listening.setblocking(False)
            listening.listen(self.config.backlog)
        await self.start_tls(sockets or (), lambda: tls, (), MAX_HANDSHAKES)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port; valid once it listens."""
        listening: socket.socket = self.servers[0].sockets[0]
        host, port = listening.getsockname()[:2]
        return host, port
