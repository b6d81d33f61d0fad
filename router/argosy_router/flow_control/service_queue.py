"""The queue of one service: admit a request now, queue it, or refuse it.

Owns: how many sequences of admitted requests have not ended, which requests are queued, and when a queued request is
refused.
Must not know: replicas (it asks for their capacity), sockets, timers.
Invariants: a queued request is told exactly one thing, `admit` or `refuse`, unless it is removed first, and then
nothing; no request is admitted past those in the queue that could go; a request that was queued longer than allowed is
refused at the next `tick`, or a few later if requests are queued for more than `NAMES_PER_TICK` names.

A service admits as many requests as its replicas have capacity for together. The policy chooses a replica when a
request is admitted, not when it arrives. The capacity is looked up again only when the last figure is older than
`CAPACITY_MAX_AGE_S` or used up, so that while a service has free capacity an admission costs two comparisons.

Capacity is counted in sequences, because sequences fill an engine: a request with 128 choices takes 128 times the
capacity of one. If the next request needs more capacity than is free, the requests behind it wait, so that small
requests cannot keep it out for ever; after `HOLD_BACK_S` it is admitted to the capacity that is free. The time in which
requests wait for large calls is limited for all accounts together: once it is used up, an account whose next request
does not fit is passed over. So large calls that are short, and therefore cheap in the fair queue, cannot keep all
others waiting, however many accounts send them.

Large calls that run do not keep other accounts out either: the capacity for an account counts them in part only, as
`capacity` says.

Requests for an adapter, for an alias that not all replicas have, or for one side of a canary rollout count the capacity
of the replicas that can answer them. They wait in the same queue; those for which there is capacity overtake those for
which there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from argosy_protocol.errors import ApiError, TooManyRequests, Unavailable
from argosy_router.auth.accounts import ANONYMOUS, Account
from argosy_router.flow_control.fair_queue import FairQueue, QueueFull
from argosy_router.flow_control.queued_request import QueuedRequest

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

    __slots__ = ("_born", "_sum", "_time")

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

    __slots__ = ("changed", "is_unavailable", "model", "reason")

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

    __slots__ = ("_left_s", "_time")

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
        capacity: Callable[[float, str, Account | None], int],
        bounds: Callable[[], Bounds],
        now: float,
        fits: Callable[[float, str, int, Account | None], bool] | None = None,
    ) -> None:
        """
        Args:
            capacity: `capacity(now, name, account)` returns how many more sequences for a name the replicas can run now
                (the empty name is the model itself), or raises Unavailable if none of them can answer it. For an
                account, other accounts' large calls may count in part; without one they count in full.
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
        self._allowed_name = ""
        """The name that the lookup was for."""
        self._is_holding_back = False
        """Whether the next request waits for more capacity and all others wait behind it."""
        self._held_back_since = now
        """When they were last found waiting for it."""
        self._hold_back_time = _HoldBackTime(now)
        self._first_name = 0
        """Where the names of the next tick begin among those that are queued for."""
        self._availability = {"": _Availability(now)}
        """Availability of the model itself (the empty name), and of each name that a request is queued for."""

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_held(self) -> int:
        """Queued requests while the service has no replica, as of the last lookup."""
        return len(self._queue) if self._availability[""].is_unavailable else 0

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
        self, now: float, name: str = "", sequences: int = 1, account: Account | None = None
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
        self._look_up(now, "")
        self._end_hold_back(now)
        passed_over: set[Account] = set()
        names = self._names_of_tick()
        open_names = {name for name in names if self._look_up(now, name) > 0}
        filled: set[str] = set()

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

    def _names_of_tick(self) -> list[str]:
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

    def _expire(self, name: str, now: float, most: int) -> int:
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

    def _look_up(self, now: float, name: str) -> int:
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
            queued = {"", *self._queue.names}
            self._availability = {name: kept for name, kept in self._availability.items() if name in queued}

    def _refusal(self, now: float, name: str, waited_s: float = 0.0) -> ApiError:
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
