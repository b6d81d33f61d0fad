"""TLS contexts for the listener and for connections to replicas, reloaded when their files change.

Owns: SSL contexts and their reload. Must not know: connections.
Invariants: an unusable file never replaces a usable one; connections keep the context they were made with, new ones
get the latest; nothing older than TLS 1.2, no ALPN protocol but HTTP/1.1.
"""

# Not compiled: runs when certificates change.

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterable
from pathlib import Path

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


class UpstreamTls:
    """How replicas' certificates are verified: by the authorities in `ca_certs`, else by the system's; not at all if
    `verifies` is false.

    Raises:
        OSError: the file cannot be read (ssl.SSLError: it holds no certificate).
    """

    def __init__(self, ca_certs: Path | None = None, *, verifies: bool = True) -> None:
        self._ca_certs = ca_certs
        self._verifies = verifies
        self.files = [] if ca_certs is None else [ca_certs]
        self._context = None if ca_certs is None else self._load()

    @property
    def context(self) -> ssl.SSLContext:
        """Context for new connections. The system's authorities are loaded on first use, which takes 0.1 s."""
        if self._context is None:
            self._context = self._load()
        return self._context

    def reload(self) -> None:
        """Read the file again.

        Raises:
            OSError: as the constructor; the last good one stays in use.
        """
        self._context = self._load()

    def _load(self) -> ssl.SSLContext:
        if self._verifies:
            context = ssl.create_default_context(cafile=self._ca_certs)
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
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
