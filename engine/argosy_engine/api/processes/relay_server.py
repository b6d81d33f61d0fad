"""RelayServer: answers the requests that other API processes pass to the first one (`request_relay`).

Each request comes with a stream of its own, whose descriptor is received over a socket that the other process has
inherited. Slow readers hold up their own stream only, and a stream that the other end closes is a client that has left.

Must not know: keys and limits. The other process has checked them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from argosy_engine.api.processes.frames import open_stream, read_frame, write_frame
from argosy_engine.api.processes.process_messages import RelayedRequest, ResponseBody, ResponseStart

logger = logging.getLogger("argosy.api")


class RelayServer:
    """
    Args:
        app: the application with no layers around it but those of relayed requests (`add_relayed_layers`).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, receiving: socket.socket) -> None:
        """Answer the requests of one process, whose streams arrive on a socket, which this object owns from now on."""
        receiving.setblocking(False)
        self._sockets.append(receiving)
        asyncio.get_running_loop().add_reader(receiving.fileno(), self._receive, receiving)

    async def close(self) -> None:
        """Break the requests that have not ended."""
        for receiving in list(self._sockets):
            self._forget(receiving)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _forget(self, receiving: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(receiving.fileno())
        self._sockets.remove(receiving)
        receiving.close()

    def _receive(self, receiving: socket.socket) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(receiving, 1, 1)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._forget(receiving)
            return
        for descriptor in descriptors:  # none if this process has too many: the stream ends then
            task = asyncio.create_task(self._answer(socket.socket(fileno=descriptor)), name="relayed request")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, end: socket.socket) -> None:
        reader, writer = await open_stream(end)
        try:
            payload = await read_frame(reader)
            if payload is not None:
                await self._run(msgspec.msgpack.decode(payload, type=RelayedRequest), reader, writer)
        except ConnectionError:
            pass  # the other process has closed the stream
        except Exception:
            logger.exception("a relayed request failed")
        finally:
            writer.close()

    async def _run(
        self, request: RelayedRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        leaving = asyncio.create_task(reader.read(1))
        body: bytes | None = request.body

        async def receive() -> Message:
            nonlocal body
            if body is None:
                await asyncio.wait({leaving})
                return {"type": "http.disconnect"}
            message = {"type": "http.request", "body": body, "more_body": False}
            body = None
            return message

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                write_frame(writer, ResponseStart(message["status"], list(message.get("headers", ()))))
            elif message["type"] == "http.response.body":
                write_frame(writer, ResponseBody(message.get("body", b""), message.get("more_body", False)))
                await writer.drain()

        try:
            await self._app(_scope(request), receive, send)
            await writer.drain()
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)


def _scope(request: RelayedRequest) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": request.http_version,
        "method": request.method,
        "scheme": request.scheme,
        "path": request.path,
        "raw_path": request.raw_path,
        "query_string": request.query_string,
        "root_path": "",
        "headers": request.headers,
        "client": request.client,
        "server": None,
        "state": {},
    }
