"""Who deals with whom when a request is answered.

Owns: what a server, its application, and whoever answers one request ask of each other. Must not know: any of them.
"""

from __future__ import annotations

from typing import Protocol

from argosy_protocol.errors import ApiError
from argosy_router.http.messages import Request


class Exchange(Protocol):
    """Whoever is answering a request."""

    def on_client_lost(self) -> None: ...

    def on_client_paused(self) -> None: ...

    def on_client_resumed(self) -> None: ...


class Client(Protocol):
    """Whoever asked, as an exchange sees it (`server.ServerConnection` says what each call does)."""

    def attach(self, exchange: Exchange) -> None: ...

    def respond(self, status: int, headers: bytes, body: bytes) -> None: ...

    def start(self, status: int, headers: bytes, first: bytes) -> None: ...

    def send(self, data: bytes) -> None: ...

    def finish(self) -> None: ...

    def abort(self) -> None: ...


class Application(Protocol):
    """Whoever answers the requests of a server."""

    def on_head(self, request: Request) -> bool:
        """A request's head is there. Whether its body will be read; a body that will not be must be small.

        Raises:
            ApiError: it is refused before its body is taken, and the connection closed.
        """
        ...

    def on_request(self, client: Client, request: Request) -> None:
        """Answers now (`respond`) or later (`attach` an exchange first). Must not raise."""
        ...

    def on_refused(self, error: ApiError, request: Request | None) -> bytes:
        """A request, of which perhaps not even the head was understood, is refused before `on_request`.

        Returns:
            Header lines of the refusal.
        """
        ...
