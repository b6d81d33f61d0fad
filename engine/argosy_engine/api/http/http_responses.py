"""HTTP responses that stop their work when the client leaves: JSON answers and event streams; errors; request bodies.

ASGI servers do not cancel a handler that waits for a model while its client is gone; every response here watches for
the disconnect itself, streamed or not, and cancels its work, which aborts the request in the core.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from argosy_http.bounded_protocol import client_connection, error_body
from argosy_protocol.anthropic import error_event
from argosy_protocol.errors import ApiError

_NO_HEADERS: Mapping[str, str] = {}


async def send_error(
    send: Send, error: ApiError, path: str = "", request_headers: Mapping[str, str] = _NO_HEADERS
) -> None:
    """Send a whole response for an error.

    Args:
        path: the request's.
        request_headers: headers of every answer to the request.
    """
    body = error_body(error, path)
    headers: list[tuple[bytes, bytes]] = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    lines = {**request_headers, **error.headers()}
    headers += [(name.encode(), value.encode()) for name, value in lines.items()]
    start: dict[str, Any] = {"type": "http.response.start", "status": error.http_status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body})


_BODY_SEND = "argosy.body_send"


class BodySend:
    """The ASGI layer next to the application that lets streams write their events past the framework.

    Starlette looks at every message of a response, through one function per layer of its own, to know whether a
    response has begun. The first message tells that; events that follow it need not pass there.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_BODY_SEND] = send
        await self._app(scope, receive, send)


def body_send(scope: Scope, send: Send) -> Send:
    """Return what the messages after a response's first one are to be sent with.

    Args:
        send: what the first one is sent with. It is all that there is without the layer.
    """
    found: Send = scope.get(_BODY_SEND, send)
    return found


class WatchedResponse(Response):
    """Run `work(send, send_body)` until it is done or the client has left; `work` sends status and body itself.

    `send_body` is for the messages after the status.
    """

    def __init__(self, work: Callable[[Send, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        scope.pop(_BODY, None)  # which has been decoded
        is_done = has_left = False

        def leave() -> None:
            nonlocal has_left
            if not is_done:
                has_left = True
                task.cancel()

        unwatch = _watch(scope, receive, leave)
        try:
            await self._work(send, body_send(scope, send))
        except asyncio.CancelledError:
            if not has_left or task.uncancel():
                raise  # the server ends, too
        finally:
            is_done = True
            unwatch()


def _watch(scope: Scope, receive: Receive, on_left: Callable[[], None]) -> Callable[[], object]:
    """Call `on_left` when the client leaves; return what ends that."""
    connection = client_connection(scope)
    if connection is not None:
        connection.watch(on_left)
        return connection.unwatch

    def end(gone: asyncio.Future[None]) -> None:
        if not gone.cancelled():
            on_left()

    gone = asyncio.ensure_future(_disconnected(receive))
    gone.add_done_callback(end)
    return gone.cancel


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(
    produce: Awaitable[msgspec.Struct],
    headers: dict[str, str],
    path: str = "",
    last_headers: Callable[[], dict[str, str]] | None = None,
) -> WatchedResponse:
    """Send the struct as JSON once it is computed, or an ApiError in the shape of the API that `path` belongs to.

    Args:
        last_headers: returns further headers once the struct is computed.
    """

    async def work(send: Send, send_body: Send) -> None:
        try:
            body = msgspec.json.encode(await produce)
        except ApiError as error:
            await send_error(send, error, path, headers)
            return
        more = {} if last_headers is None else last_headers()
        await send(_start({**headers, **more}, b"application/json", len(body)))
        await send_body({"type": "http.response.body", "body": body})

    return WatchedResponse(work)


class StreamForm(NamedTuple):
    """What the streams of an API have besides their events."""

    event_end: bytes = b""
    """What follows each event, if events come without it."""
    of_error: Callable[[ApiError], bytes] | None = None
    """Makes the event of an error after the first event; None: the events tell of errors themselves."""
    end: bytes = b""


OPENAI_STREAM = StreamForm(of_error=lambda error: b"data: %b\n\n" % error.body(), end=b"data: [DONE]\n\n")
MESSAGES_STREAM = StreamForm(event_end=b"\n\n", of_error=error_event)
RESPONSES_STREAM = StreamForm()


def event_stream(
    events: AsyncGenerator[bytes, None],
    headers: dict[str, str],
    to_api_error: Callable[[Exception], ApiError],
    form: StreamForm,
    *,
    path: str = "",
    accepted: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> WatchedResponse:
    """Send server-sent events, in pieces of one or more.

    The status waits for the first piece, so an error before it has its proper status, in the shape of the API that
    `path` belongs to; one after it becomes an event.

    Args:
        accepted: returns the context in which the first piece is awaited.
    """

    async def work(send: Send, send_body: Send) -> None:
        async def send_piece(piece: bytes) -> None:
            await send_body({"type": "http.response.body", "body": piece, "more_body": True})

        async with contextlib.aclosing(events):
            try:
                with accepted():
                    first = await anext(events, b"")
            except Exception as error:
                await send_error(send, to_api_error(error), path, headers)
                return
            await send(_start(headers, b"text/event-stream; charset=utf-8", None))
            try:
                if first:
                    await send_piece(first + form.event_end)
                async for piece in events:
                    await send_piece(piece + form.event_end)
            except Exception as error:
                if form.of_error is None:
                    raise
                await send_piece(form.of_error(to_api_error(error)))
            await send_body({"type": "http.response.body", "body": form.end})

    return WatchedResponse(work)


def _start(headers: dict[str, str], content_type: bytes, length: int | None) -> dict[str, object]:
    raw = [(b"content-type", content_type)]
    raw += (
        [(b"cache-control", b"no-cache")] if length is None else [(b"content-length", str(length).encode())]
    )
    raw += [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": raw}


_BODY = "argosy.body"


async def read_body(request: Request) -> bytes:
    """Return the whole body. It is kept for the request: an endpoint may call another one, which reads it again.

    Starlette reads it through an asynchronous generator, which costs more than most bodies, since they arrive in one
    message.

    Raises:
        ClientDisconnect: the client left before it had sent all of it.
    """
    kept: bytes | None = request.scope.get(_BODY)
    if kept is None:
        kept = request.scope[_BODY] = await _received(request)
    return kept


async def _received(request: Request) -> bytes:
    pieces: list[bytes] = []
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            return b"".join((*pieces, body)) if pieces else body
        pieces.append(body)
