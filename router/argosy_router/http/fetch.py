"""One small request from a task: health polls, `/v1/models`.

Owns: collecting a bounded response. Must not know: what it is for.
"""

from __future__ import annotations

import asyncio

import msgspec

from argosy_router.http.errors import MalformedResponse, UpstreamError
from argosy_router.http.messages import Headers
from argosy_router.http.pool import ConnectionPool


class Response(msgspec.Struct):
    status: int
    headers: Headers
    body: bytes


class _Collector:
    def __init__(self, limit: int) -> None:
        self.done: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._limit = limit
        self._response = Response(0, [], b"")

    def on_response(self, status: int, headers: Headers) -> None:
        self._response = Response(status, headers, b"")

    def on_data(self, data: bytes) -> None:
        if len(self._response.body) < self._limit:
            self._response.body += data

    def on_end(self) -> None:
        if len(self._response.body) >= self._limit:
            self.on_failed(MalformedResponse(f"response is longer than {self._limit} bytes"))
        elif not self.done.done():
            self.done.set_result(self._response)

    def on_failed(self, error: UpstreamError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


async def fetch(
    pool: ConnectionPool, path: str, key: str, timeout_s: float, limit: int = 1 << 20
) -> Response:
    """GETs `path` on a connection of its own.

    Raises:
        UpstreamError: no connection, no answer in time, or not HTTP.
    """
    connection = await pool.connect()
    collector = _Collector(limit)
    connection.send(collector, request_head(pool, path, key), timeout_s)
    try:
        return await collector.done
    finally:
        connection.abort()


def request_head(pool: ConnectionPool, path: str, key: str) -> bytes:
    """A GET request; `key` is the bearer key, empty for none."""
    authorization = f"authorization: Bearer {key}\r\n" if key else ""
    return f"GET {path} HTTP/1.1\r\nhost: {pool.authority}\r\n{authorization}accept: */*\r\n\r\n".encode(
        "latin-1"
    )
