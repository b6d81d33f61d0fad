"""A bound on the memory of request bodies, over all connections of a server, and on an account's part of it.

Stored conversations that requests continue count like bodies, and so do the bodies of requests that outlive their
connections, and what clients have not read of their responses.

An account may hold three times as much as is free (Choudhury and Hahne, "Dynamic queue length thresholds"): alone at
most three quarters of the limit, so that others always find room, and less the more others hold. A single body is not
bound by it, because the limit may be small.
"""

# Not compiled: a few additions for each body.

from __future__ import annotations

from argosy_protocol.errors import Unavailable

SHARE_OF_FREE = 3


class BodyMemory:
    """Counts the request body bytes that all connections of a server hold, up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0
        """Bytes reserved and not released."""
        self._of_account: dict[object, int] = {}
        """Those of each account."""

    def reserve(self, size: int, account: object, begun: int) -> None:
        """Reserve `size` bytes.

        Args:
            account: whose share it counts for; None for a client that cannot be told from others.
            begun: bytes of the same body that are reserved already.

        Raises:
            Unavailable: the limit or the account's share of it would be exceeded; nothing was reserved.
        """
        held = self.held + size
        if held > self._limit:
            raise Unavailable(
                "the limit of memory for request bodies (--max-inflight-bytes) is reached; retry later",
                retry_after_s=1.0,
            )
        if account is not None:
            own = self._of_account.get(account, 0)
            if own > begun and own + size > SHARE_OF_FREE * (self._limit - held):
                raise Unavailable(
                    "other requests of this key hold its share of the memory for request bodies "
                    "(--max-inflight-bytes); retry later",
                    retry_after_s=1.0,
                )
            self._of_account[account] = own + size
        self.held = held

    def release(self, size: int, account: object) -> None:
        self.held -= size
        if account is not None and size:
            own = self._of_account[account] - size
            if own:
                self._of_account[account] = own
            else:
                del self._of_account[account]


class BodyReservation:
    """Memory of one request beside its body as received, such as the conversation that it continues. Whoever has it
    releases it once."""

    def __init__(self, memory: BodyMemory, account: object, body_bytes: int) -> None:
        """Reserve nothing yet.

        Args:
            account: as for `BodyMemory.reserve`.
            body_bytes: bytes of the request's body that are reserved already.
        """
        self._memory = memory
        self._account = account
        self._body_bytes = body_bytes
        self.size = 0
        """Bytes reserved."""

    def grow(self, size: int) -> None:
        """Reserve `size` more bytes.

        Raises:
            Unavailable: see `BodyMemory.reserve`.
        """
        self._memory.reserve(size, self._account, self._body_bytes + self.size)
        self.size += size

    def shrink(self, size: int) -> None:
        """Release what is beyond `size` bytes, if anything is."""
        if size < self.size:
            self._memory.release(self.size - size, self._account)
            self.size = size

    def release(self) -> None:
        """Release everything; nothing if that has happened."""
        size, self.size = self.size, 0
        self._memory.release(size, self._account)
