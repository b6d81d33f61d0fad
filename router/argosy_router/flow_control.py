"""Flow control in front of the services: admit a request now, queue it, or refuse it.

Owns: the queue of each service, when queues are looked at, how many sequences of admitted requests have not ended, when
a queued request is refused, and the queues' metrics. The order of a queue is `fair_queue`.
Must not know: keys and rate limits, the bytes of requests and answers, how a replica is chosen.
Invariants: a queued request is told exactly one thing, `admit` or `refuse`, unless it is removed first, and then
nothing; no request is admitted past those in the queue that could go. Queues are ticked as long as a request is queued,
and one that was queued longer than allowed is refused at the next tick, or a few later if requests are queued for more
than `NAMES_PER_TICK` names. A key's queued requests leave connections to other keys.

A service admits as many requests as its replicas have capacity for together. The policy chooses a replica when a
request is admitted, not when it arrives. The capacity is looked up again only when the last figure is older than
`CAPACITY_MAX_AGE_S` or used up, so that while a service has free capacity an admission costs two comparisons.

Capacity is counted in sequences, because sequences fill an engine: a request with 128 choices takes 128 times the
capacity of one. If the next request needs more capacity than is free, the requests behind it wait, so that small
requests cannot keep it out for ever; after `HOLD_BACK_S` it is admitted to the capacity that is free. The time in which
requests wait for large calls is limited for all accounts together: once it is used up, an account whose next request
does not fit is passed over. So large calls that are short, and therefore cheap in the fair queue, cannot keep all
others waiting, however many accounts send them. Large calls that run do not keep other accounts out either: the
capacity for an account counts them in part only, as `capacity` says.

Requests for an adapter, for an alias that not all replicas have, or for one side of a canary rollout count the capacity
of the replicas that can answer them. They wait in the same queue; those for which there is capacity overtake those for
which there is none.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from argosy_protocol.errors import ApiError, TooManyRequests, Unavailable
from argosy_router.auth.accounts import ANONYMOUS, Account
from argosy_router.config import FlowControlLimits
from argosy_router.fair_queue import FairQueue, QueuedRequest, QueueFull
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.service import Service
from argosy_router.http.deadlines import Deadline, TimerWheel
from argosy_router.metric_series import Labels, Series
from argosy_router.metrics import ADMITTED_REQUESTS, QUEUE_SECONDS, QUEUED_REQUESTS
from argosy_router.prefixes import MODEL_ITSELF, ServedName

CAPACITY_MAX_AGE_S: Final = 0.25
"""Lifetime of a looked-up capacity: meanwhile other routers may fill the same replicas."""
HOLD_BACK_S: Final = 2.0
"""A delay that an interactive client bears. Other routers fill the same replicas, so the capacity for a large request
may never be free at once; the requests behind it should not wait longer for that. Admitted to less than it needs, it
waits inside the engine, which gives others their slots."""
HOLD_BACK_SHARE: Final = 0.1
"""Share of the time in which requests wait for large calls, beyond the first `HOLD_BACK_S`."""
DRAIN_WINDOW_S: Final = 10.0
_NO_BOUND: Final = 1 << 30
NAMES_PER_TICK: Final = 128
"""Names that a tick looks at: clients may ask for thousands of adapters, and a name takes 0.3 ms among a thousand
replicas that have changed. Half of the candidates that are kept (`fleet.candidates`)."""
MAX_RETRY_AFTER_S: Final = 60.0
"""OpenAI's SDKs ignore a longer hint."""


class Bounds(NamedTuple):
    """How many requests may be queued for one service, and how long."""

    max_entries: int
    max_bytes: int
    queue_timeout_s: float
    """While the service has replicas."""
    hold_timeout_s: float
    """While it has none."""
    cold_start_s: float = 0.0
    """How long a first replica is expected to take, for the hint to clients whose hold ended; 0 if that is unknown."""


