"""RequestRelay: the ASGI layer of a further API process that passes to the first process what only that one can answer.

What generates, pools or tokenises is answered here, since it depends on nothing but its request. State is in the first
process: stored responses, metrics, telemetry, health, readiness, sleep. So is the engine while it loads. The process
that answers a request logs it and makes its spans.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from argosy_engine.api.http.error_response import send_error
from argosy_engine.api.processes.frames import Stream, open_stream, read_frame, write_frame
from argosy_engine.api.processes.process_messages import RelayedRequest, RelayedResponse, ResponseStart
from argosy_engine.api.served_engine import Engine
from argosy_engine.frontend.request_record import current_record
from argosy_protocol import headers
from argosy_protocol.errors import ApiError, Unavailable

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
