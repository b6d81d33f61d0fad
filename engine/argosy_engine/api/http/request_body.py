"""The body of a request. Starlette reads it through an asynchronous generator, which costs more than most bodies, since
they arrive in one message."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request


async def read_body(request: Request) -> bytes:
    """Return the whole body. It can be read once.

    Raises:
        ClientDisconnect: the client left before it had sent all of it.
    """
    pieces: list[bytes] = []
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            return b"".join((*pieces, body)) if pieces else body
        pieces.append(body)
