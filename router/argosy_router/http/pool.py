"""Pool of keep-alive connections to one replica, last in first out.

Owns: connecting (with its deadline), reuse, expiry. Must not know: requests.
Invariant: a connection is idle in the pool, in use by one caller, or closed; connecting tasks belong to the pool and
end with it.

LIFO keeps the working set small: after a burst, surplus connections stay unused and expire instead of being rotated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol
from urllib.parse import urlsplit

from argosy_router.config import UpstreamLimits
from argosy_router.http.deadlines import Deadline, TimerWheel
from argosy_router.http.tls import UpstreamTls
from argosy_router.http.upstream_connection import UpstreamConnection
from argosy_router.http.upstream_errors import ConnectFailed, UpstreamError


class Waiter(Protocol):
    """Callbacks of a caller of `acquire`. Exactly one of the two is called, perhaps before `acquire` returns."""

    def on_connected(self, connection: UpstreamConnection) -> None: ...

    def on_connect_failed(self, error: ConnectFailed) -> None: ...


class ConnectionPool:
    """Connections to one `http://host:port` or `https://host:port`.

    `hostname` is the replica's name in `Host` and on its certificate, where that differs from its address.
    """

    def __init__(
        self, url: str, limits: UpstreamLimits, wheel: TimerWheel, tls: UpstreamTls, hostname: str = ""
    ) -> None:
        self.is_tls, self.host, self.port = split_url(url)
        self._tls = tls
        self._hostname = hostname or self.host
        self.authority = (
            f"[{self._hostname}]:{self.port}" if ":" in self._hostname else f"{self._hostname}:{self.port}"
        )
        self.authority_bytes = self.authority.encode("latin-1")
        self._limits = limits
        self._wheel = wheel
        self._turns = wheel.turns
        self._idle: list[UpstreamConnection] = []
        self.connections: set[UpstreamConnection] = set()
        """Idle or carrying a request; connections from `connect` are not included."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def acquire(self, waiter: Waiter, *, fresh: bool = False) -> None:
        """Give `waiter` an idle connection at once, or a new one later (always a new one if `fresh`)."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if not connection.is_closed:
                waiter.on_connected(connection)
                return
        task = asyncio.ensure_future(self._connect_for(waiter))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._on_task_done(task, waiter))

    def _on_task_done(self, task: asyncio.Task[None], waiter: Waiter) -> None:
        """Fail a cancelled task's waiter. The task cannot do so itself: cancelled before it began, it never runs."""
        self._tasks.discard(task)
        if task.cancelled():
            self._turns.run(partial(waiter.on_connect_failed, ConnectFailed("replica was removed")))

    async def connect(
        self, on_idle: Callable[[UpstreamConnection], None] | None = None
    ) -> UpstreamConnection:
        """Open a connection that belongs to the caller and never enters the pool.

        Args:
            on_idle: receives the connection when a response has ended and it can be reused; by default it closes then.

        Raises:
            ConnectFailed: refused, unreachable, or slower than the connect deadline.
        """
        return await self._open(on_idle or UpstreamConnection.abort)

    async def _open(self, on_idle: Callable[[UpstreamConnection], None]) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as timeout:
                deadline = Deadline(self._wheel, lambda: timeout.reschedule(0.0))
                deadline.set(self._limits.connect_timeout_s)
                try:
                    _, connection = await loop.create_connection(
                        lambda: UpstreamConnection(self._limits, self._wheel, on_idle, self._on_closed),
                        self.host,
                        self.port,
                        ssl=self._tls.context if self.is_tls else None,
                        server_hostname=self._hostname if self.is_tls else None,
                    )
                finally:
                    deadline.end()
        except TimeoutError:
            raise ConnectFailed("connect deadline passed") from None
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            raise ConnectFailed(f"connect failed: {error.strerror or error}", refused=refused) from None
        except ValueError as error:  # an invalid host name (UnicodeError), for DNS or for TLS
            raise ConnectFailed(f"connect failed: {error}") from None
        return connection

    def release(self, connection: UpstreamConnection) -> None:
        """Return a connection to the pool between two requests."""
        if self._is_closed or len(self._idle) >= self._limits.max_idle_connections:
            connection.abort()
            return
        self._idle.append(connection)
        connection.expire_after(self._limits.keep_alive_s)

    def fail_requests(self, error: UpstreamError, *, include_begun: bool) -> None:
        """Fail the requests without a response; with `include_begun` also those whose response has begun. Each of them
        is sent again at once, so of many a few fail in each turn of the event loop."""
        for connection in list(self.connections):
            if (sink := connection.sink) is not None:
                failing = partial(connection.fail_request, sink, error, include_begun=include_begun)
                self._turns.run(failing)

    def close(self) -> None:
        """Close idle and connecting connections; connections in use finish their request and close then."""
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        for connection in self._idle[:]:
            connection.abort()

    @property
    def idle(self) -> int:
        return len(self._idle)

    def _on_closed(self, connection: UpstreamConnection) -> None:
        self.connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def _connect_for(self, waiter: Waiter) -> None:
        try:
            connection = await self._open(self.release)
        except ConnectFailed as error:
            self._turns.run(partial(waiter.on_connect_failed, error))
        else:
            if not connection.is_closed:
                self.connections.add(connection)
            self._turns.run(partial(self._hand_over, connection, waiter))

    def _hand_over(self, connection: UpstreamConnection, waiter: Waiter) -> None:
        """Give a new connection to its waiter, unless it was closed before it was its turn: sending a request takes as
        long as other steps."""
        if self._is_closed:
            connection.abort()
            waiter.on_connect_failed(ConnectFailed("replica was removed"))
        elif connection.is_closed:
            waiter.on_connect_failed(ConnectFailed("the replica closed the connection at once"))
        else:
            waiter.on_connected(connection)


def split_url(url: str) -> tuple[bool, str, int]:
    """Split a replica's `http://host:port` or `https://host:port` into (is TLS, host, port).

    Raises:
        ValueError: another scheme, a path, credentials, or no host.
    """
    parts = urlsplit(url)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.path not in ("", "/")
        or parts.query
        or parts.username
    ):
        raise ValueError(f"replica URL must look like http://HOST:PORT or https://HOST:PORT, not {url!r}")
    is_tls = parts.scheme == "https"
    return is_tls, parts.hostname, parts.port or (443 if is_tls else 80)
