"""BodySend: the ASGI layer next to the application that lets streams write their events past the framework.

Starlette looks at every message of a response, through one function per layer of its own, to know whether a response
has begun. The first message tells that; events that follow it need not pass there.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

_KEY = "argosy.body_send"


class BodySend:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_KEY] = send
        await self._app(scope, receive, send)


def body_send(scope: Scope, send: Send) -> Send:
    """Return what the messages after a response's first one are to be sent with.

    Args:
        send: what the first one is sent with. It is all that there is without the layer.
    """
    found: Send = scope.get(_KEY, send)
    return found
