"""EmbeddedServer: uvicorn in a program's own event loop. TlsAcceptor: accepts connections and makes their TLS
handshakes, whose number and time it bounds.

The HTTP protocol, which bounds connections, meets one only after its handshake. If there are too many before it, the
oldest unfinished handshake makes room: a client that wants to be answered needs some round trips for its own, and is
done before its turn comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import cast

import uvicorn

from argosy_http.bounded_protocol import BoundedProtocol, HttpLimits

logger = logging.getLogger("argosy.http")

_RETRY_S = 1.0
"""Pause after a failure to accept, such as for want of descriptors; asyncio's."""


class TlsAcceptor:
    """Connections from their acceptance to the end of their TLS handshake.

    It has what uvicorn uses of an asyncio server.

    Args:
        listeners: non-blocking listening sockets; their owner closes them.
        context: asked for every connection, so that a renewed certificate counts from the next one on.
        create_protocol: makes the protocol of a connection whose handshake is done.
        connections: those that count beside the ones in their handshake.
        max_connections: limit on both together.
        limits: of a connection. A handshake has the time of a head, and the end of TLS that of an answer that is not
            read.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        context: Callable[[], ssl.SSLContext],
        create_protocol: Callable[[], asyncio.Protocol],
        connections: Collection[object],
        max_connections: int,
        limits: HttpLimits,
    ) -> None:
        self.sockets = listeners
        self._context = context
        self._create_protocol = create_protocol
        self._connections = connections
        self._max_connections = max_connections
        self._limits = limits
        self._handshakes: dict[asyncio.Task[None], None] = {}
        """Unfinished ones, oldest first."""
        self._accepting = [asyncio.create_task(self._accept(listener)) for listener in listeners]

    def close(self) -> None:
        """Accept no more connections, and drop those whose handshake is not done."""
        for task in (*self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                logger.warning("a connection cannot be accepted: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            if not self._make_room():
                connection.close()
                continue
            handshake = asyncio.create_task(self._shake_hands(connection), name="TLS handshake of uvicorn")
            self._handshakes[handshake] = None
            handshake.add_done_callback(partial(self._end, connection))

    def _make_room(self) -> bool:
        """Drop the oldest handshakes until there is room for one more; return whether there is."""
        while len(self._connections) + len(self._handshakes) >= self._max_connections:
            oldest = next(iter(self._handshakes), None)
            if oldest is None:
                return False
            del self._handshakes[oldest]
            oldest.cancel()
        return True

    async def _shake_hands(self, connection: socket.socket) -> None:
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().connect_accepted_socket(
            self._create_protocol,
            connection,
            ssl=self._context(),
            ssl_handshake_timeout=self._limits.header_timeout_s,
            ssl_shutdown_timeout=self._limits.write_stall_s,
        )

    def _end(self, connection: socket.socket, handshake: asyncio.Task[None]) -> None:
        self._handshakes.pop(handshake, None)
        error = None if handshake.cancelled() else handshake.exception()
        if handshake.cancelled() or error is not None:
            connection.close()
        if error is not None and not isinstance(error, OSError):  # of TLS, the connection, or the deadline
            logger.error("a handshake failed with %s", type(error).__qualname__)


_DATE_INTERVAL_S = 1.0
_CLOSING_S = 0.005
"""How long the end of idle connections takes."""


class EmbeddedServer(uvicorn.Server):
    """uvicorn in a program's own event loop; it leaves the signals to the program."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._stopped = asyncio.Event()

    def end(self) -> None:
        """Let `serve` end, at once if nothing is connected. uvicorn would look for its end every tenth of a second."""
        self._stopped.set()

    async def main_loop(self) -> None:
        while not self._stopped.is_set():
            await self.on_tick(0)  # the date in the headers
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), _DATE_INTERVAL_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(_CLOSING_S if self.server_state.connections else 0)
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
        else:
            for listening in sockets or ():
                listening.close()
            await asyncio.gather(*(server.wait_closed() for server in self.servers))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def start_tls(
        self,
        listeners: Sequence[socket.socket],
        context: Callable[[], ssl.SSLContext],
        connections: Collection[object],
        max_connections: int,
    ) -> None:
        """Do for HTTPS what uvicorn's `startup` does without a bound on handshakes. Arguments: see `TlsAcceptor`."""
        await self.lifespan.startup()
        protocol = cast("type[BoundedProtocol]", self.config.http_protocol_class)

        def made() -> asyncio.Protocol:
            return protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

        acceptor = TlsAcceptor(listeners, context, made, connections, max_connections, protocol.limits)
        self.servers = [cast("asyncio.Server", acceptor)]
        self.started = True
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
