"""The order in which waiting requests go: by priority, and fairly among accounts of one priority.

Owns: the entries of one service's queue. Must not know: why they wait, who answers them, time.
Invariants: an entry is in the queue from `push` until exactly one of `pop`, `remove` and being pushed out; entries and
their bytes stay within bounds; of two accounts that wait all the time, neither gets ahead of the other by more than
its largest request and the other's, each over its weight.

Priorities are strict: a lower one goes first. Within one priority, start-time fair queueing (Goyal, Vin, Cheng 1996)
over accounts: each has a virtual start; the one that started first goes next and pays cost / weight of virtual time.
One that comes back starts at the virtual time of the one that went last, so idling earns nothing. What leaves without
having been sent costs its account nothing.

A full queue does not let one account keep the others out: a newcomer takes the place of the newest entry of the account
that has most entries for its weight, unless that is its own, or of anybody less urgent.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from heapq import heappop, heappush
from typing import Generic, TypeVar

from argosy_router.admission.accounts import Account
from argosy_router.admission.entry import Entry

E = TypeVar("E", bound=Entry)


class QueueFull(Exception):
    """No room, and nobody who would have to make some."""


class _Flow(Generic[E]):
    """The entries of one account and priority, oldest first."""

    __slots__ = ("account", "entries", "is_listed", "number", "start")

    def __init__(self, account: Account, number: int) -> None:
        self.account = account
        self.number = number
        self.entries: OrderedDict[E, None] = OrderedDict()
        self.start = 0.0
        self.is_listed = False

    def share(self, more: int = 0) -> float:
        """Entries for its weight, with so many more."""
        return (len(self.entries) + more) / self.account.weight


class _Band(Generic[E]):
    """The flows of one priority."""

    __slots__ = ("_order", "_virtual", "count", "flows")

    def __init__(self) -> None:
        self.flows: dict[Account, _Flow[E]] = {}
        self.count = 0
        self._order: list[tuple[float, int, _Flow[E]]] = []
        """Heap of flows by virtual start. A flow is in it at most once, perhaps with a start that has moved on or
        without entries."""
        self._virtual = 0.0

    def push(self, entry: E) -> None:
        flow = self.flows.get(entry.account)
        if flow is None:
            flow = self.flows[entry.account] = _Flow(entry.account, len(self.flows))
        if not flow.entries:
            flow.start = max(flow.start, self._virtual)
            self._list(flow)
        flow.entries[entry] = None
        self.count += 1

    def pop(self) -> E:
        """The band must not be empty."""
        while True:
            start, _, flow = heappop(self._order)
            flow.is_listed = False
            if not flow.entries:
                continue
            if start == flow.start:
                break
            self._list(flow)
        entry, _ = flow.entries.popitem(last=False)
        self.count -= 1
        self._virtual = start
        flow.start += entry.cost / flow.account.weight
        if flow.entries:
            self._list(flow)
        return entry

    def remove(self, entry: E) -> None:
        del self.flows[entry.account].entries[entry]
        self.count -= 1

    def _list(self, flow: _Flow[E]) -> None:
        if not flow.is_listed:
            flow.is_listed = True
            heappush(self._order, (flow.start, flow.number, flow))


class FairQueue(Generic[E]):
    """One service's queue."""

    def __init__(self) -> None:
        self._bands: dict[int, _Band[E]] = {}
        self._priorities: list[int] = []
        """Those with entries, most urgent first."""
        self._arrivals: OrderedDict[E, None] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._arrivals)

    @property
    def oldest(self) -> E | None:
        """By arrival, or None when empty."""
        return next(iter(self._arrivals), None)

    def push(self, entry: E, max_entries: int, max_bytes: int) -> E | None:
        """Adds an entry. Returns the one that had to make room for it, which is out.

        Raises:
            QueueFull: there is no room, and everybody in the queue has more right to it.
        """
        out = None
        if len(self) >= max_entries or self.bytes + entry.size > max_bytes:
            out = self._victim(entry)
            if out is None or self.bytes - out.size + entry.size > max_bytes:
                raise QueueFull
            self.remove(out)
        self._add(entry)
        return out

    def pop(self) -> E:
        """Takes the entry whose turn it is. The queue must not be empty."""
        band = self._bands[self._priorities[0]]
        entry = band.pop()
        self._forget(entry, band)
        return entry

    def remove(self, entry: E) -> None:
        """Takes out an entry that waits."""
        band = self._bands[entry.priority]
        band.remove(entry)
        self._forget(entry, band)

    def _add(self, entry: E) -> None:
        band = self._bands.get(entry.priority)
        if band is None:
            band = self._bands[entry.priority] = _Band()
            insort(self._priorities, entry.priority)
        band.push(entry)
        self._arrivals[entry] = None
        self.bytes += entry.size

    def _forget(self, entry: E, band: _Band[E]) -> None:
        del self._arrivals[entry]
        self.bytes -= entry.size
        if not band.count:
            del self._bands[entry.priority]
            self._priorities.remove(entry.priority)

    def _victim(self, newcomer: E) -> E | None:
        """Who makes room for `newcomer`."""
        if not self._priorities or self._priorities[-1] < newcomer.priority:
            return None
        band = self._bands[self._priorities[-1]]
        longest = max(band.flows.values(), key=_Flow.share)
        if self._priorities[-1] == newcomer.priority:
            own = band.flows.get(newcomer.account)
            mine = own.share(1) if own is not None else 1.0 / newcomer.account.weight
            if longest is own or longest.share() <= mine:
                return None
        return next(reversed(longest.entries))
