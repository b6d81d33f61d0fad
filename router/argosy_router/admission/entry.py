"""A request that waits.

Owns: what the queue and the lane see of it. Must not know: why it waits, who answers it.
"""

from __future__ import annotations

from argosy_protocol.errors import ApiError
from argosy_router.admission.accounts import Account


class Entry:
    """As far as its turn goes."""

    __slots__ = ("account", "cost", "name", "priority", "sequences", "size")

    def __init__(
        self, account: Account, priority: int, cost: float, size: int, name: str = "", sequences: int = 1
    ) -> None:
        self.account = account
        self.priority = priority
        self.cost = cost
        """What it takes of the service, in tokens."""
        self.size = size
        """Bytes it holds."""
        self.name = name
        """Adapter or alias that only some replicas have; empty where any replica can answer."""
        self.sequences = sequences
        """Seats that it takes: one for each sequence it generates."""


class Waiter(Entry):
    """An entry that hears what becomes of it."""

    __slots__ = ("next_since", "since")

    def __init__(
        self, account: Account, priority: int, cost: float, size: int, name: str = "", sequences: int = 1
    ) -> None:
        super().__init__(account, priority, cost, size, name, sequences)
        self.since = 0.0
        """When it began to wait."""
        self.next_since = -1.0
        """When it was first found to be the next one, with too little room for all of its sequences; negative before
        that."""

    def admit(self) -> None:
        """It is sent, within this call."""
        raise NotImplementedError

    def refuse(self, error: ApiError) -> None:
        """It is answered with `error`."""
        raise NotImplementedError
