"""HTTP responses that stop their work when the client leaves: JSON answers and event streams.

ASGI servers do not cancel a handler that waits for a model while its client is gone; every response here watches for
the disconnect itself, streamed or not, and cancels its work, which aborts the request in the core.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from argosy_engine.api.http.body_send import body_send
from argosy_engine.api.http.departure import departure_of
from argosy_engine.api.http.error_response import send_error
from argosy_protocol.anthropic import error_event
from argosy_protocol.errors import ApiError

_DONE = b"data: [DONE]\n\n"


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
    departure = departure_of(scope)
    if departure is not None:
        departure.watch(on_left)
        return departure.unwatch

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


def event_stream(
    events: AsyncGenerator[bytes, None],
    headers: dict[str, str],
    to_api_error: Callable[[Exception], ApiError],
    accepted: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> WatchedResponse:
    """Send pieces of whole server-sent events, then `[DONE]`.

    The status waits for the first event, so an error before it has its proper status; one after it becomes an event.

    Args:
        accepted: returns the context in which the first event is awaited.
    """

    async def work(send: Send, send_body: Send) -> None:
        async with contextlib.aclosing(events):
            try:
                with accepted():
                    first = await anext(events, b"")
            except Exception as error:
                await send_error(send, to_api_error(error))
                return
            await send(_start(headers, b"text/event-stream; charset=utf-8", None))
            try:
                if first:
                    await send_body({"type": "http.response.body", "body": first, "more_body": True})
                async for piece in events:
                    await send_body({"type": "http.response.body", "body": piece, "more_body": True})
            except Exception as error:
                await _send_event(send_body, b"data: " + to_api_error(error).body())
            await send_body({"type": "http.response.body", "body": _DONE})

    return WatchedResponse(work)


def message_event_stream(
    events: AsyncGenerator[bytes, None],
    headers: dict[str, str],
    to_api_error: Callable[[Exception], ApiError],
    path: str,
) -> WatchedResponse:
    """Send events that are lines already, as a stream of Anthropic's API. Errors are as in `event_stream`."""

    async def work(send: Send, send_body: Send) -> None:
        async with contextlib.aclosing(events):
            try:
                first = await anext(events)
            except Exception as error:
                await send_error(send, to_api_error(error), path, headers)
                return
            await send(_start(headers, b"text/event-stream; charset=utf-8", None))
            last = b""
            try:
                await _send_event(send_body, first)
                async for event in events:
                    await _send_event(send_body, event)
            except Exception as error:
                last = error_event(to_api_error(error))
            await send_body({"type": "http.response.body", "body": last})

    return WatchedResponse(work)


def response_event_stream(
    events: AsyncGenerator[bytes, None],
    headers: dict[str, str],
    to_api_error: Callable[[Exception], ApiError],
) -> WatchedResponse:
    """Send events that are whole, as a stream of OpenAI's Responses API, whose last event tells of errors, too.

    The status waits for the first event, so an error before it has its proper status.
    """

    async def work(send: Send, send_body: Send) -> None:
        async with contextlib.aclosing(events):
            try:
                first = await anext(events, b"")
            except Exception as error:
                await send_error(send, to_api_error(error), "", headers)
                return
            await send(_start(headers, b"text/event-stream; charset=utf-8", None))
            await send_body({"type": "http.response.body", "body": first, "more_body": True})
            async for event in events:
                await send_body({"type": "http.response.body", "body": event, "more_body": True})
            await send_body({"type": "http.response.body", "body": b""})

    return WatchedResponse(work)


async def _send_event(send_body: Send, lines: bytes) -> None:
    await send_body({"type": "http.response.body", "body": lines + b"\n\n", "more_body": True})


def _start(headers: dict[str, str], content_type: bytes, length: int | None) -> dict[str, object]:
    raw = [(b"content-type", content_type)]
    raw += (
        [(b"cache-control", b"no-cache")] if length is None else [(b"content-length", str(length).encode())]
    )
    raw += [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": raw}
