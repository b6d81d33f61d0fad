"""A bound on the memory of request bodies, over all connections of a server."""

# Not compiled: two additions for each body.

from __future__ import annotations

from argosy_protocol.errors import Unavailable


class BodyMemory:
    """Counts the request body bytes that all connections of a server hold, up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0
        """Bytes reserved and not released."""

    def reserve(self, size: int) -> None:
        """Reserve `size` bytes.

        Raises:
            Unavailable: the limit would be exceeded; nothing was reserved.
        """
        if self.held + size > self._limit:
            raise Unavailable(
                "the limit of memory for request bodies (--max-inflight-bytes) is reached; retry later",
                retry_after_s=1.0,
            )
        self.held += size

    def release(self, size: int) -> None:
        self.held -= size
