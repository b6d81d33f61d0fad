"""The interface of a request that flow control starts, queues or refuses.

`exchange.Exchange` implements it for requests that the router forwards, `gateway.endpoint_pick.EndpointPick` for those
that a gateway forwards. Must not know: any implementation of it.
"""

from __future__ import annotations

from typing import Protocol

from argosy_protocol.errors import ApiError
from argosy_router.proxy.accounting.outcome import RequestOutcome


class PendingRequest(Protocol):
    """A decoded request that has not been sent. It also listens to its client (`ClientListener`)."""

    outcome: RequestOutcome

    def start(self) -> None:
        """Send the request, or have it sent.

        Raises:
            Unavailable, TooManyRequests: no replica can take it; nothing has happened.
        """
        ...

    def refuse(self, error: ApiError) -> None:
        """Answer the request with an error; it has then ended."""
        ...

    def on_client_lost(self) -> None: ...

    def on_client_paused(self) -> None: ...

    def on_client_resumed(self) -> None: ...
