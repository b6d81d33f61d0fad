"""The response to a request that is rejected, in the shape of the API that its path belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.types import Send

from argosy_protocol.anthropic import error_body as anthropic_error_body
from argosy_protocol.anthropic import is_messages_path
from argosy_protocol.errors import ApiError

_NO_HEADERS: Mapping[str, str] = {}


def error_body(error: ApiError, path: str) -> bytes:
    """Encode an error in Anthropic's shape if `path` is of its API, else in OpenAI's."""
    return anthropic_error_body(error) if is_messages_path(path) else error.body()


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
