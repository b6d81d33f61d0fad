"""TLS of the listener: certificates that are reloaded when their files change, and handshakes within the connection
limit.

Owns: the listener's SSL contexts and their reload, listening sockets, and connections from `accept` to the end of their
handshakes. Must not know: HTTP.
Invariants: an unusable file never replaces a usable one; connections keep the context they were made with, new ones
get the latest; nothing older than TLS 1.2, no ALPN protocol but HTTP/1.1. Connections that never finish their handshake
are bounded and displaced like those that never send a request (the event loop's own server reports a connection only
after its handshake, and has no bound); a process that is out of descriptors pauses accepting and then resumes.
"""

# Not compiled: runs when certificates change and for each handshake, not for each request.

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path

from argosy_protocol.program.listen import listen
from argosy_router.http.server_connection import ServerConnection, ServerState
from argosy_router.http.upstream import UpstreamTls

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Interval between checks of the files. A renewed certificate has time: the old one is usually valid for days."""

Stamp = tuple[tuple[int, int, int], ...]


class ServerTls:
    """The certificate of the OpenAI endpoint and, with `ca_certs`, the authorities that client certificates need.

    Raises:
        OSError: a file cannot be read (ssl.SSLError: its content is invalid).
    """

    def __init__(self, certfile: Path, keyfile: Path | None = None, ca_certs: Path | None = None) -> None:
        self._certfile = certfile
        self._keyfile = keyfile
        self._ca_certs = ca_certs
        self.files = [path for path in (certfile, keyfile, ca_certs) if path is not None]
        self._latest = self._load()
        self.context = self._load()
        """Context for the listener. Its SNI callback switches every handshake to the latest context."""
        self.context.sni_callback = (
            self._use_latest
        )  # called for every handshake, with or without a server name

    def reload(self) -> None:
        """Read the files again.

        Raises:
            OSError: as the constructor; the last good ones stay in use.
        """
        self._latest = self._load()

    def _use_latest(self, handshake: ssl.SSLObject, _name: str | None, _listening: ssl.SSLContext) -> None:
        handshake.context = self._latest

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._certfile, self._keyfile, password=_refuse_password)
        if self._ca_certs is not None:
            context.load_verify_locations(self._ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
            # A resumed TLS session skips the client's certificate, and so would outlive trust in its authority.
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
        return context


def _refuse_password() -> str:
    """Password callback that fails; without one OpenSSL would prompt on the terminal."""
    raise ssl.SSLError("the private key is encrypted: give one without a password")


async def watch(tls: ServerTls | UpstreamTls, poll_s: float = POLL_S) -> None:
    """Reload whenever a file has changed, until cancelled.

    Polls with `stat`, which sees both files replaced by a rename (mounted Secrets) and files written in place.
    """
    seen = reported = _stamp(tls.files)
    while tls.files:
        await asyncio.sleep(poll_s)
        stamp = _stamp(tls.files)
        if stamp == seen:
            continue
        try:  # repeated at each poll until it works: files may be half-written, or key and certificate not match yet
            tls.reload()
        except OSError as error:
            if stamp != reported:
                log.error("TLS files are not usable, keeping the last ones: %s", error)
            reported = stamp
        else:
            seen = stamp
            log.info("TLS files reloaded")


def _stamp(files: Iterable[Path]) -> Stamp:
    return tuple(map(_file_stamp, files))


def _file_stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0)
    return status.st_mtime_ns, status.st_size, status.st_ino


ACCEPTS_PER_TURN = 64
"""Connections accepted per turn of the event loop; an accept takes some 10 us."""
PAUSE_S = 0.5
"""Until the next try when descriptors ran out. The exact value matters little: other connections must end first."""


class Acceptor:
    """Accepts the connections of listening sockets. While descriptors have run out it pauses."""

    def __init__(
        self, sockets: Iterable[socket.socket], on_accepted: Callable[[socket.socket], None]
    ) -> None:
        """`on_accepted` is given each connection's socket, which does not block."""
        self._sockets = tuple(sockets)
        self._on_accepted = on_accepted
        self._loop = asyncio.get_running_loop()
        self._pauses: dict[int, asyncio.TimerHandle] = {}
        for listening in self._sockets:
            self._resume(listening)

    def close(self) -> None:
        """Stop listening."""
        for pause in self._pauses.values():
            pause.cancel()
        for listening in self._sockets:
            if listening.fileno() >= 0:
                self._loop.remove_reader(listening)
                listening.close()

    def _resume(self, listening: socket.socket) -> None:
        self._pauses.pop(listening.fileno(), None)
        self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("connections cannot be accepted: %s", error)
                self._loop.remove_reader(listening)
                self._pauses[listening.fileno()] = self._loop.call_later(PAUSE_S, self._resume, listening)
                return
            accepted.setblocking(False)
            self._on_accepted(accepted)


class TlsListener:
    """A server's listening sockets."""

    def __init__(
        self, state: ServerState, context: Callable[[], ssl.SSLContext], host: str, port: int, backlog: int
    ) -> None:
        """`context` returns the SSL context for a new connection.

        Raises:
            CannotListen: an address is in use or does not belong to this machine.
        """
        self._state = state
        self._context = context
        self._handshakes: set[asyncio.Task[None]] = set()
        self.sockets = listen(host, port, backlog)
        self._acceptor = Acceptor(self.sockets, self._on_accepted)

    def close(self) -> None:
        """Stop listening; handshakes go on."""
        self._acceptor.close()

    async def cut(self) -> None:
        """Cancel all handshakes."""
        handshakes = list(self._handshakes)
        for handshake in handshakes:
            handshake.cancel()
        await asyncio.gather(*handshakes, return_exceptions=True)

    def _on_accepted(self, accepted: socket.socket) -> None:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = TlsHandshake(self._state, accepted, self._context()).task
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)


class TlsHandshake:
    """One accepted connection, until its `ServerConnection` is made."""

    def __init__(self, state: ServerState, accepted: socket.socket, context: ssl.SSLContext) -> None:
        self._limits = state.limits
        self._is_surplus_full = state.connection_limit.is_surplus_full
        self._socket = accepted
        self._connection = ServerConnection(state)
        self._connection.count_against_limit(_peer(accepted), self.end)
        self.task = asyncio.create_task(self._shake_hands(context), name="TLS handshake")
        self.task.add_done_callback(self._ended)

    def end(self) -> None:
        """Cancel the handshake, and with it the connection."""
        self.task.cancel()

    async def _shake_hands(self, context: ssl.SSLContext) -> None:
        try:
            if self._connection.is_admitted or not self._is_surplus_full:
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: self._connection,
                    self._socket,
                    ssl=context,
                    ssl_handshake_timeout=self._limits.tls_handshake_timeout_s,
                    ssl_shutdown_timeout=self._limits.write_stall_s,
                )
        except OSError as error:  # includes ssl.SSLError and the handshake timeout
            log.debug("TLS handshake failed: %s", error)

    def _ended(self, _: asyncio.Task[None]) -> None:
        """Clean up after a handshake that failed or was cancelled, perhaps before it began."""
        if not self._connection.is_made:
            self._connection.on_handshake_failed()
            self._socket.close()


def _peer(accepted: socket.socket) -> object:
    try:
        return accepted.getpeername()
    except OSError:  # gone already
        return None
