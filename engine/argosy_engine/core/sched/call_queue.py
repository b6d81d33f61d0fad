"""CallQueue: the waiting queue, with a fair share of the running slots between calls of several sequences.

A call's sequences are its prompts times the choices of each. A sequence keeps its slot until it ends, so without a
limit one call could hold all slots for as long as its outputs take. Calls of several sequences therefore share the
slots by max-min fairness:

- Among these calls, the one with the fewest slots gets the next slot.
- While these calls hold less than half of the slots, turns (`TurnClock`) decide between them and requests that are the
  only sequence of their call. Above half, they get a slot only if no single request of the same priority waits.
- When no slot is free, the newest sequence of the call with the most slots is preempted (`displacement`): in favour of
  another call if its own call then still has at least as many slots as the other, or in favour of a single request if
  calls of several sequences hold more than half of the slots. It waits like any preempted request and finds its
  computed tokens in the prefix cache.

Each displacement brings the calls closer to equal shares and is never reversed, so there are no more displacements than
arriving requests. Without calls of several sequences this is a `TenantQueue` at the same cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import chain

from argosy_engine.core.request import Request
from argosy_engine.core.sched.request_queue import MIN_STALE, RequestQueue
from argosy_engine.core.sched.tenant_queue import TenantQueue

_Rank = tuple[int, int, int, int]
"""Order among waiting calls: priority, slots held, turn and order of arrival of the call's next sequence."""


class CallQueue(TenantQueue):
    """Waiting queue that also counts the slots of each call of several sequences.

    Invariant: the rank of every waiting call is in the heap; a heap entry that differs from its call's rank is stale.
    """

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__()
        self._half = max(1, max_num_seqs // 2)
        self._slots: dict[str, dict[str, Request]] = {}
        """Call id -> running sequences by request id."""
        self._num_slots = 0
        """Number of slots that all these calls hold."""
        self._queues: dict[str, RequestQueue] = {}
        """Call id -> waiting sequences."""
        self._num_queued = 0
        self._ranks: dict[str, _Rank] = {}
        self._ranking: list[tuple[_Rank, str]] = []

    def __len__(self) -> int:
        return super().__len__() + self._num_queued

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the waiting requests in no particular order."""
        return chain(super().__iter__(), *self._queues.values())

    @property
    def num_yielding(self) -> int:
        """Running and waiting sequences of calls with several, which yield slots to other calls."""
        return self._num_slots + self._num_queued

    def push(self, request: Request) -> None:
        call_id = request.call_id
        if not call_id:
            super().push(request)
            return
        self._queues.setdefault(call_id, RequestQueue()).push(request)
        self._num_queued += 1
        self._rank(call_id)

    def remove(self, request: Request) -> None:
        """Remove a request. Raises KeyError if it is not in the queue."""
        call_id = request.call_id
        if not call_id:
            super().remove(request)
            return
        queue = self._queues[call_id]
        queue.remove(request)
        self._num_queued -= 1
        if not queue:
            del self._queues[call_id]
        self._rank(call_id)

    def peek(self) -> Request | None:
        """Return the request that gets the next free slot without removing it, or None."""
        single = super().peek()
        if not self._queues:
            return single
        sequence = self._peek_sequence()
        if single is None or sequence is None:
            return single or sequence
        if self._num_slots >= self._half and single.queue_key[0] == sequence.queue_key[0]:
            return single
        return min(single, sequence, key=lambda request: request.queue_key)

    def displacement(self) -> tuple[Request, Request] | None:
        """Return the waiting request that is entitled to a slot and the running sequence to preempt for it, or None.

        To be called when no slot is free.
        """
        if not self._num_slots:
            return None
        single = super().peek()
        if single is not None and self._num_slots > self._half:
            victim = self._newest_sequence_of_largest_call(2, single)
            if victim is not None:
                return single, victim
        sequence = self._peek_sequence()
        if sequence is None:
            return None
        num_held = len(self._slots.get(sequence.call_id, ()))
        victim = self._newest_sequence_of_largest_call(num_held + 2, sequence)
        return None if victim is None else (sequence, victim)

    def take_slot(self, request: Request) -> None:
        """Count the slot of a sequence that starts to run; it has been removed from the queue."""
        self._slots.setdefault(request.call_id, {})[request.request_id] = request
        self._num_slots += 1
        self._rank(request.call_id)

    def release_slot(self, request: Request) -> None:
        """Release the slot of a sequence. Does nothing if it holds none."""
        slots = self._slots.get(request.call_id)
        if slots is None or slots.pop(request.request_id, None) is None:
            return
        self._num_slots -= 1
        if not slots:
            del self._slots[request.call_id]
        self._rank(request.call_id)

    def check(self, running: Iterable[Request]) -> None:
        """Assert that exactly the given requests hold slots; for tests and the idle engine."""
        expected = {request.request_id for request in running if request.call_id}
        assert {request_id for slots in self._slots.values() for request_id in slots} == expected
        assert len(expected) == self._num_slots
        assert sum(len(queue) for queue in self._queues.values()) == self._num_queued
        assert self._ranks.keys() == self._queues.keys()

    def _peek_sequence(self) -> Request | None:
        """Return the next sequence of the call with the lowest rank, or None."""
        ranking, ranks = self._ranking, self._ranks
        while ranking:
            rank, call_id = ranking[0]
            if ranks.get(call_id) == rank:
                return self._queues[call_id].peek()
            heapq.heappop(ranking)
        return None

    def _newest_sequence_of_largest_call(self, min_slots: int, instead_of: Request) -> Request | None:
        """Return the newest running sequence of the call with the most slots, or None.

        Only calls with at least `min_slots` slots and no higher priority than `instead_of` are considered.
        """
        urgency = instead_of.queue_key[0]
        largest: dict[str, Request] = {}
        for slots in self._slots.values():
            if len(slots) < min_slots or len(slots) <= len(largest):
                continue
            if next(iter(slots.values())).queue_key[0] >= urgency:
                largest = slots
        return max(largest.values(), key=lambda request: request.queue_key, default=None)

    def _rank(self, call_id: str) -> None:
        """Update the rank of a call whose slots or next sequence may have changed."""
        queue = self._queues.get(call_id)
        head = None if queue is None else queue.peek()
        if head is None:
            self._ranks.pop(call_id, None)
        else:
            urgency, turn, arrival = head.queue_key
            rank = urgency, len(self._slots.get(call_id, ())), turn, arrival
            if rank != self._ranks.get(call_id):
                self._ranks[call_id] = rank
                heapq.heappush(self._ranking, (rank, call_id))
        if len(self._ranking) > 2 * len(self._ranks) + MIN_STALE:
            self._ranking = [(rank, call_id) for call_id, rank in self._ranks.items()]
            heapq.heapify(self._ranking)
