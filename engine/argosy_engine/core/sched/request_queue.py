"""RequestQueue: priority queue of waiting requests. TurnClock: fair turns between a batch's prompts and other calls.

The queue is a heap over `Request.queue_key` = (priority, turn, order of arrival) with lazy deletion: push, peek and
removal from the middle are O(log n) amortised, so thousands of waiting requests do not slow a step down. With equal
priorities and one prompt per call the order is first come, first served. A request that returns to the queue
(preempted, or no longer blocked) keeps its key and so its place.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from argosy_engine.core.request import Request

MIN_STALE = 64
"""Stale heap entries tolerated before their number is compared with the live ones."""


class TurnClock:
    """Start-time fair queueing between the prompts of a batch and all other requests (Goyal et al., 1996).

    The clock is virtual time in prompt tokens. A request's turn is the time of its arrival, plus, for a prompt of a
    batch, the batch's tokens up to the end of this prompt. Admitting a prompt of a batch sets the clock to its turn;
    admitting any other request advances the clock by its prompt tokens. A new request therefore goes ahead of a batch's
    later prompts, and the batch still gets at least half of the work, so neither waits for all of the other. Without
    batches, turns follow the order of arrival.
    """

    def __init__(self) -> None:
        self._now = 0

    def turn(self, request: Request) -> int:
        """Return the turn of a request that arrives now."""
        return self._now + request.batch_offset

    def admit(self, request: Request) -> None:
        """Advance the clock for a request that is admitted for the first time."""
        if request.batch_offset:
            self._now = max(self._now, request.queue_key[1])
        else:
            self._now += request.num_prompt_tokens


class RequestQueue:
    """Queue of waiting requests, lowest `queue_key` first.

    Invariant: every member's key is in the heap; a heap entry whose key has no member is stale.
    """

    def __init__(self) -> None:
        self._members: dict[tuple[int, int, int], Request] = {}
        self._heap: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and self._members.get(request.queue_key) is request

    @property
    def num_entries(self) -> int:
        """Number of heap entries, stale ones included."""
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests in no particular order."""
        return iter(self._members.values())

    def push(self, request: Request) -> None:
        self._members[request.queue_key] = request
        heapq.heappush(self._heap, request.queue_key)

    def peek(self) -> Request | None:
        """Return the request to admit next without removing it, or None."""
        heap, members = self._heap, self._members
        while heap:
            request = members.get(heap[0])
            if request is not None:
                return request
            heapq.heappop(heap)
        return None

    def remove(self, request: Request) -> None:
        """Remove a request. Raises KeyError if it is not in the queue."""
        del self._members[request.queue_key]
        if len(self._heap) > 2 * len(self._members) + MIN_STALE:
            self._heap = list(self._members)
            heapq.heapify(self._heap)
