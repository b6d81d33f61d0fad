"""A fair queue: the order of queued requests, by priority, and fairly among accounts of one priority.

Owns: the entries of one service's queue. Must not know: why they are queued, who answers them, time.
Invariants: an entry is in the queue from `push` until exactly one of `take`, `remove` and its eviction; entries and
their bytes stay within bounds; of two accounts that always have entries, neither gets ahead of the other by more than
its largest request and the other's, each over its weight.

Priorities are strict: a lower one goes first. Within one priority, start-time fair queueing (Goyal, Vin, Cheng 1996)
over accounts: each has a virtual start; the one that started first goes next and pays cost / weight of virtual time.
One that comes back starts at the virtual time of the one that went last, so idling earns nothing. An entry that is
removed without being sent costs its account nothing.

Some entries need a replica of a certain adapter, alias or side: their `name`. `next_named` is told for which names
there is capacity, and passes over entries of other names. An account whose entries are passed over does not catch up
later.

A full queue does not let one account keep the others out. A new entry may evict one of the least urgent priority in the
queue: the newest entry of the account that has the most entries for its weight there. If that priority is the new
entry's own, the account must be another one, with more entries for its weight than the new entry's account would have.
If the queue is out of bytes, not of entries, the same holds for the bytes of entries.

An account whose entries have `MAX_PRIORITIES` different priorities gets no further one: an entry goes to the next less
urgent one of its account's, or to the least urgent of them.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Collection
from heapq import heappop, heappush
from typing import Generic, TypeVar

from argosy_protocol.errors import ApiError
from argosy_router.auth.accounts import Account
from argosy_router.prefixes import MODEL_ITSELF, ServedName


class Entry:
    """The properties of a queued request that its position depends on."""

    def __init__(
        self,
        account: Account,
        priority: int,
        cost: float,
        size: int,
        name: ServedName = MODEL_ITSELF,
        sequences: int = 1,
    ) -> None:
        self.account = account
        self.priority = priority
        self.cost = cost
        """Tokens that the request is expected to cost the service."""
        self.size = size
        """Bytes that the request holds in memory."""
        self.name = name
        """Adapter, alias or side that only some replicas have; empty if any replica can answer."""
        self.sequences = sequences
        """Sequences that the request generates in parallel."""


class QueuedRequest(Entry):
    """An entry that is told its outcome: exactly one of `admit` and `refuse` is called."""

    def __init__(
        self,
        account: Account,
        priority: int,
        cost: float,
        size: int,
        name: ServedName,
        sequences: int,
        admit: Callable[[], None],
        refuse: Callable[[ApiError], None],
    ) -> None:
        """
        Args:
            admit: sends the request, within this call.
            refuse: answers the request with an error.
        """
        super().__init__(account, priority, cost, size, name, sequences)
        self.admit = admit
        self.refuse = refuse
        self.since = 0.0
        """Time at which the request was queued."""
        self.next_since = -1.0
        """Time at which its turn came first, without capacity for all of its sequences; negative before that."""


E = TypeVar("E", bound=Entry)


MAX_PRIORITIES = 64
"""Different priorities that one account's entries have at a time. Each look for the next entry goes through all that
there are, and a key may ask for as many as it has requests."""
MIN_FLOWS = 64
"""Accounts of one priority from which on those are forgotten that have no entries."""


class QueueFull(Exception):
    """The queue is full, and no entry may be evicted for the new one."""


class _Flow(Generic[E]):
    """The entries of one account and priority, oldest first."""

    def __init__(self, account: Account, number: int) -> None:
        self.account = account
        self.number = number
        self.entries: OrderedDict[E, None] = OrderedDict()
        self.bytes = 0
        self.start = 0.0
        self.is_listed = False

    def share(self) -> float:
        """Return the number of entries over the account's weight."""
        return len(self.entries) / self.account.weight

    def byte_share(self) -> float:
        """Return the bytes of the entries over the account's weight."""
        return self.bytes / self.account.weight

    def first(self, names: Collection[ServedName] | None) -> E | None:
        """Return the oldest entry with one of these names; None for `names` is any name."""
        if names is None:
            return next(iter(self.entries), None)
        return next((entry for entry in self.entries if entry.name in names), None)


