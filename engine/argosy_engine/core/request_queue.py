"""RequestQueue: requests that wait to be admitted, most urgent first; TurnClock: the turns of a batch's prompts.

A heap over `Request.queue_key` = (priority, turn, order of arrival) with lazy deletion: push, pop and removal from the
middle are O(log n) amortised, so thousands of waiting requests cost a step nothing. First come, first served is the
case where all priorities are equal and every call has one prompt. A request that comes back (preempted, or no longer
blocked) has kept its key and thereby its place.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from argosy_engine.core.request import Request

MIN_STALE = 64
"""Stale heap entries tolerated before their number is compared with the live ones."""


class TurnClock:
    """Start-time fair queueing between the prompts of a batch and everybody else (Goyal et al., 1996).

    The clock counts prompt tokens. A request's turn is the time of its arrival, and for a prompt of a batch that plus
    the tokens of the batch up to it. Admitting a request moves the clock: to the turn of a batch's prompt, or on by the
    tokens of any other. So whoever arrives goes ahead of the prompts of a batch that are still to come, and the batch
    gets half of the work at least: neither waits for all of the other. Without batches, turns are in order of arrival.
    """

    def __init__(self) -> None:
        self._now = 0

    def turn(self, request: Request) -> int:
        """For a request that arrives now."""
        return self._now + request.batch_offset

    def admit(self, request: Request) -> None:
        """The request's turn has come, for the first time."""
        if request.batch_offset:
            self._now = max(self._now, request.queue_key[1])
        else:
            self._now += request.num_prompt_tokens


class RequestQueue:
    """Invariant: every member's key is in the heap; a heap entry whose key has no member is stale."""

    def __init__(self) -> None:
        self._members: dict[tuple[int, int, int], Request] = {}
        self._heap: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        return iter(self._members.values())

    def push(self, request: Request) -> None:
        self._members[request.queue_key] = request
        heapq.heappush(self._heap, request.queue_key)

    def peek(self) -> Request | None:
        """The most urgent request."""
        heap, members = self._heap, self._members
        while heap:
            request = members.get(heap[0])
            if request is not None:
                return request
            heapq.heappop(heap)
        return None

    def remove(self, request: Request) -> None:
        """Raises KeyError when the request does not wait here."""
        del self._members[request.queue_key]
        if len(self._heap) > 2 * len(self._members) + MIN_STALE:
            self._heap = list(self._members)
            heapq.heapify(self._heap)
