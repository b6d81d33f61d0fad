"""A request that waits.

Owns: what the queue and the lane see of it. Must not know: why it waits, who answers it.
"""

from __future__ import annotations

from argosy_engine.protocol.errors import ApiError
from argosy_router.admission.accounts import Account


class Entry:
    """As far as its turn goes."""

    __slots__ = ("account", "cost", "name", "priority", "size")

    def __init__(self, account: Account, priority: int, cost: float, size: int, name: str = "") -> None:
        self.account = account
        self.priority = priority
        self.cost = cost
        """What it takes of the service, in tokens."""
        self.size = size
        """Bytes it holds."""
        self.name = name
        """Adapter or alias that only some replicas have; empty where any replica can answer."""


class Waiter(Entry):
    """An entry that hears what becomes of it."""

    __slots__ = ("since",)

    def __init__(self, account: Account, priority: int, cost: float, size: int, name: str = "") -> None:
        super().__init__(account, priority, cost, size, name)
        self.since = 0.0
        """When it began to wait."""

    def admit(self) -> None:
        """It is sent, within this call."""
        raise NotImplementedError

    def refuse(self, error: ApiError) -> None:
        """It is answered with `error`."""
        raise NotImplementedError
