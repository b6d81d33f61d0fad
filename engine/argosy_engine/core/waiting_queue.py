"""WaitingQueue: the requests that wait for admission, and which of them goes next.

Every request gets a key when it arrives, `Request.queue_key` = (priority, turn, order of arrival), and keeps it and so
its place when it returns (preempted, or no longer blocked). Those that wait are in three parts, each with its order:

    requests that have run before   (priority, turn, arrival)
    other requests, by tenant       (priority, tokens counted for the tenant, turn, arrival) of the tenant's first one
    sequences, by call of several   (priority, slots that the call holds, turn, arrival) of the call's first one

Of requests, one that has run goes before those of its priority that have not, whatever its tenant has been charged
meanwhile, and if it does not fit, they wait for it. Between a request and a sequence their keys decide while calls of
several hold less than half of the slots; above half a sequence waits for every request of its priority. With equal
priorities, one prompt per call and one tenant the order is first come, first served, at the cost of one heap.

Turns let the prompts of a batch alternate with other calls by start-time fair queueing (Goyal et al., 1996). The clock
is virtual time in prompt tokens. A request's turn is the time of its arrival, plus, for a prompt of a batch, the
batch's tokens up to the end of this prompt. Admitting a prompt of a batch sets the clock to its turn; admitting any
other request advances the clock by its prompt tokens. A new request therefore goes ahead of a batch's later prompts,
and the batch still gets at least half of the work, so neither waits for all of the other.

Tenants take turns by virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): one
that queues many or long prompts delays its own requests, not another tenant's. A tenant that starts to wait, or whose
first request becomes more urgent, gets at least the counter at which the last turn was taken, or the lowest of those
that wait at its priority or a more urgent one if that is lower, so that neither being idle nor waiting with what is not
urgent earns anything. Routers name tenants by their clients' keys; without a router, whoever calls the engine may name
one. Requests without a tenant share one. Invariant: of two tenants that wait all the time at one priority, neither gets
ahead by more than its largest request and the other's, and the output of its running requests, which is charged when
they stop running.

A call's sequences are its prompts times the choices of each. A sequence keeps its slot until it ends, so without a
limit one call could hold all slots for as long as its outputs take. Calls of several sequences therefore share the
slots by max-min fairness, without regard to tenants, which are charged: the call with the fewest slots gets the next
one. When no slot is free, the newest sequence of the call with the most slots is preempted (`displacement`): in favour
of another call if its own call then still has at least as many slots as the other, or in favour of a single request if
calls of several sequences hold more than half of the slots. It finds its computed tokens in the prefix cache. Each
displacement brings the calls closer to equal shares and is never reversed, so there are no more displacements than
arriving requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Generic, TypeVar

from argosy_engine.core.request import Request

MIN_STALE = 64
"""Stale heap entries tolerated before their number is compared with the live ones."""
MAX_IDLE_COUNTERS = 1024
"""Counters kept of tenants that do not wait; beyond it, those that no longer matter are dropped."""

Item = TypeVar("Item", Request, str)
Key = tuple[int, ...]


class LazyHeap(Generic[Item]):
    """Items, lowest key first, with lazy deletion: setting a key, removal and the first item are O(log n) amortised, so
    thousands of waiting requests do not slow a step down.

    Invariant: every item's key is in the heap; an entry that is no item's key is stale. Keys are distinct. The heap has
    keys alone, so that what was removed is not kept.
    """

    def __init__(self) -> None:
        self._keys: dict[Item, Key] = {}
        self._items: dict[Key, Item] = {}
        self._heap: list[Key] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, item: Item) -> bool:
        return item in self._keys

    def __iter__(self) -> Iterator[Item]:
        """Iterate over the items in no particular order."""
        return iter(self._keys)

    @property
    def num_entries(self) -> int:
        """Number of heap entries, stale ones included."""
        return len(self._heap)

    def set(self, item: Item, key: Key) -> None:
        """Add an item, or change its key."""
        before = self._keys.get(item)
        if before != key:
            if before is not None:
                del self._items[before]
            self._keys[item], self._items[key] = key, item
            heapq.heappush(self._heap, key)
            self._compact()

    def remove(self, item: Item) -> None:
        """Remove an item. Raises KeyError if it is not there."""
        del self._items[self._keys.pop(item)]
        self._compact()

    def first(self) -> Item | None:
        """Return the item with the lowest key, or None."""
        heap, items = self._heap, self._items
        while heap:
            item = items.get(heap[0])
            if item is not None:
                return item
            heapq.heappop(heap)
        return None

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._keys) + MIN_STALE:
            self._heap = list(self._items)
            heapq.heapify(self._heap)


class _Groups:
    """Waiting requests by group: a tenant or a call.

    Args:
        rank: order of a group whose first request is given; `changed` says that it may have changed otherwise.

    Invariant: a group that waits has requests; its rank is in `_ranks`, or it is in `_changed`.
    """

    def __init__(self, rank: Callable[[str, Request], Key]) -> None:
        self.num_requests = 0
        self._rank = rank
        self._queues: dict[str, LazyHeap[Request]] = {}
        self._ranks = LazyHeap[str]()
        self._changed: set[str] = set()

    def __len__(self) -> int:
        """Number of groups that wait."""
        return len(self._queues)

    def __contains__(self, group: str) -> bool:
        return group in self._queues

    def __iter__(self) -> Iterator[str]:
        return iter(self._queues)

    def requests(self) -> Iterator[Request]:
        return chain.from_iterable(self._queues.values())

    def push(self, group: str, request: Request) -> None:
        queue = self._queues.get(group)
        if queue is None:
            queue = self._queues[group] = LazyHeap()
        queue.set(request, request.queue_key)
        self.num_requests += 1
        self._changed.add(group)

    def remove(self, group: str, request: Request) -> None:
        """Remove a request. Raises KeyError if it does not wait in this group."""
        queue = self._queues[group]
        queue.remove(request)
        self.num_requests -= 1
        self._changed.add(group)
        if not queue:
            del self._queues[group]
            self._changed.discard(group)
            if group in self._ranks:
                self._ranks.remove(group)

    def changed(self, group: str) -> None:
        """Note that a group's rank may have changed, if it waits."""
        if group in self._queues:
            self._changed.add(group)

    def head(self, group: str) -> Request | None:
        """Return the first request of a group, or None if it does not wait."""
        queue = self._queues.get(group)
        return None if queue is None else queue.first()

    def first(self) -> Request | None:
        """Return the first request of the group with the lowest rank, or None."""
        if len(self._queues) <= 1:
            return next((queue.first() for queue in self._queues.values()), None)
        for group in self._changed:
            head = self._queues[group].first()
            assert head is not None, "a group that waits has a request"
            self._ranks.set(group, self._rank(group, head))
        self._changed.clear()
        lowest = self._ranks.first()
        return None if lowest is None else self._queues[lowest].first()

    def check(self) -> None:
        assert sum(len(queue) for queue in self._queues.values()) == self.num_requests
        assert all(self._queues.values())
        assert self._queues.keys() == {*self._ranks, *self._changed}


