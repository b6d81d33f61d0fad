"""A bound on the memory that request bodies take in all connections of a server together."""

from __future__ import annotations

from argosy_protocol.errors import Unavailable


class BodyRoom:
    """Counts the request body bytes that all connections of a server hold."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0

    def take(self, size: int) -> None:
        """Reserve `size` bytes.

        Raises:
            Unavailable: the limit would be exceeded; nothing was reserved.
        """
        if self.held + size > self._limit:
            raise Unavailable(
                "the router has reached its limit of memory for request bodies; retry later",
                retry_after_s=1.0,
            )
        self.held += size

    def give_back(self, size: int) -> None:
        self.held -= size