class _Band(Generic[E]):
    """The flows of one priority."""

    def __init__(self) -> None:
        self.flows: dict[Account, _Flow[E]] = {}
        """Those with entries, and those that are ahead of the others: they still have to wait for their turn."""
        self.active: dict[_Flow[E], None] = {}
        """Those with entries."""
        self.count = 0
        self._num_made = 0
        self._prune_at = MIN_FLOWS
        self._order: list[tuple[float, int, _Flow[E]]] = []
        """Heap of flows by virtual start. A flow is in it at most once, perhaps with a start that has moved on or
        without entries."""
        self._virtual = 0.0

    def push(self, entry: E) -> None:
        flow = self.flows.get(entry.account)
        if flow is None:
            if len(self.flows) >= self._prune_at:
                self._prune()
            flow = self.flows[entry.account] = _Flow(entry.account, self._num_made)
            self._num_made += 1
        if not flow.entries:
            flow.start = max(flow.start, self._virtual)
            self.active[flow] = None
            self._list(flow)
        flow.entries[entry] = None
        flow.bytes += entry.size
        self.count += 1

    def next(self, names: Collection[ServedName] | None, may_go: Callable[[E], bool] | None) -> E | None:
        """Return the entry whose turn it is among those with these names, without taking it; None if there is none. An
        account whose next entry may not go is passed over."""
        passed_over: list[_Flow[E]] = []
        entry: E | None = None
        while entry is None and self._order:
            start, _, flow = heappop(self._order)
            flow.is_listed = False
            if not flow.entries:
                continue
            if start != flow.start:
                self._list(flow)
                continue
            entry = flow.first(names)
            if entry is not None and may_go is not None and not may_go(entry):
                entry = None
            passed_over.append(flow)
        for flow in passed_over:
            self._list(flow)
        return entry

    def take(self, entry: E) -> None:
        """Remove an entry because its turn has come: its account pays for it."""
        flow = self.flows[entry.account]
        self.remove(entry)
        self._virtual = max(self._virtual, flow.start)
        flow.start = self._virtual + entry.cost / flow.account.weight

    def remove(self, entry: E) -> None:
        flow = self.flows[entry.account]
        del flow.entries[entry]
        flow.bytes -= entry.size
        self.count -= 1
        if not flow.entries:
            del self.active[flow]

    def _prune(self) -> None:
        """Forget the accounts that come back like new ones."""
        self.flows = {
            account: flow
            for account, flow in self.flows.items()
            if flow.entries or flow.start > self._virtual
        }
        self._prune_at = max(MIN_FLOWS, 2 * len(self.flows))

    def _list(self, flow: _Flow[E]) -> None:
        if not flow.is_listed:
            flow.is_listed = True
            heappush(self._order, (flow.start, flow.number, flow))