class DrainRate:
    """Requests that end per second, averaged over about `DRAIN_WINDOW_S`."""

    def __init__(self, now: float) -> None:
        self._born = self._time = now
        self._sum = 0.0

    def ended(self, now: float) -> None:
        """Count a request that has ended."""
        self._sum = self._decayed(now) + 1.0
        self._time = now

    def retry_after_s(self, ahead: int, now: float) -> float:
        """Predict when `ahead` requests will have ended at this rate, within what clients heed."""
        seen_s = DRAIN_WINDOW_S * -math.expm1((self._born - now) / DRAIN_WINDOW_S)
        ended = self._decayed(now)
        predicted = ahead * seen_s / ended if ended > 0.0 else 1.0
        return min(MAX_RETRY_AFTER_S, max(1.0, predicted))

    def _decayed(self, now: float) -> float:
        return self._sum * math.exp((self._time - now) / DRAIN_WINDOW_S)


class _Availability:
    """Whether some replica can answer requests for a name."""

    def __init__(self, now: float) -> None:
        self.is_unavailable = False
        self.reason = ""
        """The message of the last lookup that found no replica."""
        self.model = ""
        """The model's name in it."""
        self.changed = now
        """When the name last got its first replica or lost its last one."""


class _HoldBackTime:
    """How long requests may still wait for others' large calls."""

    def __init__(self, now: float) -> None:
        self._left_s = HOLD_BACK_S
        self._time = now

    def left_s(self, now: float) -> float:
        self._left_s = min(HOLD_BACK_S, self._left_s + HOLD_BACK_SHARE * (now - self._time))
        self._time = now
        return self._left_s

    def spend(self, seconds: float, now: float) -> None:
        """Note that requests have waited for so long until now."""
        self._left_s = self.left_s(now) - seconds


