"""The interface of routes that answer from the router's storage, as the application sees them.

Must not know: any implementation of it.
"""

from __future__ import annotations

from typing import Protocol

from argosy_router.auth.accounts import Account
from argosy_router.http.messages import Request
from argosy_router.http.server_interface import Client


class StoredRoutes(Protocol):
    """Answers requests for files and batches."""

    def on_head(self, request: Request, account: Account) -> bool:
        """Look at the head of a request for one of these routes; return whether its body will be used. May give the
        request a sink.

        Raises:
            ApiError: the request is refused before its body is read.
        """
        ...

    def on_request(self, client: Client, request: Request, account: Account, request_id: bytes) -> None:
        """Answer later: attach a listener to the client first.

        Raises:
            ApiError: the request is refused.
        """
        ...
