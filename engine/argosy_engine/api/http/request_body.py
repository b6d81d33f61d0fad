"""The body of a request, for every endpoint.

Starlette reads it through an asynchronous generator, which costs more than most bodies, since they arrive in one
message.
"""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

_KEY = "argosy.body"


async def read_body(request: Request) -> bytes:
    """Return the whole body. It is kept for the request: an endpoint may call another one, which reads it again.

    Raises:
        ClientDisconnect: the client left before it had sent all of it.
    """
    kept: bytes | None = request.scope.get(_KEY)
    if kept is None:
        kept = request.scope[_KEY] = await _received(request)
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
