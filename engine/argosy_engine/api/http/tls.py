"""HTTPS of the server (`--ssl-certfile`): the certificate, and its renewal when a certificate manager renews the files.

Connections that are open keep the certificate that they began with.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from typing import NamedTuple

from argosy_engine.errors import ConfigError

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
