"""RequestLimits: the ASGI layer that rejects request bodies that are too large or not JSON."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from argosy_engine.api.http.error_response import send_error
from argosy_protocol.errors import ApiError, BadRequest, PayloadTooLarge

MAX_BODY_BYTES = 32 << 20
"""Room for a chat of four million characters; images are not accepted."""


class RequestLimits:
    """A request without a body needs no Content-Type."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            _check_body_headers(scope)
        except ApiError as error:
            await send_error(send, error, scope["path"])
            return
        await self._app(scope, _limited(receive), send)


def _check_body_headers(scope: Scope) -> None:
    headers: dict[bytes, bytes] = dict(scope["headers"])
    length = int(headers.get(b"content-length") or 0)
    if length > MAX_BODY_BYTES:
        raise PayloadTooLarge(f"request body exceeds {MAX_BODY_BYTES} bytes")
    if scope["method"] == "POST" and (length or b"transfer-encoding" in headers):
        # Browsers send other types across origins without a preflight request.
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            raise BadRequest("Content-Type must be application/json", code="unsupported_media_type")
        if b"content-encoding" in headers:
            raise BadRequest("Content-Encoding is not supported", code="unsupported_media_type")


def _limited(receive: Receive) -> Receive:
    """Limit the size of a chunked body, which has no Content-Length."""
    total = 0

    async def limited() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > MAX_BODY_BYTES:
            raise PayloadTooLarge(f"request body exceeds {MAX_BODY_BYTES} bytes")
        return message

    return limited
