"""RequestIds: the ASGI layer that puts `x-request-id` on every response (`--enable-request-id-headers`).

Responses of endpoints that generate have it anyway, by which their logs are found; with the flag also /health, /metrics
and errors do.
"""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from argosy_protocol import headers

_REQUEST_ID = re.compile(headers.REQUEST_ID_FORM)


def is_request_id(value: str | None) -> bool:
    """Return whether a client's value is used as the id of its request; another one gets an id of ours."""
    return value is not None and _REQUEST_ID.fullmatch(value) is not None


class RequestIds:
    """Adds the client's own id to a response, or a new one of 32 hexadecimal digits, unless it has one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(headers.REQUEST_ID)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                lines = MutableHeaders(scope=message)
                own = given if given is not None and is_request_id(given) else secrets.token_hex(16)
                lines.setdefault(headers.REQUEST_ID, own)
            await send(message)

        await self._app(scope, receive, send_with_id)
