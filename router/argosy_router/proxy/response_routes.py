"""The interface of the routes below /v1/responses of a router that stores responses, as the application sees them.

Must not know: any implementation of it.
"""

from __future__ import annotations

from typing import Protocol

from argosy_router.auth.accounts import Account
from argosy_router.http.messages import Request
from argosy_router.http.server_interface import Client


class ResponseRoutes(Protocol):
    """Answers requests for responses."""

    def is_body_used(self, request: Request) -> bool:
        """Whether the body of a request will be used, by its head."""
        ...

    def on_request(self, client: Client, request: Request, account: Account, request_id: bytes) -> None:
        """Answer now, or later: attach a listener to the client first.

        Raises:
            ApiError: the request is refused.
        """
        ...
