"""A request in a queue.

Owns: what flow control needs to know of a request. Must not know: why it is queued, who answers it.
"""

# Not compiled: interpreted classes derive from it.

from __future__ import annotations

from argosy_protocol.errors import ApiError
from argosy_router.auth.accounts import Account


class Entry:
    """A queued request, as far as its position depends on it."""

    __slots__ = ("account", "cost", "name", "priority", "sequences", "size")

    def __init__(
        self, account: Account, priority: int, cost: float, size: int, name: str = "", sequences: int = 1
    ) -> None:
        self.account = account
        self.priority = priority
        self.cost = cost
        """Tokens that the request is expected to take of the service."""
        self.size = size
        """Bytes that it holds."""
        self.name = name
        """Adapter or alias that only some replicas have; empty if any replica can answer."""
        self.sequences = sequences
        """Sequences that it generates side by side."""


class QueuedRequest(Entry):
    """An entry that is told its outcome: exactly one of `admit` and `refuse`."""

    __slots__ = ("next_since", "since")

    def __init__(
        self, account: Account, priority: int, cost: float, size: int, name: str = "", sequences: int = 1
    ) -> None:
        super().__init__(account, priority, cost, size, name, sequences)
        self.since = 0.0
        """When it was queued."""
        self.next_since = -1.0
        """When its turn came for the first time without capacity for all of its sequences; negative before that."""

    def admit(self) -> None:
        """Send the request, within this call."""
        raise NotImplementedError

    def refuse(self, error: ApiError) -> None:
        """Answer the request with `error`."""
        raise NotImplementedError
