"""The response to a request that an ASGI layer rejects, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from starlette.types import Send

from argosy_protocol.errors import ApiError


async def send_error(send: Send, error: ApiError) -> None:
    """Send a whole response for an error."""
    body = error.body()
    headers: list[tuple[bytes, bytes]] = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    headers += [(name.encode(), value.encode()) for name, value in error.headers().items()]
    start: dict[str, Any] = {"type": "http.response.start", "status": error.http_status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body})
