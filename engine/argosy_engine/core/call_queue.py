"""CallQueue: waiting requests, and who gets a seat (a place among the running ones) where calls have many sequences.

A call's sequences are its prompts times their choices. A sequence keeps its seat until it ends, so one call could hold
all of them for as long as its outputs take. Calls of several sequences share by max-min fairness instead:

- Of these calls, the one with the fewest seats gets the next one.
- Between them and requests that are alone in their call, turns decide (`TurnClock`) while calls of several sequences
  hold less than half of the seats; beyond that they take only what nobody else waits for.
- Where no seat is free, the newest sequence of the call with the most gives its own up (`displacement`): to another
  call if that leaves it with no fewer seats than the other then has, to a request that is alone while such calls hold
  more than half. It waits as a preempted request does, and finds what it had in the prefix cache.

Every seat that is given up brings the calls closer to equal shares and none is taken back for it, so there are no more
of them than requests that arrive. Without calls of several sequences this is a `RequestQueue` and costs no more.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import chain

from argosy_engine.core.request import Request
from argosy_engine.core.request_queue import MIN_STALE, RequestQueue

_Rank = tuple[int, int, int, int]
"""Of a call that waits: urgency, seats that it holds, turn and order of arrival of its next sequence."""


class CallQueue(RequestQueue):
    """Invariant: the rank of every call that waits is in the heap; an entry that differs from its call's is stale."""

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__()
        self._half = max(1, max_num_seqs // 2)
        self._seats: dict[str, dict[str, Request]] = {}
        """Call -> its running sequences."""
        self._num_seats = 0
        """Of all these calls."""
        self._queues: dict[str, RequestQueue] = {}
        """Call -> its waiting sequences."""
        self._num_queued = 0
        self._ranks: dict[str, _Rank] = {}
        self._ranking: list[tuple[_Rank, str]] = []

    def __len__(self) -> int:
        return super().__len__() + self._num_queued

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        return chain(super().__iter__(), *self._queues.values())

    def push(self, request: Request) -> None:
        call_id = request.call_id
        if not call_id:
            super().push(request)
            return
        self._queues.setdefault(call_id, RequestQueue()).push(request)
        self._num_queued += 1
        self._rank(call_id)

    def remove(self, request: Request) -> None:
        """Raises KeyError when the request does not wait here."""
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
        """Who gets the next free seat."""
        single = super().peek()
        if not self._queues:
            return single
        sequence = self._peek_sequence()
        if single is None or sequence is None:
            return single or sequence
        if self._num_seats >= self._half and single.queue_key[0] == sequence.queue_key[0]:
            return single
        return min(single, sequence, key=lambda request: request.queue_key)

    def displacement(self) -> tuple[Request, Request] | None:
        """While no seat is free: who is to get one, and the running sequence that gives it up."""
        if not self._num_seats:
            return None
        single = super().peek()
        if single is not None and self._num_seats > self._half:
            victim = self._newest_of_greediest(2, single)
            if victim is not None:
                return single, victim
        sequence = self._peek_sequence()
        if sequence is None:
            return None
        num_held = len(self._seats.get(sequence.call_id, ()))
        victim = self._newest_of_greediest(num_held + 2, sequence)
        return None if victim is None else (sequence, victim)

    def take_seat(self, request: Request) -> None:
        """A sequence of a call, which waits no longer, runs."""
        self._seats.setdefault(request.call_id, {})[request.request_id] = request
        self._num_seats += 1
        self._rank(request.call_id)

    def leave_seat(self, request: Request) -> None:
        """A sequence of a call does not run, or no longer."""
        seats = self._seats.get(request.call_id)
        if seats is None or seats.pop(request.request_id, None) is None:
            return
        self._num_seats -= 1
        if not seats:
            del self._seats[request.call_id]
        self._rank(request.call_id)

    def check(self, running: Iterable[Request]) -> None:
        """Asserts that these are the requests with seats; for tests and the idle engine."""
        expected = {request.request_id for request in running if request.call_id}
        assert {request_id for seats in self._seats.values() for request_id in seats} == expected
        assert len(expected) == self._num_seats
        assert sum(len(queue) for queue in self._queues.values()) == self._num_queued
        assert self._ranks.keys() == self._queues.keys()

    def _peek_sequence(self) -> Request | None:
        """The next sequence of the call that goes first."""
        ranking, ranks = self._ranking, self._ranks
        while ranking:
            rank, call_id = ranking[0]
            if ranks.get(call_id) == rank:
                return self._queues[call_id].peek()
            heapq.heappop(ranking)
        return None

    def _newest_of_greediest(self, min_seats: int, instead_of: Request) -> Request | None:
        """Of the calls with at least so many seats that are not more urgent."""
        urgency = instead_of.queue_key[0]
        greediest: dict[str, Request] = {}
        for seats in self._seats.values():
            if len(seats) < min_seats or len(seats) <= len(greediest):
                continue
            if next(iter(seats.values())).queue_key[0] >= urgency:
                greediest = seats
        return max(greediest.values(), key=lambda request: request.queue_key, default=None)

    def _rank(self, call_id: str) -> None:
        """The call's seats or its next sequence may have changed."""
        queue = self._queues.get(call_id)
        head = None if queue is None else queue.peek()
        if head is None:
            self._ranks.pop(call_id, None)
        else:
            urgency, turn, arrival = head.queue_key
            rank = urgency, len(self._seats.get(call_id, ())), turn, arrival
            if rank != self._ranks.get(call_id):
                self._ranks[call_id] = rank
                heapq.heappush(self._ranking, (rank, call_id))
        if len(self._ranking) > 2 * len(self._ranks) + MIN_STALE:
            self._ranking = [(rank, call_id) for call_id, rank in self._ranks.items()]
            heapq.heapify(self._ranking)
