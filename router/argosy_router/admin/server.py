"""The admin port's server: uvicorn in the router's event loop, with limits on connections: those in their TLS
handshake, and silent ones, on which no whole request is being answered to a client that reads.

Owns: how long connections may be silent, and how many. Must not know: routes, but those of probes.
Invariants: at most `MAX_SILENT` connections are silent, and none for longer than its deadline; probes are answered
whatever else is connected.

uvicorn waits for ever for a request head, for a body of which it has answered the head, and for a client that does not
read; and it answers 503 to everybody while it has `limit_concurrency` connections: a few hundred silent ones would make
the kubelet restart the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from argosy_router.http.tls import Acceptor

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 256
MAX_HANDSHAKES = 128
HANDSHAKE_TIMEOUT_S = 10.0
"""Bounds the time from accepting a connection to the end of its TLS handshake, as on the main port."""
MAX_SILENT: Final = 128
HEAD_TIMEOUT_S = 10.0
"""From accepting the connection, from a request's first byte or from an answer until a whole request has come; for the
head as on the main port."""
READ_TIMEOUT_S = 30.0
"""How long a client may leave the write buffer full."""
MAX_HEAD_BYTES: Final = 64 * 1024
MAX_HEADERS: Final = 100
"""As of the main port: each takes a hundred bytes and more, whatever it has."""
MAX_REQUEST_BYTES: Final = 9 * 1024 * 1024
"""On the wire: bodies have 4 MB, perhaps in chunks; an endless trailer is told by no callback."""
_PROBES: Final = frozenset((b"/health", b"/ready"))


class AdminConnection(HttpToolsProtocol):
    """uvicorn's protocol with a deadline for what the client does next; `silent` is shared, and ordered by age."""

    def __init__(self, *args: Any, silent: dict[AdminConnection, None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._silent = silent
        self._deadline: asyncio.TimerHandle | None = None
        self._is_whole = True
        """Whether the last request that has begun has its end."""
        self._begun: RequestResponseCycle | None = None
        """The request that was begun to be answered last."""
        self._is_lost = False
        self._max_connections = self.limit_concurrency
        self._wire_bytes = self._num_headers = 0
        self._has_head = False

    def data_received(self, data: bytes) -> None:
        self._wire_bytes += len(data)
        super().data_received(data)
        if self._wire_bytes > (MAX_REQUEST_BYTES if self._has_head else MAX_HEAD_BYTES):
            self._cut()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            raise ValueError("too many headers")  # uvicorn answers 400, and closes
        super().on_header(name, value)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_silence(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._end_silence()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_headers, self._has_head = 0, False
        if self._is_whole:
            self._end_silence()  # of the time between two requests
        self._is_whole = False
        self._begin_silence(HEAD_TIMEOUT_S)

    def on_headers_complete(self) -> None:
        self._has_head = True
        self.limit_concurrency = None if self.url.partition(b"?")[0] in _PROBES else self._max_connections
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._begun = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._wire_bytes, self._has_head = 0, False
        self._is_whole = True
        if self._is_answering:
            self._end_silence()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answering:
            self._begin_silence(HEAD_TIMEOUT_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._begin_silence(READ_TIMEOUT_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._is_answering:
            self._end_silence()

    @property
    def _is_answering(self) -> bool:
        """Whether a whole request is being answered."""
        return self._is_whole and self.cycle is not None and not self.cycle.response_complete

    def _begin_silence(self, seconds: float) -> None:
        """Cut the connection after so many seconds, or earlier for others, unless the silence ends before."""
        if self._is_lost or self in self._silent:
            return
        self._silent[self] = None
        self._deadline = self.loop.call_later(seconds, self._cut)
        if len(self._silent) > MAX_SILENT:
            next(iter(self._silent))._cut()

    def _end_silence(self) -> None:
        self._silent.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cut(self) -> None:
        self._end_silence()
        if self._begun is not None:
            self._begun.disconnected = True  # else what it writes before it is told is an error
        self.transport.abort()


class TlsServer:
    """A listening socket, with what uvicorn uses of an asyncio server, which has no bound for handshakes: here at most
    `MAX_HANDSHAKES` connections are in theirs, and the oldest gives way."""

    def __init__(
        self,
        listening: socket.socket,
        backlog: int,
        context: ssl.SSLContext,
        protocol: Callable[[], asyncio.Protocol],
    ) -> None:
        self.sockets = [listening]
        self._context = context
        self._protocol = protocol
        self._handshakes: dict[asyncio.Task[None], None] = {}
        listening.setblocking(False)
        listening.listen(backlog)
        self._acceptor = Acceptor(self.sockets, self._on_accepted)

    def close(self) -> None:
        """Stop listening, and cancel the handshakes."""
        self._acceptor.close()
        for handshake in self._handshakes:
            handshake.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _on_accepted(self, accepted: socket.socket) -> None:
        handshake = asyncio.create_task(self._shake_hands(accepted), name="TLS handshake of the admin port")
        self._handshakes[handshake] = None
        handshake.add_done_callback(lambda ended: self._ended(ended, accepted))
        if len(self._handshakes) > MAX_HANDSHAKES:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()

    async def _shake_hands(self, accepted: socket.socket) -> None:
        await asyncio.get_running_loop().connect_accepted_socket(
            self._protocol, accepted, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
        )

    def _ended(self, handshake: asyncio.Task[None], accepted: socket.socket) -> None:
        self._handshakes.pop(handshake, None)
        if handshake.cancelled():
            accepted.close()  # also of one that never began
        elif (error := handshake.exception()) is not None:
            accepted.close()
            log.debug("a TLS handshake of the admin port failed: %s", error)


class AdminServer(uvicorn.Server):
    """uvicorn in the router's event loop, without its signal handlers."""

    def __init__(self, app: Starlette, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """`tls` is the port's SSL context; None for plain HTTP."""
        config = uvicorn.Config(
            app,
            http=partial(AdminConnection, silent={}),  # type: ignore[arg-type]
            host=host,
            port=port,
            log_config=None,
            ws="none",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            limit_concurrency=MAX_CONNECTIONS,
        )
        config.load()
        config.ssl = tls  # uvicorn's own context would never be reloaded
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on `sockets`. uvicorn's own method has no bound for handshakes, and a minute for each."""
        config, loop = self.config, asyncio.get_running_loop()
        await self.lifespan.startup()

        def protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = config.http_protocol_class(
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )  # type: ignore[call-arg]
            return made

        self.servers = [
            await loop.create_server(protocol, sock=listening, backlog=config.backlog)
            if config.ssl is None
            else TlsServer(listening, config.backlog, config.ssl, protocol)
            for listening in sockets or ()
        ]
        self.started = True
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @property
    def address(self) -> tuple[str, int]:
        """Host and port; valid once it listens."""
        listening: socket.socket = self.servers[0].sockets[0]
        host, port = listening.getsockname()[:2]
        return host, port
