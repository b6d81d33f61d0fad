"""Answers and streams of accepted requests: counted until the core has them, errors translated and logged."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any

import msgspec

from argosy_engine.api.error_translation import translated_error
from argosy_engine.api.http.http_responses import (
    WatchedResponse,
    event_stream,
    json_response,
    message_event_stream,
)
from argosy_engine.api.openai.error_fields import RequestBody, name_field
from argosy_engine.api.served_engine import Engine
from argosy_protocol import headers
from argosy_protocol.anthropic_chat import name_field as name_messages_field
from argosy_protocol.errors import (
    ApiError,
)


def json_answer(
    engine: Engine,
    produce: Awaitable[msgspec.Struct],
    request_id: str,
    body: RequestBody,
    load_form: str | None = None,
) -> WatchedResponse:
    """Answer with what `produce` returns, and with the load in a header if `load_form` asks for it."""

    async def translated() -> msgspec.Struct:
        try:
            with engine.accepted():
                return await produce
        except Exception as error:
            raise _logged(error, body) from error

    lines = {headers.REQUEST_ID: request_id}
    return json_response(translated(), lines, last_headers=lambda: engine.load_headers(load_form))


def message_answer(
    engine: Engine, produce: Awaitable[msgspec.Struct], request_id: str, path: str, lines: dict[str, str]
) -> WatchedResponse:
    """As `json_answer`, of Anthropic's API, with further headers."""

    async def translated() -> msgspec.Struct:
        with engine.accepted():
            try:
                return await produce
            except Exception as error:
                raise _logged_of_messages(error) from error

    return json_response(translated(), {**message_headers(request_id), **lines}, path)


def message_headers(request_id: str) -> dict[str, str]:
    """Return the headers of an answer of Anthropic's API, whose clients read the id as `request-id`."""
    return {headers.REQUEST_ID: request_id, headers.ANTHROPIC_REQUEST_ID: request_id}


def stream_answer(
    engine: Engine, events: AsyncGenerator[bytes, None], request_id: str, body: RequestBody
) -> WatchedResponse:
    """Answer with the events, pieces of one or more chunks of OpenAI's API."""

    def logged(error: Exception) -> ApiError:
        return _logged(error, body)

    return event_stream(events, {headers.REQUEST_ID: request_id}, logged, engine.accepted)


def message_stream_answer(
    engine: Engine, events: AsyncGenerator[Any, None], request_id: str, path: str, lines: dict[str, str]
) -> WatchedResponse:
    """Answer with the events, each one of Anthropic's API, and with further headers."""
    return message_event_stream(
        _counted(engine, events), {**message_headers(request_id), **lines}, _logged_of_messages, path
    )


async def _counted(engine: Engine, events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Count a stream's request as accepted until its first event; later the core has it."""
    async with aclosing(events):
        with engine.accepted():
            first = await anext(events, None)
        if first is not None:
            yield first
        async for event in events:
            yield event


def _logged(error: Exception, body: RequestBody) -> ApiError:
    """Translate an error with the request's own field names; log an unexpected one.

    The log has its type and stack, but not its message, which may quote a prompt.
    """
    return name_field(translated_error(error), body)


def _logged_of_messages(error: Exception) -> ApiError:
    """As `_logged`, of a Messages request."""
    return name_messages_field(translated_error(error))