class FairQueue(Generic[E]):
    """One service's queue."""

    def __init__(self) -> None:
        self._bands: dict[int, _Band[E]] = {}
        self._priorities: list[int] = []
        """Priorities with entries, most urgent first."""
        self._arrivals: OrderedDict[E, None] = OrderedDict()
        self._by_name: dict[ServedName, OrderedDict[E, None]] = {}
        """Entries by name, in the order of arrival."""
        self._by_account: dict[Account, int] = {}
        """Number of entries of each account."""
        self._priorities_of: dict[Account, dict[int, int]] = {}
        """The same by priority."""
        self.bytes = 0
        self.cost = 0.0
        """Cost of all entries together."""

    def __len__(self) -> int:
        return len(self._arrivals)

    @property
    def num_accounts(self) -> int:
        """The number of accounts that are remembered, by priority: with entries, or lately had some."""
        return sum(len(band.flows) for band in self._bands.values())

    @property
    def names(self) -> list[ServedName]:
        """The names of all entries."""
        return list(self._by_name)

    @property
    def oldest(self) -> E | None:
        """The entry that arrived first; None when empty."""
        return next(iter(self._arrivals), None)

    def oldest_of(self, name: ServedName) -> E | None:
        """Return the entry of this name that arrived first; None if there is none."""
        return next(iter(self._by_name.get(name, ())), None)

    def num_of(self, account: Account) -> int:
        """Return the number of an account's entries."""
        return self._by_account.get(account, 0)

    def push(self, entry: E, max_entries: int, max_bytes: int) -> E | None:
        """Add an entry. Returns the one that was evicted for it, if any.

        Raises:
            QueueFull: the queue is full, and no entry may be evicted.
        """
        evicted = None
        entry.priority = self._priority_of(entry)
        if len(self) >= max_entries or self.bytes + entry.size > max_bytes:
            evicted = self._victim(entry, max_bytes, is_out_of_entries=len(self) >= max_entries)
            if evicted is None:
                raise QueueFull
            self.remove(evicted)
        self._add(entry)
        return evicted

    def pop(self) -> E:
        """Take the entry whose turn it is. The queue must not be empty."""
        entry = self._next(None)
        assert entry is not None
        self.take(entry)
        return entry

    def pop_named(self, names: Collection[ServedName]) -> E | None:
        """Take the entry whose turn it is among those with one of `names`; None if there is none."""
        entry = self.next_named(names)
        if entry is not None:
            self.take(entry)
        return entry

    def next_named(
        self, names: Collection[ServedName], may_go: Callable[[E], bool] | None = None
    ) -> E | None:
        """Return the entry that `pop_named` would take if accounts whose next entry may not go had none."""
        return self._next(None if len(names) == len(self._by_name) else names, may_go)

    def take(self, entry: E) -> None:
        """Take the entry whose turn it is."""
        band = self._bands[entry.priority]
        band.take(entry)
        self._forget(entry, band)

    def _next(
        self, names: Collection[ServedName] | None, may_go: Callable[[E], bool] | None = None
    ) -> E | None:
        """Return the entry whose turn it is; None for `names` is any name."""
        for priority in self._priorities:
            entry = self._bands[priority].next(names, may_go)
            if entry is not None:
                return entry
        return None

    def remove(self, entry: E) -> None:
        """Take an entry out whose turn has not come."""
        band = self._bands[entry.priority]
        band.remove(entry)
        self._forget(entry, band)

    def _priority_of(self, entry: E) -> int:
        """Return the priority that an entry gets: what it asks for, unless its account has many others."""
        known = self._priorities_of.get(entry.account)
        if known is None or entry.priority in known or len(known) < MAX_PRIORITIES:
            return entry.priority
        return min([priority for priority in known if priority > entry.priority], default=max(known))

    def _add(self, entry: E) -> None:
        band = self._bands.get(entry.priority)
        if band is None:
            band = self._bands[entry.priority] = _Band()
            insort(self._priorities, entry.priority)
        band.push(entry)
        self._arrivals[entry] = None
        namesakes = self._by_name.get(entry.name)
        if namesakes is None:
            namesakes = self._by_name[entry.name] = OrderedDict()
        namesakes[entry] = None
        self._by_account[entry.account] = self.num_of(entry.account) + 1
        known = self._priorities_of.setdefault(entry.account, {})
        known[entry.priority] = known.get(entry.priority, 0) + 1
        self.bytes += entry.size
        self.cost += entry.cost

    def _forget(self, entry: E, band: _Band[E]) -> None:
        del self._arrivals[entry]
        namesakes = self._by_name[entry.name]
        del namesakes[entry]
        if not namesakes:
            del self._by_name[entry.name]
        left = self._by_account.pop(entry.account) - 1
        known = self._priorities_of[entry.account]
        known[entry.priority] -= 1
        if not known[entry.priority]:
            del known[entry.priority]
        if left:
            self._by_account[entry.account] = left
        else:
            del self._priorities_of[entry.account]
        self.bytes -= entry.size
        self.cost = self.cost - entry.cost if self._arrivals else 0.0
        if not band.count:
            del self._bands[entry.priority]
            self._priorities.remove(entry.priority)

    def _victim(self, newcomer: E, max_bytes: int, *, is_out_of_entries: bool) -> E | None:
        """Choose the entry to evict for `newcomer`, whose eviction frees enough bytes; None if none may be."""
        if not self._priorities or self._priorities[-1] < newcomer.priority:
            return None
        band = self._bands[self._priorities[-1]]
        share, more = (_Flow.share, 1) if is_out_of_entries else (_Flow.byte_share, newcomer.size)
        longest = max(band.active, key=share)
        if self._priorities[-1] == newcomer.priority:
            own = band.flows.get(newcomer.account)
            mine = (0.0 if own is None else share(own)) + more / newcomer.account.weight
            if longest is own or share(longest) <= mine:
                return None
        missing = self.bytes + newcomer.size - max_bytes
        if is_out_of_entries:
            newest = next(reversed(longest.entries))
            return newest if newest.size >= missing else None
        return next((entry for entry in reversed(longest.entries) if entry.size >= missing), None)
