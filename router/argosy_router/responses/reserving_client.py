"""The client of a request whose conversation was loaded from the storage.

Owns: the memory that is reserved for the conversation. Must not know: who answers.
Invariant: the memory is released once, when the request has been answered or its client has disconnected.
"""

from __future__ import annotations

from argosy_router.http.body_memory import BodyReservation
from argosy_router.http.server_interface import Client, ClientListener


class ReservingClient:
    """Wraps a client. A `Client`, and the `ClientListener` of the one it wraps."""

    def __init__(self, client: Client, reserved: BodyReservation) -> None:
        self._client = client
        self._reserved = reserved
        self._listener: ClientListener | None = None

    # called by what answers

    def attach(self, listener: ClientListener) -> None:
        self._listener = listener
        self._client.attach(self)

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        self._reserved.release()
        self._client.respond(status, headers, body)

    def start(self, status: int, headers: bytes, first: bytes) -> None:
        self._client.start(status, headers, first)

    def send(self, data: bytes) -> None:
        self._client.send(data)

    def finish(self) -> None:
        self._reserved.release()
        self._client.finish()

    def abort(self) -> None:
        self._reserved.release()
        self._client.abort()

    # called by the client

    def on_client_lost(self) -> None:
        self._reserved.release()
        if self._listener is not None:
            self._listener.on_client_lost()

    def on_client_paused(self) -> None:
        if self._listener is not None:
            self._listener.on_client_paused()

    def on_client_resumed(self) -> None:
        if self._listener is not None:
            self._listener.on_client_resumed()
