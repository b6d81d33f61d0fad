"""Progress server: answers `GET /progress` while a fetch runs, for the operator of a cluster.

Owns the port, its thread and their bounds. Must not know what is fetched. Invariants: whatever clients send, or do not
send, costs one thread, `MAX_CONNECTIONS` sockets and a few KiB each; a full house loses its oldest connection, so that
idle ones cannot keep the operator out; a fault here never ends a fetch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import msgspec

from argosy_protocol.model_progress import MAX_REPORT_BYTES, PROGRESS_PATH, ModelProgress
from argosy_protocol.program.listen import listen

MAX_CONNECTIONS: Final = 32
REQUEST_TIMEOUT_S: Final = 5.0
_MAX_HEAD_BYTES: Final = 4096
_ANY_HOST: Final = "0.0.0.0"  # noqa: S104 - a pod's network namespace is its own, and a progress is no secret


class ProgressServer:
    """A context manager; the port answers from its beginning to its end.

    Args:
        port: 0 for any that is free.
        report: called in the server's thread, for each request.

    Raises (from entering):
        CannotListen: the port is taken, or not permitted.
    """

    def __init__(self, port: int, report: Callable[[], ModelProgress], *, host: str = _ANY_HOST) -> None:
        self.port = port
        self._host = host
        self._report = report
        self._open: dict[asyncio.StreamWriter, None] = {}
        """In the order in which they came."""
        self._is_closing = False

    def __enter__(self) -> Self:
        (self._socket,) = listen(self._host, self.port, MAX_CONNECTIONS, port_flag="--progress-port")
        self.port = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="progress", daemon=True)
        self._thread.start()
        serving = asyncio.start_server(
            self._serve, sock=self._socket, limit=_MAX_HEAD_BYTES, backlog=MAX_CONNECTIONS
        )
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._is_closing = True
        self._loop.remove_reader(
            self._socket.fileno()
        )  # connections that are just accepted fail if close() is first
        for writer in self._open:
            writer.transport.abort()
        while ending := asyncio.all_tasks() - {asyncio.current_task()}:  # some may just have been accepted
            await asyncio.gather(*ending, return_exceptions=True)
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_closing:
            writer.transport.abort()
            return
        if len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head.partition(b"\r\n")[0]))
                await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            writer.transport.abort()
        finally:
            self._open.pop(writer, None)
            writer.close()

    def _answer(self, request_line: bytes) -> bytes:
        method, _, rest = request_line.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if path != PROGRESS_PATH.encode():
            return _response("404 Not Found", b"")
        if method != b"GET":
            return _response("405 Method Not Allowed", b"", "Allow: GET\r\n")
        report = self._report()
        body = msgspec.json.encode(report)
        if len(body) > MAX_REPORT_BYTES:
            body = msgspec.json.encode(msgspec.structs.replace(report, note="", source=""))
        return _response("200 OK", body, "Content-Type: application/json\r\n")


def _response(status: str, body: bytes, headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
