"""Flow control of all services: admits a request at once, queues it, or refuses it.

Owns: one queue per service, when queues are looked at, and the queues' metrics.
Must not know: the bytes of requests and answers, rate limits, how a replica is chosen.
Invariants: queues are ticked as long as a request is queued, so no request is queued longer than allowed; a key's
queued requests leave connections to other keys.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator

from argosy_protocol.errors import TooManyRequests, Unavailable
from argosy_router.auth.accounts import ANONYMOUS, Account
from argosy_router.config import FlowControlLimits
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.service import Service
from argosy_router.flow_control.queued_request import QueuedRequest
from argosy_router.flow_control.service_queue import Bounds, ServiceQueue
from argosy_router.http.deadlines import Deadline, TimerWheel
from argosy_router.metrics.definitions import ADMITTED_REQUESTS, QUEUE_SECONDS, QUEUED_REQUESTS
from argosy_router.metrics.series import Labels, Series

SHARE_OF_FREE = 3
"""Queued requests that a key may have for each connection that is free, over all services: alone it can take three
quarters of the connection limit, and several together leave some as well."""
TICK_S = 0.1
"""How soon a new replica, or capacity that other routers freed, is noticed."""


TOLD_PER_TURN = 64
"""Requests that are admitted or refused in one turn of the event loop, of all services: sending one takes some 0.2 ms,
and a key may have thousands held for a replica that comes."""


class FlowController:
    """Flow control of one router, shared by all requests."""

    def __init__(
        self,
        fleet: Fleet,
        wheel: TimerWheel,
        limits: FlowControlLimits,
        free_connections: Callable[[], int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            free_connections: returns how many more clients may connect.
            now: the clock of requests.
        """
        self._fleet = fleet
        self._free_connections = free_connections
        self._limits = limits
        self._queues: dict[Service, ServiceQueue] = {}
        self._deadline = Deadline(wheel, self._tick)
        self._is_tick_near = False
        self._is_first: Service | None = None
        """The service that the next tick begins with, because there was no time for it."""
        self._now = now
        self._waits = QUEUE_SECONDS.histogram()
        self._started = self._now()
        self.hold_revision = 0
        """Incremented whenever a service begins to hold requests for want of a replica."""
        self._held = asyncio.Event()

    # metrics

    def series(self) -> tuple[Series, ...]:
        """Return the metrics of the queues."""
        return QUEUED_REQUESTS.reading(self._queued), ADMITTED_REQUESTS.reading(self._admitted), self._waits

    @property
    def num_admitted(self) -> int:
        """Requests of all services that were admitted and have not ended."""
        return sum(queue.active for queue in self._queues.values())

    def _queued(self) -> Iterator[tuple[Labels, float]]:
        for service in list(self._fleet.services.values()):
            queue = self._queues.get(service)
            yield (service.spec.model,), queue.num_queued if queue is not None else 0

    def _admitted(self) -> Iterator[tuple[Labels, float]]:
        for service in list(self._fleet.services.values()):
            queue = self._queues.get(service)
            yield (service.spec.model,), queue.active if queue is not None else 0

    # what the operator scales by

    def queue_of(self, service: Service) -> ServiceQueue | None:
        """The queue of a service; None if it has had no request yet."""
        return self._queues.get(service)

    def idle_s(self, service: Service, now: float) -> float:
        """Seconds that a service has been without any request."""
        queue = self._queues.get(service)
        return now - self._started if queue is None else queue.idle_s(now)

    async def wait_for_hold(self, after: int, timeout_s: float) -> None:
        """Wait until `hold_revision` differs from `after`, at most `timeout_s`."""
        if self.hold_revision != after:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._held.wait()
        except TimeoutError:
            pass

    def _note_hold(self) -> None:
        self.hold_revision += 1
        self._held.set()
        self._held = asyncio.Event()

    # a request's way

    def try_admit(
        self,
        service: Service,
        now: float,
        name: str = "",
        sequences: int = 1,
        account: Account | None = None,
    ) -> bool:
        """Admit a request at once if there is capacity and its turn has come; otherwise `enqueue` it.

        Args:
            name: what only some replicas serve, as `Prompt.name`; empty for any replica.
        """
        queue = self._queues.get(service) or self._add_queue(service, now)
        return queue.try_admit(now, name, sequences, account)

    def retract(self, service: Service, now: float, sequences: int = 1) -> None:
        """Take back the admission of a request that could not be sent."""
        self._queues[service].retract(now, sequences)

    def enqueue(self, service: Service, request: QueuedRequest, now: float) -> None:
        """Queue a request that was not admitted.

        Raises:
            Unavailable: the service has no replica, and requests are not held until there is one.
            TooManyRequests: the queue is full, or the account's queued requests hold too many connections.
        """
        self._check_share(request.account)
        queue = self._queues[service]
        was_held = queue.num_held
        may_go = queue.enqueue(request, now)
        if queue.num_held and not was_held:
            self._note_hold()
        if not self._deadline.is_set:
            self._deadline.set(TICK_S)
        if may_go:
            self._tick_soon()

    def _check_share(self, account: Account) -> None:
        """Raise TooManyRequests if one more queued request of a key would leave too few connections to other keys."""
        queued = sum(queue.num_queued_of(account) for queue in self._queues.values())
        if account is not ANONYMOUS and queued > SHARE_OF_FREE * self._free_connections():
            raise TooManyRequests(
                f"API key {account.name!r} has {queued} requests in queues, and few connections are free",
                retry_after_s=1.0,
            )

    def remove(self, service: Service, request: QueuedRequest, now: float) -> None:
        """Take a queued request out because its client left."""
        self._queues[service].remove(request, now)

    def observe_wait(self, service: Service, outcome: str, seconds: float) -> None:
        """Count a request that has left the queue after so many seconds."""
        self._waits.observe((service.spec.model, outcome), seconds)

    def ended(self, service: Service, now: float, sequences: int = 1) -> None:
        """Note the end of an admitted request."""
        queue = self._queues[service]
        queue.ended(now, sequences)
        if queue.num_queued:
            self._tick_soon()

    def has_capacity(self, service: Service, now: float, name: str = "", sequences: int = 1) -> bool:
        """Whether a service that has admitted requests could take one more at once, and no request is queued for it."""
        try:
            return not self._queues[service].num_queued and service.candidates.can_take(now, name, sequences)
        except Unavailable:
            return False

    def background_room(self, service: Service, now: float, running: int, share: float) -> int:
        """How many more requests that nobody waits for a service has room for.

        Args:
            running: how many of these are in flight already.
            share: part of what the replicas can take that these may have, from 0 to 1.
        """
        queue = self._queues.get(service)
        try:
            free = service.candidates.free_sequences(now)
        except Unavailable:
            return 0
        if queue is not None and queue.num_queued:
            return 0
        sequences = 0 if queue is None else queue.sequences
        return max(0, min(free, math.ceil(share * (sequences + free)) - running))

    # queues

    def _add_queue(self, service: Service, now: float) -> ServiceQueue:
        for gone in set(self._queues).difference(self._fleet.services.values()):
            if not self._queues[gone].active and not self._queues[gone].num_queued:
                del self._queues[gone]
        queue = self._queues[service] = ServiceQueue(
            service.spec.model,
            service.candidates.free_sequences,
            lambda: self._bounds(service),
            now,
            service.candidates.can_take,
        )
        return queue

    def _bounds(self, service: Service) -> Bounds:
        own, limits = service.spec.limits, self._limits
        return Bounds(
            own.max_queued_requests or limits.max_queued_requests,
            limits.max_queued_bytes,
            own.queue_timeout_s or limits.queue_timeout_s,
            own.hold_timeout_s or limits.hold_timeout_s,
            service.spec.cold_start_s,
        )

    def _tick_soon(self) -> None:
        """Tick in a turn of its own: the caller may be in the middle of something."""
        if not self._is_tick_near:
            self._is_tick_near = True
            asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        self._is_tick_near = False
        now = self._now()
        busy = [(service, queue) for service, queue in self._queues.items() if queue.num_queued]
        if busy and not self._deadline.is_set:
            self._deadline.set(TICK_S)
        first, self._is_first = self._is_first, None
        at = next((at for at, (service, _) in enumerate(busy) if service is first), 0)
        left = TOLD_PER_TURN
        for service, queue in busy[at:] + busy[:at]:
            if left <= 0:
                self._is_first = service
                break
            num_held = queue.num_held
            left -= queue.tick(now, left)
            if num_held:
                service.demand.held_until = now
            elif queue.num_held:
                self._note_hold()
        if left <= 0:
            self._tick_soon()
