"""The client of a request at whose end something is to be done.

Owns: when that is. Must not know: what is done, who answers.
Invariant: it is done once, when the request has been answered or its client has disconnected.
"""

from __future__ import annotations

from collections.abc import Callable

from argosy_router.http.server_interface import Client, ClientListener


class EndingClient:
    """Wraps a client. A `Client`, and the `ClientListener` of the one it wraps."""

    def __init__(self, client: Client, on_end: Callable[[], None]) -> None:
        self._client = client
        self._on_end: Callable[[], None] | None = on_end
        self._listener: ClientListener | None = None

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    # called by what answers

    def attach(self, listener: ClientListener) -> None:
        self._listener = listener
        self._client.attach(self)

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        self._end()
        self._client.respond(status, headers, body)

    def start(self, status: int, headers: bytes, first: bytes) -> None:
        self._client.start(status, headers, first)

    def send(self, data: bytes) -> None:
        self._client.send(data)

    def finish(self) -> None:
        self._end()
        self._client.finish()

    def abort(self) -> None:
        self._end()
        self._client.abort()

    # called by the client

    def on_client_lost(self) -> None:
        self._end()
        if self._listener is not None:
            self._listener.on_client_lost()

    def on_client_paused(self) -> None:
        if self._listener is not None:
            self._listener.on_client_paused()

    def on_client_resumed(self) -> None:
        if self._listener is not None:
            self._listener.on_client_resumed()
