"""Sockets of servers: listening ones, opened before anything slow starts, with errors that name the port and the
remedy; and what a connection has not delivered yet.

Owns: how the programs bind, and the errors if they cannot. Must not know: which server the sockets are for.
Invariant: returned sockets listen, and are not merely bound, because with SO_REUSEADDR two bound sockets can share a
port.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import stat
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

BACKLOG = 2048
"""Connections waiting to be accepted; uvicorn's default. The kernel caps it (net.core.somaxconn)."""


class CannotListen(OSError):
    """An address is in use, not permitted, or not of this machine; the message names the remedy."""


def listen(
    host: str, port: int, backlog: int = BACKLOG, *, host_flag: str = "--host", port_flag: str = "--port"
) -> list[socket.socket]:
    """Open non-blocking, listening sockets on all addresses of `host`, as asyncio's `create_server` does.

    Args:
        host: a name or address; empty for all interfaces.
        host_flag, port_flag: the flags that the error suggests to change.

    Raises:
        CannotListen: one of the addresses is not available.
    """
    sockets: list[socket.socket] = []
    try:
        with explain_listen_errors(host, port, host_flag=host_flag, port_flag=port_flag):
            found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in dict.fromkeys(found):
                listening = socket.socket(family, kind, protocol)
                sockets.append(listening)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.bind(address)
                listening.listen(backlog)
                listening.setblocking(False)
    except OSError:
        for listening in sockets:
            listening.close()
        raise
    return sockets


class UnixListener(socket.socket):
    """A listening Unix domain socket, which knows its file."""

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._file: tuple[str, int, int] | None = None

    def bind_file(self, path: str) -> None:
        """Bind, which makes the file.

        Raises:
            OSError: it exists, or cannot be made.
        """
        self.bind(path)
        status = os.stat(path)
        self._file = path, status.st_dev, status.st_ino

    def unlink(self) -> None:
        """Remove the file, unless another one has taken its place; once.

        Call this while the socket still listens: once it does not, a successor may replace the file at any moment.
        """
        if self._file is None:
            return
        path, device, inode = self._file
        self._file = None
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if (status.st_dev, status.st_ino) == (device, inode):
                os.unlink(path)


def listen_unix(path: str, backlog: int = BACKLOG, *, flag: str = "--uds") -> UnixListener:
    """Open a non-blocking, listening Unix domain socket. One that no process listens on any more is replaced.

    Raises:
        CannotListen: a process listens there, the path is another kind of file, or it cannot be created.
    """
    listening = UnixListener()
    try:
        if _is_abandoned(path):
            os.unlink(path)
        listening.bind_file(path)
        listening.listen(backlog)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            reason = (
                f"it exists already; stop the process that listens there, or choose another path with {flag}"
            )
        else:
            reason = f"{error.strerror or error}; choose a path in a directory that exists and is writable with {flag}"
        raise CannotListen(f"cannot listen on {path}: {reason}") from None
    return listening


def _is_abandoned(path: str) -> bool:
    """Whether a path is a socket that refuses connections."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
    except OSError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(path) == errno.ECONNREFUSED


@contextmanager
def explain_listen_errors(
    host: str, port: int, *, host_flag: str = "--host", port_flag: str = "--port"
) -> Iterator[None]:
    """Convert OSErrors from binding `host` and `port` into CannotListen."""
    try:
        yield
    except CannotListen:
        raise
    except OSError as error:
        shown = f"[{host}]:{port}" if ":" in host else f"{host or '*'}:{port}"
        reason, remedy = _explanation(error, port, host_flag, port_flag)
        raise CannotListen(f"cannot listen on {shown}: {reason}; {remedy}") from None


def _explanation(error: OSError, port: int, host_flag: str, port_flag: str) -> tuple[str, str]:
    """The reason for the error, and the remedy."""
    if isinstance(error, socket.gaierror):
        return "the host name does not resolve", f"correct {host_flag}"
    match error.errno:
        case errno.EADDRINUSE:
            return (
                "the port is taken",
                f"stop the process that listens there (`ss -ltnp 'sport = :{port}'` shows it) "
                f"or choose another port with {port_flag}",
            )
        case errno.EACCES | errno.EPERM:
            return "permission denied", f"choose a port above 1023 with {port_flag}"
        case errno.EADDRNOTAVAIL:
            return "not an address of this machine", f"correct {host_flag}"
    return os.strerror(error.errno) if error.errno else str(error), f"change {host_flag} or {port_flag}"


def has_unsent(transport: asyncio.BaseTransport) -> bool:
    """Whether the kernel has bytes of a connection that the peer's has not acknowledged (tcp(7), SIOCOUTQ).

    A transport of TLS that closes does not tell what it has itself, which it hands on as soon as there is room.
    """
    try:
        unsent = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (AttributeError, OSError, ValueError):  # it has ended
        return False
    return int.from_bytes(unsent, sys.byteorder) > 0
