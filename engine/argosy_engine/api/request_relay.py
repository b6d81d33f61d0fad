"""Requests that a further API process passes to the first one, because only that can answer them.

What generates, pools or tokenises is answered where it arrives, since it depends on nothing but its request. State is
in the first process: stored responses, metrics, telemetry, health, readiness, sleep. So is the engine while it loads.
The process that answers a request logs it and makes its spans.

Each request has a stream of its own, of frames with four bytes of length and msgpack, whose descriptor the first
process receives over a socket that the other one has inherited. Slow readers hold up their own stream only, and a
stream that the other end closes is a client that has left. Keys and limits have been checked where a request arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Any

import msgspec
from msgspec import Struct
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from argosy_engine.api.http.http_responses import send_error
from argosy_engine.api.served_engine import Engine
from argosy_engine.frontend.observer import current_record
from argosy_protocol import headers
from argosy_protocol.errors import ApiError, Unavailable

logger = logging.getLogger("argosy.api")


_LENGTH = 4
_encoder = msgspec.msgpack.Encoder()

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def open_stream(end: socket.socket) -> Stream:
    """Use one end of a `socket.socketpair`, which the stream owns from now on."""
    return await asyncio.open_unix_connection(sock=end)


def write_frame(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    payload = _encoder.encode(message)
    writer.write(len(payload).to_bytes(_LENGTH, "little") + payload)


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next message; None if the other process has closed the stream or ended."""
    try:
        length = await reader.readexactly(_LENGTH)
        return await reader.readexactly(int.from_bytes(length, "little"))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class RelayedRequest(Struct):
    """A request whose body is complete, which another process has let in."""

    method: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: list[tuple[bytes, bytes]]
    scheme: str
    http_version: str
    client: tuple[str, int] | None
    body: bytes


class ResponseStart(Struct, tag="start"):
    status: int
    headers: list[tuple[bytes, bytes]]


class ResponseBody(Struct, tag="body"):
    body: bytes
    more_body: bool


RelayedResponse = ResponseStart | ResponseBody

_OWN = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/classify",
        "/v1/embeddings",
        "/v1/models",
        "/v1/rerank",
        "/v1/score",
        "/v2/rerank",
        "/classify",
        "/detokenize",
        "/invocations",
        "/pooling",
        "/rerank",
        "/score",
        "/tokenize",
        "/version",
    }
)
"""Paths that each process answers itself."""
_RESPONSES = "/v1/responses"
_RESOLVED = headers.RESOLVED.encode().lower()
"""Header of responses that a router stores."""

_decoder = msgspec.msgpack.Decoder(RelayedResponse)


class RequestRelay:
    """
    Args:
        app: the application of this process.
        engine: its engine.
        sending: the socket on which the first process receives streams (`RelayServer`).
    """

    def __init__(self, app: ASGIApp, engine: Engine, sending: socket.socket) -> None:
        sending.setblocking(False)
        self._app = app
        self._engine = engine
        self._sending = sending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (self._engine.llm is not None and is_own(scope)):
            await self._app(scope, receive, send)
            return
        try:
            body = await _whole_body(receive)
        except ApiError as error:
            await send_error(send, error, scope["path"])
            return
        if body is None:
            return
        try:
            stream = await self._connect()
        except OSError:
            await send_error(send, _unreachable(), scope["path"])
            return
        gone = asyncio.create_task(_left(receive))
        answering = asyncio.create_task(_relay(scope, body, stream, send))
        try:
            await asyncio.wait({gone, answering}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not answering.done():
                answering.cancel()
            stream[1].close()
            with contextlib.suppress(asyncio.CancelledError):
                await answering

    async def _connect(self) -> Stream:
        """Open a stream to the first process.

        Raises:
            OSError: it has ended, or does not take up what is sent to it.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._sending, [b"\0"], [theirs.fileno()])
                return await open_stream(ours)
            except BaseException:
                ours.close()
                raise


def is_own(scope: Scope) -> bool:
    """Whether a process answers a request itself."""
    path: str = scope["path"]
    if path == _RESPONSES:
        return any(name == _RESOLVED for name, _ in scope["headers"])
    return path in _OWN or path.startswith("/v1/models/")


async def _relay(scope: Scope, body: bytes, stream: Stream, send: Send) -> None:
    reader, writer = stream
    write_frame(
        writer,
        RelayedRequest(
            method=scope["method"],
            path=scope["path"],
            raw_path=scope.get("raw_path") or scope["path"].encode(),
            query_string=scope["query_string"],
            headers=list(scope["headers"]),
            scheme=scope["scheme"],
            http_version=scope["http_version"],
            client=None if scope["client"] is None else tuple(scope["client"]),
            body=body,
        ),
    )
    record = current_record.get()
    if record is not None:
        record.is_relayed = True
    is_started = False
    while (payload := await read_frame(reader)) is not None:
        message = _decoder.decode(payload)
        if isinstance(message, ResponseStart):
            is_started = True
            await send({"type": "http.response.start", "status": message.status, "headers": message.headers})
        else:
            await send({"type": "http.response.body", "body": message.body, "more_body": message.more_body})
            if not message.more_body:
                return
    if not is_started:
        if record is not None:
            record.is_relayed = False
        await send_error(send, _unreachable(), scope["path"])
    # Otherwise the answer has no end, and the server breaks the connection.


async def _whole_body(receive: Receive) -> bytes | None:
    """Return the body; None if the client has left.

    Raises:
        ApiError: a layer around this one rejects the body, as one that is too large.
    """
    parts: list[bytes] = []
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _unreachable() -> Unavailable:
    return Unavailable("this engine is shutting down", retry_after_s=1.0)


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
