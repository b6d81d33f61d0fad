"""CorsLayer: Starlette's CORS, which most requests pass quickly because they come from no page of a browser.

A request without `Origin` gets one header, `Vary: Origin`, so that caches keep its answer apart from those for pages.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Message, Receive, Scope, Send

_VARY = (b"vary", b"Origin")


class CorsLayer(CORSMiddleware):
    """Arguments are Starlette's."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or any(name == b"origin" for name, _ in scope["headers"]):
            await super().__call__(scope, receive, send)
            return

        async def send_varying(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.get("headers", ())
                if any(name.lower() == b"vary" for name, _ in headers):
                    await self.send(message, send, Headers(scope=scope))
                    return
                message["headers"] = [*headers, _VARY]
            await send(message)

        await self.app(scope, receive, send_varying)
