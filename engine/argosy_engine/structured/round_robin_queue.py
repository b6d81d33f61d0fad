"""RoundRobinQueue: one queue per key, served round-robin. An item may be in the queues of several keys."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class RoundRobinQueue(Generic[T]):
    """Round-robin over keys, and first come, first served within a key."""

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

    def peek(self) -> tuple[str, T] | None:
        """Return what `pop` would return, without removing it."""
        if not self._queues:
            return None
        key, items = next(iter(self._queues.items()))
        return key, items[0]

    def pop(self) -> tuple[str, T] | None:
        """Remove the first item of the key whose turn it is; return (key, item), or None if the queue is empty."""
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
