"""FairQueue: items in a queue per key, taken in turns. An item may stand in the queues of several keys."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """First come, first served within a key; keys take turns, however many items each of them has."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[T]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def count(self, key: str) -> int:
        """Items of one key."""
        return len(self._queues.get(key, ()))

    def push(self, key: str, item: T) -> None:
        self._queues.setdefault(key, deque()).append(item)
        self._size += 1

    def pop(self) -> tuple[str, T] | None:
        """The key whose turn it is, and its first item; None when empty."""
        if not self._queues:
            return None
        key, items = next(iter(self._queues.items()))
        item = items.popleft()
        self._size -= 1
        if items:
            self._queues.move_to_end(key)
        else:
            del self._queues[key]
        return key, item

    def remove(self, key: str, item: T) -> None:
        """
        Raises:
            ValueError: it is not in the queue.
        """
        items = self._queues.get(key, deque[T]())
        items.remove(item)
        self._size -= 1
        if not items:
            del self._queues[key]

    def clear(self) -> None:
        self._queues.clear()
        self._size = 0
