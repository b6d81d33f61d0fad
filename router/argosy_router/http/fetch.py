"""Small GET requests to replicas: health polls, metrics, `/v1/models`.

Owns: collecting a bounded response. Must not know: what it is for.
"""

# Not compiled: serves polls, not requests.

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from argosy_router.http.messages import Headers
from argosy_router.http.pool import ConnectionPool
from argosy_router.http.upstream_connection import UpstreamConnection
from argosy_router.http.upstream_errors import ConnectionLost, MalformedResponse, UpstreamError

KEEP_S = 4.0
"""Shorter than the shortest keep-alive timeout among engines' servers (uvicorn: 5 s)."""


class Response(msgspec.Struct):
    status: int
    headers: Headers
    body: bytes


class _Stale(ConnectionLost):
    """The replica had closed the kept connection, which says nothing about its health."""


class Collector:
    """Response sink that collects a body up to a limit; `done` resolves to the response."""

    def __init__(self, limit: int) -> None:
        self.done: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._limit = limit
        self._response = Response(0, [], b"")
        self._body = bytearray()
        """Grows in place: a replica may send a byte at a time, and the whole body would be copied for each."""

    def on_response(self, status: int, headers: Headers) -> None:
        self._response = Response(status, headers, b"")

    def on_data(self, data: bytes) -> None:
        if len(self._body) < self._limit:
            self._body += data

    def on_end(self) -> None:
        if len(self._body) >= self._limit:
            self.on_failed(MalformedResponse(f"response is longer than {self._limit} bytes"))
        elif not self.done.done():
            self._response.body = bytes(self._body)
            self.done.set_result(self._response)

    def on_failed(self, error: UpstreamError) -> None:
        if not self.done.done():
            is_stale = isinstance(error, ConnectionLost) and error.stale
            self.done.set_exception(_Stale(str(error)) if is_stale else error)


async def fetch(
    pool: ConnectionPool, path: str, key: str, timeout_s: float, limit: int = 1 << 20
) -> Response:
    """GET `path` on a connection of its own.

    Raises:
        UpstreamError: no connection, no answer in time, or not HTTP.
    """
    return await _get(await pool.connect(), pool, path, key, timeout_s, limit)


class Fetcher:
    """Sequential requests to one replica on a connection that is kept between them.

    `keep_s` is how long an idle connection is kept: less than the replica's own keep-alive timeout.
    """

    def __init__(self, pool: ConnectionPool, key: str = "", keep_s: float = KEEP_S) -> None:
        self._pool = pool
        self.key = key
        """The bearer key to send; empty for none."""
        self._keep_s = keep_s
        self._kept: UpstreamConnection | None = None

    async def get(self, path: str, timeout_s: float, limit: int = 1 << 20) -> Response:
        """GET `path`.

        Raises:
            UpstreamError: no connection, no answer in time, or not HTTP.
        """
        connection, self._kept = self._kept, None
        if connection is not None and not connection.is_closed:
            with contextlib.suppress(_Stale):
                return await self._get(connection, path, timeout_s, limit)
        return await self._get(await self._pool.connect(self._keep), path, timeout_s, limit)

    def close(self) -> None:
        """Close the kept connection, if there is one."""
        connection, self._kept = self._kept, None
        if connection is not None:
            connection.abort()

    def _keep(self, connection: UpstreamConnection) -> None:
        self._kept = connection
        connection.expire_after(self._keep_s)

    async def _get(self, connection: UpstreamConnection, path: str, timeout_s: float, limit: int) -> Response:
        return await _get(connection, self._pool, path, self.key, timeout_s, limit, lambda: self._kept)


async def _get(
    connection: UpstreamConnection,
    pool: ConnectionPool,
    path: str,
    key: str,
    timeout_s: float,
    limit: int,
    kept: Callable[[], UpstreamConnection | None] = lambda: None,
) -> Response:
    """Send one request; afterwards close the connection, unless it is the one that `kept` returns."""
    collector = Collector(limit)
    connection.send(collector, request_head(pool, path, key), timeout_s)
    try:
        return await collector.done
    finally:
        if kept() is not connection:
            connection.abort()


def request_head(pool: ConnectionPool, path: str, key: str) -> bytes:
    """Render a GET request; `key` is the bearer key, empty for none."""
    authorization = f"authorization: Bearer {key}\r\n" if key else ""
    return f"GET {path} HTTP/1.1\r\nhost: {pool.authority}\r\n{authorization}accept: */*\r\n\r\n".encode(
        "latin-1"
    )
