"""HttpServer: uvicorn's server, ended by its owner, over plain sockets or TLS (`--ssl-certfile`).

uvicorn sweeps the connections once when it ends. One that is accepted or answered a moment later, such as a router's
next one, is then idle for the whole grace period, which is for clients that have yet to read their responses. So the
idle ones are closed here as they become idle.

When a certificate manager renews the files, `ServerCertificate` reads them anew; connections that are open keep the
certificate that they began with.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from typing import NamedTuple, cast

import uvicorn

from argosy_engine.errors import ConfigError
from argosy_http.bounded_protocol import MAX_TURNED_AWAY, ConnectionLimit
from argosy_http.server import EmbeddedServer

logger = logging.getLogger("argosy.api")

REFRESH_INTERVAL_S = 5.0
"""How often the files are looked at. Certificate managers renew them weeks before they expire."""


class CertificateFiles(NamedTuple):
    """Files in PEM."""

    chain: str
    key: str
    authorities: str | None = None
    """Those that must have signed a client's certificate; None: clients need none."""


class ServerCertificate:
    """The certificate that connections begin with.

    Raises:
        ConfigError: a file cannot be read, or has no certificate or key.
    """

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        try:
            self.context = _context(files)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"--ssl-certfile {files.chain}, --ssl-keyfile or --ssl-ca-certs cannot be used: {error}"
            ) from None

    async def refresh(self, interval_s: float = REFRESH_INTERVAL_S) -> None:
        """Read the files anew whenever they have changed. While they do not belong together, which is so between the
        writing of one and of the next, the context stays the last whole one."""
        files = self._files
        last = _versions(files)
        while True:
            await asyncio.sleep(interval_s)
            now = _versions(files)
            if now == last:
                continue
            try:
                self.context = _context(files)
            except (OSError, ssl.SSLError) as error:
                logger.warning(
                    "the certificate %s has changed and cannot be used yet: %s", files.chain, error
                )
            else:
                last = now
                logger.info("the certificate %s was read anew", files.chain)


def _context(files: CertificateFiles) -> ssl.SSLContext:
    """Make a new context: one that exists keeps what it has read of files that turn out not to match."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.chain, files.key)
    if files.authorities is not None:
        context.load_verify_locations(files.authorities)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _versions(files: CertificateFiles) -> list[tuple[int, int] | None]:
    """Return what tells whether a file was replaced or written; None for one that does not exist."""
    versions: list[tuple[int, int] | None] = []
    for file in filter(None, files):
        try:
            status = os.stat(file)
        except OSError:
            versions.append(None)
        else:
            versions.append((status.st_ino, status.st_mtime_ns))
    return versions


_SWEEP_INTERVAL_S = 0.02


class HttpServer(EmbeddedServer):
    """Server that serves until `stop`.

    Args:
        config: its protocol is a `ConnectionLimit`.
        certificate: makes the server speak HTTPS.
    """

    def __init__(self, config: uvicorn.Config, certificate: ServerCertificate | None = None) -> None:
        super().__init__(config)
        self._certificate = certificate
        self._last_bytes_s = 0.0

    def stop(self, last_bytes_s: float) -> None:
        """Accept no more connections, close the idle ones, and the others with the response that they carry.

        Args:
            last_bytes_s: how long responses may take to end and to be read, before their connections are broken.
        """
        self._last_bytes_s = last_bytes_s
        self.end()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        certificate = self._certificate
        if certificate is None:
            await super().startup(sockets)
            return
        protocol = cast("type[ConnectionLimit]", self.config.http_protocol_class)
        await self.start_tls(
            sockets or [],
            lambda: certificate.context,
            self.server_state.connections,
            protocol.max_connections + MAX_TURNED_AWAY,
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._last_bytes_s):
                await self._close_idle()
        state = self.server_state
        if state.connections:
            logger.warning(
                "%d connections are broken, since their responses were not read within %g s",
                len(state.connections),
                self._last_bytes_s,
            )
        for connection in list(state.connections):
            connection.transport.abort()
        for task in list(state.tasks):
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)

    async def _close_idle(self) -> None:
        """Close connections as they become idle, until none is left."""
        while self.server_state.connections or self.server_state.tasks:
            for connection in list(self.server_state.connections):
                connection.shutdown()  # also those that were just being accepted
            await asyncio.sleep(_SWEEP_INTERVAL_S)
