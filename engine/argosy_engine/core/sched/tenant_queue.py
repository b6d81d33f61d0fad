"""TenantQueue: priority queue of waiting requests with fair turns between tenants (virtual token counters).

Each tenant has a counter of the tokens that were computed for it. Among tenants whose first request has the same
priority, the one with the lowest counter goes next, so a tenant that queues many or long prompts delays its own
requests, not another tenant's. A tenant that comes back gets at least the counter at which the last request was
admitted, so that being idle earns nothing. Within a tenant the order is that of `RequestQueue`.

The router names tenants by their keys, and no client can choose its own; requests without one share a tenant, and with
one tenant alone this is a `RequestQueue` at the same cost. Source: Sheng et al., "Fairness in Serving Large Language
Models" (OSDI 2024).

Invariant: of two tenants that wait all the time at one priority, neither gets ahead by more than its largest request
and the other's.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from argosy_engine.core.request import Request
from argosy_engine.core.sched.request_queue import RequestQueue

MAX_IDLE_COUNTERS = 1024
"""Counters kept of tenants that do not wait; beyond it, those that no longer matter are dropped."""


class TenantQueue:
    """Waiting requests, grouped by tenant."""

    def __init__(self) -> None:
        self._tenants: dict[str, RequestQueue] = {}
        """The queues of the tenants that wait, never empty ones."""
        self._counters: dict[str, int] = {}
        self._last = 0
        """Counter of the tenant that was admitted last, before it was charged."""

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests in no particular order."""
        return chain.from_iterable(self._tenants.values())

    @property
    def num_counters(self) -> int:
        """Number of tenants whose counter is kept, those that do not wait included."""
        return len(self._counters)

    def push(self, request: Request) -> None:
        queue = self._tenants.get(request.tenant)
        if queue is None:
            self._counters[request.tenant] = max(self._last, self._counters.get(request.tenant, 0))
            queue = self._tenants[request.tenant] = RequestQueue()
        queue.push(request)

    def peek(self) -> Request | None:
        """Return the request to admit next without removing it, or None."""
        if len(self._tenants) <= 1:
            return next((queue.peek() for queue in self._tenants.values()), None)
        heads = [head for queue in self._tenants.values() if (head := queue.peek()) is not None]
        counters = self._counters
        return min(heads, key=lambda head: (head.queue_key[0], counters[head.tenant], head.queue_key))

    def remove(self, request: Request) -> None:
        """Remove a request. Raises KeyError if it is not in the queue."""
        queue = self._tenants[request.tenant]
        queue.remove(request)
        if not queue:
            del self._tenants[request.tenant]

    def admit(self, request: Request, num_tokens: int) -> None:
        """Charge the tenant of a request that is admitted for the tokens that its prompt needs computed."""
        self._last = max(self._last, self._counters.get(request.tenant, 0))
        self.charge(request.tenant, num_tokens)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Count tokens that were computed for a tenant."""
        counters = self._counters
        counters[tenant] = max(self._last, counters.get(tenant, 0)) + num_tokens
        if len(counters) > MAX_IDLE_COUNTERS + len(self._tenants):
            self._forget()

    def _forget(self) -> None:
        """Drop the counters of tenants that would start at `_last` anyway; if all are ahead of it, of all that do not
        wait."""
        waiting, last = self._tenants, self._last
        kept = {
            tenant: count for tenant, count in self._counters.items() if tenant in waiting or count > last
        }
        if len(kept) > MAX_IDLE_COUNTERS + len(waiting):
            kept = {tenant: count for tenant, count in kept.items() if tenant in waiting}
        self._counters = kept
