"""Interfaces between a server, its application, and whatever answers one request.

Must not know: any implementation of them.
"""

from __future__ import annotations

from typing import Protocol

from argosy_protocol.errors import ApiError
from argosy_router.http.messages import Request


class ClientListener(Protocol):
    """Receiver of a client's events while it answers the client's request."""

    def on_client_lost(self) -> None:
        """Called when the client has disconnected; no further call follows."""
        ...

    def on_client_paused(self) -> None:
        """Called when the client reads too slowly: the write buffer is full."""
        ...

    def on_client_resumed(self) -> None:
        """Called when the client has read the write buffer."""
        ...


class Client(Protocol):
    """The client of a request, as seen by whatever answers it (see `server_connection.ServerConnection`)."""

    def attach(self, listener: ClientListener) -> None: ...

    def respond(self, status: int, headers: bytes, body: bytes) -> None: ...

    def start(self, status: int, headers: bytes, first: bytes) -> None: ...

    def send(self, data: bytes) -> None: ...

    def finish(self) -> None: ...

    def abort(self) -> None: ...


class Application(Protocol):
    """Answers the requests of a server."""

    def on_head(self, request: Request) -> bool:
        """Check a request's head; return whether its body will be used. A body that will not be used must be small.

        Raises:
            ApiError: the request is refused before its body is read, and the connection closed.
        """
        ...

    def on_request(self, client: Client, request: Request) -> None:
        """Answer now (`respond`), or later (`attach` a listener first). Must not raise."""
        ...

    def on_refused(self, error: ApiError, request: Request | None) -> tuple[bytes, bytes]:
        """Note a request that is refused before `on_request`; `request` is None if not even its head was valid.

        Returns:
            Header lines and body of the refusal.
        """
        ...