class WaitingQueue:
    """Waiting requests, the slots of calls of several sequences, and what was computed for each tenant.

    Args:
        max_num_seqs: number of slots.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._half = max(1, max_num_seqs // 2)
        self._num_arrivals = 0
        self._clock = 0
        """Virtual time, in prompt tokens."""
        self._returned = LazyHeap[Request]()
        """Requests that have run before."""
        self._tenants = _Groups(self._tenant_rank)
        self._calls = _Groups(self._call_rank)
        self._counters: dict[str, int] = {}
        """Tokens that were computed for each tenant."""
        self._last = 0
        """Highest counter of a tenant at its turn, before it was charged."""
        self._slots: dict[str, dict[str, Request]] = {}
        """Call id -> running sequences by request id."""
        self._num_slots = 0
        """Number of slots that all these calls hold."""

    def __len__(self) -> int:
        return len(self._returned) + self._tenants.num_requests + self._calls.num_requests

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the waiting requests in no particular order."""
        return chain(self._returned, self._tenants.requests(), self._calls.requests())

    def set_key(self, request: Request, priority: int) -> None:
        """Set the key of a request that arrives now."""
        request.queue_key = (priority, self._clock + request.batch_offset, self._num_arrivals)
        self._num_arrivals += 1

    def push(self, request: Request) -> None:
        if request.call_id:
            self._calls.push(request.call_id, request)
        elif request.has_run:
            self._returned.set(request, request.queue_key)
        else:
            tenant, urgency = request.tenant, request.queue_key[0]
            head = self._tenants.head(tenant)
            if head is None or urgency < head.queue_key[0]:
                self._counters[tenant] = self._starting_counter(tenant, urgency)
            self._tenants.push(tenant, request)

    def remove(self, request: Request) -> None:
        """Remove a request. Raises KeyError if it is not in the queue."""
        if request.call_id:
            self._calls.remove(request.call_id, request)
        elif request in self._returned:
            self._returned.remove(request)
        else:
            self._tenants.remove(request.tenant, request)

    def peek(self) -> Request | None:
        """Return the request that gets the next free slot without removing it, or None."""
        single, sequence = self._first_single(), self._calls.first()
        if single is None or sequence is None:
            return single or sequence
        if self._num_slots >= self._half and single.queue_key[0] == sequence.queue_key[0]:
            return single
        return min(single, sequence, key=lambda request: request.queue_key)

    def _first_single(self) -> Request | None:
        """Return the next request that is the only sequence of its call, or None."""
        returned, new = self._returned.first(), self._tenants.first()
        if returned is None or new is None:
            return returned or new
        return new if new.queue_key[0] < returned.queue_key[0] else returned

    def admit(self, request: Request, num_tokens: int) -> None:
        """Advance the clock and charge the tenant for a request that is admitted for the first time.

        Args:
            num_tokens: those of its prompt that have to be computed.
        """
        if request.batch_offset:
            self._clock = max(self._clock, request.queue_key[1])
        else:
            self._clock += request.num_prompt_tokens
        tenant = request.tenant
        if not request.call_id:
            self._last = max(self._last, self._counters.get(tenant, 0))
        elif tenant not in self._tenants:  # it did not come to the front by its turn
            self._counters[tenant] = self._starting_counter(tenant, request.queue_key[0])
        self.charge(tenant, num_tokens)

    def restore(self, previous: WaitingQueue) -> None:
        """Take over clock and counters of a queue that this one replaces, and whose requests have been pushed again."""
        self._clock, self._num_arrivals, self._last = previous._clock, previous._num_arrivals, previous._last
        self._counters = previous._counters | {tenant: previous.counter(tenant) for tenant in self._tenants}
        for tenant in self._tenants:
            self._tenants.changed(tenant)

    def check(self, running: Iterable[Request]) -> None:
        """Assert the invariants, and that exactly the given requests hold slots; for tests and the idle engine."""
        expected = {request.request_id for request in running if request.call_id}
        assert {request_id for slots in self._slots.values() for request_id in slots} == expected
        assert len(expected) == self._num_slots
        self._tenants.check()
        self._calls.check()

    # Tenants

    @property
    def num_counters(self) -> int:
        """Number of tenants whose counter is kept, those that do not wait included."""
        return len(self._counters)

    def counter(self, tenant: str) -> int:
        """Return the tokens counted for a tenant, or what a tenant that is not known would start with."""
        return self._counters.get(tenant, self._last)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Count tokens that were computed for a tenant."""
        self._counters[tenant] = self.counter(tenant) + num_tokens
        self._tenants.changed(tenant)
        if len(self._counters) > MAX_IDLE_COUNTERS + len(self._tenants):
            self._forget()

    def _tenant_rank(self, tenant: str, head: Request) -> Key:
        priority, turn, arrival = head.queue_key
        return priority, self._counters[tenant], turn, arrival

    def _starting_counter(self, tenant: str, urgency: int) -> int:
        """Return the counter of a tenant that starts to wait at priority `urgency`."""
        own = self._counters.get(tenant, 0)
        if own >= self._last:
            return own
        # A less urgent tenant may have waited for so long that its counter says nothing about their turns.
        floor = self._last
        for other in self._tenants:
            head = self._tenants.head(other)
            if head is not None and head.queue_key[0] <= urgency:
                floor = min(floor, self._counters[other])
        return max(own, floor)

    def _forget(self) -> None:
        """Drop idle tenants' counters: those below any at which a tenant may start, then the lower half of the rest."""
        waiting = self._tenants
        floor = min([self._last, *(self._counters[tenant] for tenant in waiting)])
        idle = {tenant: n for tenant, n in self._counters.items() if tenant not in waiting and n > floor}
        if len(idle) > MAX_IDLE_COUNTERS // 2:
            by_debt = sorted(idle, key=idle.__getitem__)
            idle = {tenant: idle[tenant] for tenant in by_debt[len(by_debt) // 2 :]}
        self._counters = {tenant: self._counters[tenant] for tenant in waiting} | idle

    # Slots of calls of several sequences

    @property
    def num_yielding(self) -> int:
        """Running and waiting sequences of calls with several, which yield slots to other calls."""
        return self._num_slots + self._calls.num_requests

    def take_slot(self, request: Request) -> None:
        """Count the slot of a sequence that starts to run; it has been removed from the queue."""
        if request.call_id:
            self._slots.setdefault(request.call_id, {})[request.request_id] = request
            self._num_slots += 1
            self._calls.changed(request.call_id)

    def release_slot(self, request: Request) -> None:
        """Release the slot of a sequence. Does nothing if it holds none."""
        slots = self._slots.get(request.call_id)
        if slots is None or slots.pop(request.request_id, None) is None:
            return
        self._num_slots -= 1
        if not slots:
            del self._slots[request.call_id]
        self._calls.changed(request.call_id)

    def displacement(self) -> tuple[Request, Request] | None:
        """Return the waiting request that is entitled to a slot and the running sequence to preempt for it, or None.

        To be called when no slot is free.
        """
        if not self._num_slots:
            return None
        single = self._first_single()
        if single is not None and self._num_slots > self._half:
            victim = self._newest_sequence_of_largest_call(2, single)
            if victim is not None:
                return single, victim
        sequence = self._calls.first()
        if sequence is None:
            return None
        num_held = len(self._slots.get(sequence.call_id, ()))
        victim = self._newest_sequence_of_largest_call(num_held + 2, sequence)
        return None if victim is None else (sequence, victim)

    def _call_rank(self, call_id: str, head: Request) -> Key:
        priority, turn, arrival = head.queue_key
        return priority, len(self._slots.get(call_id, ())), turn, arrival

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
