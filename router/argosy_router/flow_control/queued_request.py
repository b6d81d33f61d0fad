"""A request in a queue.

Owns: the properties of a request that flow control uses. Must not know: why it is queued, who answers it.
"""

# Not compiled: interpreted classes derive from it.

from __future__ import annotations

from argosy_protocol.errors import ApiError
from argosy_router.auth.accounts import Account


class Entry:
    """The properties of a queued request that its position depends on."""

    __slots__ = ("account", "cost", "name", "priority", "sequences", "size")

    def __init__(
        self, account: Account, priority: int, cost: float, size: int, name: str = "", sequences: int = 1
    ) -> None:
        self.account = account
        self.priority = priority
        self.cost = cost
        """Tokens that the request is expected to cost the service."""
        self.size = size
        """Bytes that the request holds in memory."""
        self.name = name
        """Adapter, alias or side that only some replicas have; empty if any replica can answer."""
        self.sequences = sequences
        """Sequences that the request generates in parallel."""


class QueuedRequest(Entry):
    """An entry that is told its outcome: exactly one of `admit` and `refuse`."""

    __slots__ = ("next_since", "since")

    def __init__(
        self, account: Account, priority: int, cost: float, size: int, name: str = "", sequences: int = 1
    ) -> None:
        super().__init__(account, priority, cost, size, name, sequences)
        self.since = 0.0
        """Time at which the request was queued."""
        self.next_since = -1.0
        """Time at which its turn came first, without capacity for all of its sequences; negative before that."""

    def admit(self) -> None:
        """Send the request, within this call."""
        raise NotImplementedError

    def refuse(self, error: ApiError) -> None:
        """Answer the request with `error`."""
        raise NotImplementedError
