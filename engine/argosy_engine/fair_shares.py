"""How tenants share what is bounded: turns in a queue (`RoundRobinQueue`, `UrgentFirst`), and amounts that they hold
(`TenantShares`).

A tenant is what routers name by `headers.TENANT`. The classes are not thread-safe.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")

SHARE_OF_FREE: Final = 3
"""A tenant may hold so many times as much as is free: three quarters if it is alone, so that others find room, and less
the more others hold. Clients without a named tenant are not told apart."""


class TenantShares:
    """Amounts of something bounded, such as bytes, that are held in all and by each tenant.

    Args:
        limit: on all amounts together.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._of_tenant: Counter[str] = Counter()

    def held_by(self, tenant: str) -> int:
        return self._of_tenant[tenant]

    def is_full(self, amount: int) -> bool:
        """Whether there is no room for a further amount, whoever wants it."""
        return self.total + amount > self.limit

    def exceeds_share(self, tenant: str, amount: int) -> bool:
        """Whether a tenant that holds something already would hold more than its share with a further amount."""
        own = self._of_tenant[tenant]
        return bool(tenant and own) and own + amount > SHARE_OF_FREE * (self.limit - self.total - amount)

    def takes(self, tenant: str, amount: int) -> bool:
        """Whether there is room for a further amount, in all and in a tenant's share.

        What comes first is taken, however large it is.
        """
        return not self.total or not (self.is_full(amount) or self.exceeds_share(tenant, amount))

    def add(self, tenant: str, amount: int) -> None:
        self.total += amount
        self._of_tenant[tenant] += amount

    def remove(self, tenant: str, amount: int) -> None:
        self.total -= amount
        self._of_tenant[tenant] -= amount
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]


class RoundRobinQueue(Generic[T]):
    """Round-robin over keys; first come, first served within a key. An item may be in the queues of several keys."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[T]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def count(self, key: str) -> int:
        """Return the number of items of a key."""
        return len(self._queues.get(key, ()))

    def push(self, key: str, item: T) -> None:
        self._queues.setdefault(key, deque()).append(item)
        self._size += 1

    def firsts(self) -> Iterator[tuple[str, T]]:
        """Yield the first item of each key, the key whose turn it is first."""
        for key, items in self._queues.items():
            yield key, items[0]

    def pop(self, key: str | None = None) -> tuple[str, T] | None:
        """Remove the first item of a key.

        Args:
            key: None: the one whose turn it is.

        Returns:
            The key and the item; None if the queue is empty.
        """
        if not self._queues:
            return None
        key = next(iter(self._queues)) if key is None else key
        items = self._queues[key]
        item = items.popleft()
        self._size -= 1
        if items:
            self._queues.move_to_end(key)
        else:
            del self._queues[key]
        return key, item

    def remove(self, key: str, item: T) -> None:
        """Remove an item from a key's queue.

        Raises:
            ValueError: the item is not in it.
        """
        items = self._queues.get(key, deque[T]())
        items.remove(item)
        self._size -= 1
        if not items:
            del self._queues[key]

    def clear(self) -> None:
        self._queues.clear()
        self._size = 0


class UrgentFirst(Generic[T]):
    """Items by urgency, the lowest number first; of equally urgent ones keys take turns."""

    def __init__(self) -> None:
        self._turns: dict[int, RoundRobinQueue[T]] = {}

    def firsts(self) -> Iterator[tuple[int, str, T]]:
        """Yield urgency, key and the first item of each, in the order of their turns."""
        for urgency in sorted(self._turns):
            for key, item in self._turns[urgency].firsts():
                yield urgency, key, item

    def count(self, key: str, urgency: int) -> int:
        """Return the number of a key's items that are as urgent or more."""
        return sum(queue.count(key) for each, queue in self._turns.items() if each <= urgency)

    def push(self, urgency: int, key: str, item: T) -> None:
        self._turns.setdefault(urgency, RoundRobinQueue()).push(key, item)

    def pop(self, urgency: int, key: str) -> None:
        """Remove the first item of a key, which has had its turn."""
        self._turns[urgency].pop(key)
        self._forget(urgency)

    def remove(self, urgency: int, key: str, item: T) -> None:
        """
        Raises:
            KeyError, ValueError: the item is not there.
        """
        self._turns[urgency].remove(key, item)
        self._forget(urgency)

    def clear(self) -> None:
        self._turns.clear()

    def _forget(self, urgency: int) -> None:
        if not self._turns[urgency]:
            del self._turns[urgency]