class ServiceQueue:
    """Flow control of one service. Times are a monotonic clock's, passed in."""

    def __init__(
        self,
        model: str,
        capacity: Callable[[float, ServedName, Account | None], int],
        bounds: Callable[[], Bounds],
        now: float,
        fits: Callable[[float, ServedName, int, Account | None], bool] | None = None,
    ) -> None:
        """
        Args:
            capacity: `capacity(now, name, account)` returns how many more sequences for a name the replicas can run
                now, or raises Unavailable if none of them can answer it. For an account, other accounts' large calls
                may count in part; without one they count in full.
            fits: `fits(now, name, sequences, account)` returns whether the replicas can run one request with several
                sequences now, or raises likewise; by default the sequences are compared with the capacity.
        """
        self._model = model
        self._capacity = capacity
        self._fits = fits or (lambda now, name, sequences, account: capacity(now, name, account) >= sequences)
        self._bounds = bounds
        self._queue: FairQueue[QueuedRequest] = FairQueue()
        self._drain = DrainRate(now)
        self.active = 0
        """Admitted requests that have not ended."""
        self.sequences = 0
        """Sequences of the admitted requests."""
        self._idle_since = now
        """When a request last ended or left."""
        self._allowed = 0
        """Bound of `sequences` by the last lookup of the capacity."""
        self._fresh_until = now
        """When that lookup is out of date."""
        self._allowed_name = MODEL_ITSELF
        """The name that the lookup was for."""
        self._is_holding_back = False
        """Whether the next request waits for more capacity and all others wait behind it."""
        self._held_back_since = now
        """When they were last found waiting for it."""
        self._hold_back_time = _HoldBackTime(now)
        self._first_name = 0
        """Where the names of the next tick begin among those that are queued for."""
        self._availability = {MODEL_ITSELF: _Availability(now)}
        """Availability of the model itself, and of each name that a request is queued for."""

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_held(self) -> int:
        """Queued requests while the service has no replica, as of the last lookup."""
        return len(self._queue) if self._availability[MODEL_ITSELF].is_unavailable else 0

    @property
    def queued_cost(self) -> float:
        """Tokens that the queued requests are expected to cost."""
        return self._queue.cost

    def idle_s(self, now: float) -> float:
        """Seconds without any request; 0 while one is queued or admitted."""
        return 0.0 if self.active or self._queue else max(0.0, now - self._idle_since)

    def num_queued_of(self, account: Account) -> int:
        return self._queue.num_of(account)

    def try_admit(
        self, now: float, name: ServedName = MODEL_ITSELF, sequences: int = 1, account: Account | None = None
    ) -> bool:
        """Admit a request at once, and count it, if its turn has come and there is capacity; otherwise `enqueue` it."""
        if self._queue:
            if self._is_holding_back or self._queue.oldest_of(name) is not None:
                return False
            self._fresh_until = now  # requests queued for other names may take the free capacity
        if sequences > 1:
            try:
                if not self._fits(now, name, sequences, account):
                    return False
            except Unavailable:
                return False
        elif self.sequences >= self._allowed or now >= self._fresh_until or name != self._allowed_name:
            try:
                self._allowed = self.sequences + self._capacity(now, name, None)
                self._fresh_until = now + CAPACITY_MAX_AGE_S
                self._allowed_name = name
                if self.sequences >= self._allowed and self._capacity(now, name, account) <= 0:
                    return False
            except Unavailable:
                return False
        self._count(sequences)
        return True

    def _count(self, sequences: int) -> None:
        self.active += 1
        self.sequences += sequences

    def retract(self, now: float, sequences: int = 1) -> None:
        """Take back the admission of a request that could not be sent."""
        self.active -= 1
        self.sequences -= sequences
        self._fresh_until = self._idle_since = now

    def enqueue(self, request: QueuedRequest, now: float) -> bool:
        """Queue a request that was not admitted. Returns whether a `tick` may admit it at once, since those before it
        may be of accounts whose own large calls fill the replicas.

        Raises:
            Unavailable: the service has no replica, and requests are not held until there is one.
            TooManyRequests: the queue is full.
        """
        bounds, name = self._bounds(), request.name
        self._look_up(now, name)
        try:
            if self._availability[name].is_unavailable and not bounds.hold_timeout_s:
                raise self._refusal(now, name)
            evicted = self._queue.push(request, bounds.max_entries, bounds.max_bytes)
        except QueueFull:
            raise self._refusal(now, name) from None
        finally:
            self._forget_names()
        request.since = now
        if evicted is not None:
            evicted.refuse(self._refusal(now, evicted.name))
        try:
            return self._capacity(now, name, request.account) > 0
        except Unavailable:
            return False

    def remove(self, request: QueuedRequest, now: float) -> None:
        """Take a queued request out because its client left."""
        self._queue.remove(request)
        self._idle_since = now

    def ended(self, now: float, sequences: int = 1) -> None:
        """Note the end of an admitted request."""
        self.active -= 1
        self.sequences -= sequences
        self._idle_since = now
        self._drain.ended(now)

    def tick(self, now: float, most: int = _NO_BOUND) -> int:
        """Admit as many requests as there is capacity for, and refuse those that were queued too long, but no more than
        `most` of both. Call it when a request has ended, and now and then while a request is queued.

        Returns:
            How many were admitted or refused.
        """
        told = 0
        self._look_up(now, MODEL_ITSELF)
        self._end_hold_back(now)
        passed_over: set[Account] = set()
        names = self._names_of_tick()
        open_names = {name for name in names if self._look_up(now, name) > 0}
        filled: set[ServedName] = set()

        def is_next(request: QueuedRequest) -> bool:
            """Whether a request goes, or all others wait for it."""
            account = request.account
            if account in passed_over:
                return False
            if self._look_up(now, request.name) <= 0:
                filled.add(request.name)
                return False
            if self._capacity(now, request.name, account) > 0 and (
                self._may_go(request, now) or self._hold_back(now)
            ):
                return True
            passed_over.add(account)
            return False

        while told < most and open_names:
            filled.clear()
            request = self._queue.next_named(open_names, is_next)
            if self._is_holding_back:
                break
            if request is not None:
                self._queue.take(request)
                self._count(request.sequences)
                told += 1
                request.admit()
                if self._queue.oldest_of(request.name) is None:
                    filled.add(request.name)
            elif open_names.isdisjoint(filled):
                break
            open_names -= filled
        for name in names:
            self._look_up(now, name)
            told += self._expire(name, now, most - told)
        self._forget_names()
        return told

    def _names_of_tick(self) -> list[ServedName]:
        """Return the names that a tick looks at, of many some after the other."""
        names = self._queue.names
        if len(names) <= NAMES_PER_TICK:
            return names
        first = self._first_name % len(names)
        self._first_name = first + NAMES_PER_TICK
        return (names + names)[first : first + NAMES_PER_TICK]

    def _may_go(self, request: QueuedRequest, now: float) -> bool:
        """Whether the free capacity is enough for all sequences of the next request, or it has waited for that long
        enough."""
        sequences = request.sequences
        if sequences == 1 or self._fits(now, request.name, sequences, request.account):
            return True
        if request.next_since < 0.0:
            request.next_since = now
        return now - request.next_since >= min(HOLD_BACK_S, self._bounds().queue_timeout_s / 2)

    def _hold_back(self, now: float) -> bool:
        """Have all requests wait for the next one, if they may wait any longer."""
        if self._hold_back_time.left_s(now) <= 0.0:
            return False
        self._is_holding_back, self._held_back_since = True, now
        return True

    def _end_hold_back(self, now: float) -> None:
        """Count the time in which requests have waited since the last tick."""
        if self._is_holding_back:
            self._is_holding_back = False
            self._hold_back_time.spend(now - self._held_back_since, now)

    def _expire(self, name: ServedName, now: float, most: int) -> int:
        """Refuse the requests that were queued for `name` too long, but no more than `most`; return how many."""
        told = 0
        bounds, availability = self._bounds(), self._availability[name]
        timeout_s = bounds.hold_timeout_s if availability.is_unavailable else bounds.queue_timeout_s
        while told < most and (oldest := self._queue.oldest_of(name)) is not None:
            # A replica that comes and goes restarts the time, but not for ever.
            last = oldest.since + bounds.hold_timeout_s + bounds.queue_timeout_s
            if min(last, max(oldest.since, availability.changed) + timeout_s) > now:
                break
            self._queue.remove(oldest)
            self._idle_since = now
            told += 1
            oldest.refuse(self._refusal(now, name, now - oldest.since))
        return told

    def _look_up(self, now: float, name: ServedName) -> int:
        """Return the capacity for `name` that an account without requests has (of a router with keys: without keys
        there is one account only), and note whether there are replicas at all."""
        availability = self._availability.get(name)
        if availability is None:
            availability = self._availability[name] = _Availability(now)
        try:
            capacity, is_unavailable = self._capacity(now, name, ANONYMOUS), False
        except Unavailable as error:
            capacity, is_unavailable = 0, True
            availability.reason, availability.model = error.message, error.model
        if is_unavailable is not availability.is_unavailable:
            availability.is_unavailable = is_unavailable
            availability.changed = now
        return capacity

    def _forget_names(self) -> None:
        """Forget names that no request is queued for any more."""
        if len(self._availability) > 1:
            queued = {MODEL_ITSELF, *self._queue.names}
            self._availability = {name: kept for name, kept in self._availability.items() if name in queued}

    def _refusal(self, now: float, name: ServedName, waited_s: float = 0.0) -> ApiError:
        availability = self._availability.get(name)
        if availability is not None and availability.is_unavailable:
            left_s = self._bounds().cold_start_s - waited_s
            return Unavailable(
                availability.reason,
                retry_after_s=min(MAX_RETRY_AFTER_S, max(1.0, left_s)),
                model=availability.model,
            )
        return TooManyRequests(
            f"model {self._model!r} has more requests than it can take",
            retry_after_s=self._drain.retry_after_s(len(self._queue) + 1, now),
            model=self._model,
        )


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
        name: ServedName = MODEL_ITSELF,
        sequences: int = 1,
        account: Account | None = None,
    ) -> bool:
        """Admit a request at once if there is capacity and its turn has come; otherwise `enqueue` it. `name`: what the
        replica must serve."""
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

    def has_capacity(
        self, service: Service, now: float, name: ServedName = MODEL_ITSELF, sequences: int = 1
    ) -> bool:
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
