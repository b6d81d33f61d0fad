"""TenantQueue: priority queue of waiting requests with fair turns between tenants (virtual token counters).

Each tenant has a counter of the tokens that were computed for it. Among tenants whose first request has the same
priority, the one with the lowest counter goes next, so a tenant that queues many or long prompts delays its own
requests, not another tenant's. A tenant that starts to wait, or whose first request becomes more urgent, gets at least
the counter at which the last turn was taken, or the lowest of those that wait at its priority or a more urgent one if
that is lower, so that neither being idle nor waiting with what is not urgent earns anything. Within a tenant the order
is that of `RequestQueue`. A request that returns (preempted) keeps its place: it goes before all requests of its
priority that have not run yet, whatever its tenant has been charged meanwhile, and if it does not fit, they wait for
it.

Routers name tenants by their clients' keys; without a router, whoever calls the engine may name one. Requests without
a tenant share one, and with one tenant alone this is a `RequestQueue` at nearly the same cost. Calls of several
sequences share slots with one another without regard to tenants (`CallQueue`), but are charged. Source: Sheng et al.,
"Fairness in Serving Large Language Models" (OSDI 2024).

Invariant: of two tenants that wait all the time at one priority, neither gets ahead by more than its largest request
and the other's, and the output of its running requests, which is charged when they stop running.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import chain

from argosy_engine.core.request import Request
from argosy_engine.core.sched.request_queue import MIN_STALE, RequestQueue

MAX_IDLE_COUNTERS = 1024
"""Counters kept of tenants that do not wait; beyond it, those that no longer matter are dropped."""

_TenantRank = tuple[int, int, int, int]
"""Order among waiting tenants: priority of the first request, counter, turn and order of arrival of that request."""


class TenantQueue:
    """Waiting requests, grouped by tenant.

    Invariant: a waiting tenant's rank is in the heap, or the tenant is in `_changed`; a heap entry that differs from
    its tenant's rank is stale.
    """

    def __init__(self) -> None:
        self._returned = RequestQueue()
        """Requests that have run before."""
        self._tenants: dict[str, RequestQueue] = {}
        """The other requests of the tenants that wait, never empty queues."""
        self._num_new = 0
        """Number of requests in `_tenants`."""
        self._counters: dict[str, int] = {}
        self._last = 0
        """Highest counter of a tenant at its turn, before it was charged."""
        self._changed: set[str] = set()
        self._tenant_ranks: dict[str, _TenantRank] = {}
        self._tenant_ranking: list[tuple[_TenantRank, str]] = []

    def __len__(self) -> int:
        return self._num_new + len(self._returned)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests in no particular order."""
        return chain(self._returned, *self._tenants.values())

    @property
    def num_counters(self) -> int:
        """Number of tenants whose counter is kept, those that do not wait included."""
        return len(self._counters)

    def counter(self, tenant: str) -> int:
        """Return the tokens counted for a tenant, or what a tenant that is not known would start with."""
        return self._counters.get(tenant, self._last)

    def push(self, request: Request) -> None:
        if request.has_run:
            self._returned.push(request)
            return
        tenant, urgency = request.tenant, request.queue_key[0]
        queue = self._tenants.get(tenant)
        head = None if queue is None else queue.peek()
        if head is None or urgency < head.queue_key[0]:
            self._counters[tenant] = self._starting_counter(tenant, urgency)
        if queue is None:
            queue = self._tenants[tenant] = RequestQueue()
        queue.push(request)
        self._num_new += 1
        self._changed.add(tenant)

    def peek(self) -> Request | None:
        """Return the request to admit next without removing it, or None."""
        returned, new = self._returned.peek(), self._peek_new()
        if returned is None or new is None:
            return returned or new
        return new if new.queue_key[0] < returned.queue_key[0] else returned

    def remove(self, request: Request) -> None:
        """Remove a request. Raises KeyError if it is not in the queue."""
        if request in self._returned:
            self._returned.remove(request)
            return
        tenant = request.tenant
        queue = self._tenants[tenant]
        queue.remove(request)
        self._num_new -= 1
        if queue:
            self._changed.add(tenant)
        else:
            del self._tenants[tenant]
            self._changed.discard(tenant)
            self._tenant_ranks.pop(tenant, None)

    def admit(self, request: Request, num_tokens: int) -> None:
        """Charge the tenant of a request that is admitted for the tokens that its prompt needs computed."""
        tenant = request.tenant
        if not request.call_id:
            self._last = max(self._last, self._counters.get(tenant, 0))
        elif tenant not in self._tenants:  # it did not come to the front by its turn
            self._counters[tenant] = self._starting_counter(tenant, request.queue_key[0])
        self.charge(tenant, num_tokens)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Count tokens that were computed for a tenant."""
        counters = self._counters
        counters[tenant] = counters.get(tenant, self._last) + num_tokens
        if tenant in self._tenants:
            self._changed.add(tenant)
        if len(counters) > MAX_IDLE_COUNTERS + len(self._tenants):
            self._forget()

    def restore_counters(self, previous: TenantQueue) -> None:
        """Take over the counters of a queue that this one replaces, and whose requests have been pushed again."""
        self._last = previous._last
        self._counters = {
            **previous._counters,
            **{tenant: previous.counter(tenant) for tenant in self._tenants},
        }
        self._changed.update(self._tenants)

    def _starting_counter(self, tenant: str, urgency: int) -> int:
        """Return the counter of a tenant that starts to wait at priority `urgency`."""
        own = self._counters.get(tenant, 0)
        if own >= self._last:
            return own
        return max(own, self._floor(urgency))

    def _floor(self, urgency: int) -> int:
        """Return the lowest counter of those that wait with this priority or a more urgent one, at most `_last`.

        A less urgent tenant may have waited for so long that its counter says nothing about their turns.
        """
        lowest = self._last
        for tenant, queue in self._tenants.items():
            head = queue.peek()
            if head is not None and head.queue_key[0] <= urgency:
                lowest = min(lowest, self._counters[tenant])
        return lowest

    def _peek_new(self) -> Request | None:
        """Return the request that has not run yet and goes next, or None."""
        if len(self._tenants) <= 1:
            return next((queue.peek() for queue in self._tenants.values()), None)
        for tenant in self._changed:
            self._update_rank(tenant)
        self._changed.clear()
        ranking, ranks = self._tenant_ranking, self._tenant_ranks
        while ranking:
            rank, tenant = ranking[0]
            if ranks.get(tenant) == rank:
                return self._tenants[tenant].peek()
            heapq.heappop(ranking)
        return None

    def _update_rank(self, tenant: str) -> None:
        head = self._tenants[tenant].peek()
        assert head is not None, "a tenant that waits has a request"
        urgency, turn, arrival = head.queue_key
        rank = urgency, self._counters[tenant], turn, arrival
        if rank == self._tenant_ranks.get(tenant):
            return
        self._tenant_ranks[tenant] = rank
        heapq.heappush(self._tenant_ranking, (rank, tenant))
        if len(self._tenant_ranking) > 2 * len(self._tenant_ranks) + MIN_STALE:
            self._tenant_ranking = [(rank, tenant) for tenant, rank in self._tenant_ranks.items()]
            heapq.heapify(self._tenant_ranking)

    def _forget(self) -> None:
        """Drop idle tenants' counters: those below any at which a tenant may start, then the lower half of the rest."""
        waiting = self._tenants
        floor = min((self._counters[tenant] for tenant in waiting), default=self._last)
        floor = min(floor, self._last)
        idle = {tenant: n for tenant, n in self._counters.items() if tenant not in waiting and n > floor}
        if len(idle) > MAX_IDLE_COUNTERS // 2:
            by_debt = sorted(idle, key=idle.__getitem__)
            idle = {tenant: idle[tenant] for tenant in by_debt[len(by_debt) // 2 :]}
        self._counters = {tenant: self._counters[tenant] for tenant in waiting} | idle
