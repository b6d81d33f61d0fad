"""One service's way in: admit a request now, have it wait, or refuse it.

Owns: how many sequences of admitted requests the service has under way, who waits, and when waiting ends without
success.
Must not know: replicas (it asks how much room they have), sockets, timers.
Invariants: who waits is told exactly one thing, `admit` or `refuse`, unless it leaves first, and then nothing; nobody
is admitted past those who wait; who has waited longer than allowed is refused at the next `tick`.

A service takes as many requests as its replicas have room for together; to which of them a request goes is the policy's
choice, made when it is admitted, not when it arrives. The room is looked up anew when the last answer is old or used
up, so that a request of a service at ease costs two comparisons here.

Room is counted in sequences, because that is what fills an engine: a call with 128 choices takes 128 times the room of
one. A call whose turn it is, and for which there is some room but not enough, holds back those behind it while requests
end, so that small calls cannot keep it out for ever; after `HOLD_BACK_S` it goes with the room there is.

Requests for an adapter, or for an alias that not all replicas have, count the room of the replicas that can answer
them. They wait in the same queue; those for which there is room go past those for which there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from argosy_protocol.errors import ApiError, TooManyRequests, Unavailable
from argosy_router.admission.entry import Waiter
from argosy_router.admission.queue import FairQueue, QueueFull

ROOM_MAX_AGE_S: Final = 0.25
"""Within this, replicas may report that others than this router fill them."""
HOLD_BACK_S: Final = 10.0
"""The time in which most answers end. Other routers fill the same replicas: they may never leave so much room at once,
and nobody should wait longer for a call that cannot have it."""
DRAIN_WINDOW_S: Final = 10.0
MAX_RETRY_AFTER_S: Final = 60.0
"""OpenAI's SDKs ignore a longer hint."""


class Bounds(NamedTuple):
    """What may wait for one service, and how long."""

    max_entries: int
    max_bytes: int
    queue_timeout_s: float
    """While the service has replicas."""
    hold_timeout_s: float
    """While it has none."""


class DrainRate:
    """Requests that end per second, averaged over about `DRAIN_WINDOW_S`."""

    __slots__ = ("_born", "_sum", "_time")

    def __init__(self, now: float) -> None:
        self._born = self._time = now
        self._sum = 0.0

    def ended(self, now: float) -> None:
        self._sum = self._decayed(now) + 1.0
        self._time = now

    def retry_after_s(self, ahead: int, now: float) -> float:
        """When `ahead` requests will have ended, at this rate; within what clients heed."""
        seen_s = DRAIN_WINDOW_S * -math.expm1((self._born - now) / DRAIN_WINDOW_S)
        ended = self._decayed(now)
        predicted = ahead * seen_s / ended if ended > 0.0 else 1.0
        return min(MAX_RETRY_AFTER_S, max(1.0, predicted))

    def _decayed(self, now: float) -> float:
        return self._sum * math.exp((self._time - now) / DRAIN_WINDOW_S)


class _Standing:
    """Whether some replica can answer requests for a name."""

    __slots__ = ("is_deserted", "reason", "turned")

    def __init__(self, now: float) -> None:
        self.is_deserted = False
        self.reason = ""
        """What was said of it last when it was."""
        self.turned = now
        """When the name last got its first replica or lost its last one."""


class Lane:
    """The way in to one service. Times are a monotonic clock's, passed in."""

    def __init__(
        self,
        model: str,
        room: Callable[[float, str], int],
        bounds: Callable[[], Bounds],
        now: float,
        takes: Callable[[float, str, int], bool] | None = None,
    ) -> None:
        """
        Args:
            room: `room(now, name)` says how many more sequences for a name the replicas take now (the empty one is the
                model itself), or raises Unavailable when none of them can answer it.
            takes: `takes(now, name, sequences)` says the same of one request with several sequences; by default it is
                compared with the room.
        """
        self._model = model
        self._room = room
        self._takes = takes or (lambda now, name, sequences: room(now, name) >= sequences)
        self._bounds = bounds
        self._queue: FairQueue[Waiter] = FairQueue()
        self._drain = DrainRate(now)
        self.active = 0
        """Requests admitted and without an end yet."""
        self.sequences = 0
        """What these generate side by side."""
        self._allowed = 0
        """`sequences` may grow to this ..."""
        self._fresh_until = now
        """... until then ..."""
        self._allowed_name = ""
        """... by requests for this name."""
        self._is_holding_back = False
        """Whether the next one waits for more room than there is."""
        self._standings = {"": _Standing(now)}
        """For the model itself, and each name that is waited for."""

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def enter(self, now: float, name: str = "", sequences: int = 1) -> bool:
        """Whether a request is admitted at once; it is counted then. Otherwise it has to `wait`."""
        if self._queue:
            if self._is_holding_back or self._queue.oldest_of(name) is not None:
                return False
            self._fresh_until = now  # what waits for other names may be about to take what was free
        if sequences > 1:
            try:
                if not self._takes(now, name, sequences):
                    return False
            except Unavailable:
                return False
        elif self.sequences >= self._allowed or now >= self._fresh_until or name != self._allowed_name:
            try:
                self._allowed = self.sequences + self._room(now, name)
            except Unavailable:
                return False
            self._fresh_until = now + ROOM_MAX_AGE_S
            self._allowed_name = name
            if self.sequences >= self._allowed:
                return False
        self._count(sequences)
        return True

    def _count(self, sequences: int) -> None:
        self.active += 1
        self.sequences += sequences

    def retract(self, now: float, sequences: int = 1) -> None:
        """A request was admitted but could not be sent: it has not entered after all."""
        self.active -= 1
        self.sequences -= sequences
        self._fresh_until = now

    def wait(self, waiter: Waiter, now: float) -> None:
        """Queues a request that was not admitted.

        Raises:
            Unavailable: the service has no replica, and requests are not held until there is one.
            TooManyRequests: the queue is full.
        """
        bounds, name = self._bounds(), waiter.name
        self._look(now, name)
        try:
            if self._standings[name].is_deserted and not bounds.hold_timeout_s:
                raise self._refusal(now, name)
            unlucky = self._queue.push(waiter, bounds.max_entries, bounds.max_bytes)
        except QueueFull:
            raise self._refusal(now, name) from None
        finally:
            self._forget_standings()
        waiter.since = now
        if unlucky is not None:
            unlucky.refuse(self._refusal(now, unlucky.name))

    def leave(self, waiter: Waiter) -> None:
        """A waiting request is given up by its client."""
        self._queue.remove(waiter)

    def ended(self, now: float, sequences: int = 1) -> None:
        """An admitted request is over."""
        self.active -= 1
        self.sequences -= sequences
        self._drain.ended(now)

    def tick(self, now: float) -> None:
        """Admits as many as there is room for and refuses those who have waited too long. Call it when a request has
        ended, and now and then while somebody waits."""
        self._look(now, "")
        self._is_holding_back = False
        while names := [name for name in self._queue.names if self._look(now, name) > 0]:
            waiter = self._queue.next_named(names)
            assert waiter is not None
            if not self._may_go(waiter, now):
                self._is_holding_back = True
                break
            self._queue.take(waiter)
            self._count(waiter.sequences)
            waiter.admit()
        for name in self._queue.names:
            self._expire(name, now)
        self._forget_standings()

    def _may_go(self, waiter: Waiter, now: float) -> bool:
        """Whether there is room for all sequences of the next one, or it has waited for that long enough."""
        if waiter.sequences == 1 or self._takes(now, waiter.name, waiter.sequences):
            return True
        if waiter.next_since < 0.0:
            waiter.next_since = now
        return now - waiter.next_since >= min(HOLD_BACK_S, self._bounds().queue_timeout_s / 2)

    def _expire(self, name: str, now: float) -> None:
        """Refuses those who have waited for `name` for too long."""
        bounds, standing = self._bounds(), self._standings[name]
        patience_s = bounds.hold_timeout_s if standing.is_deserted else bounds.queue_timeout_s
        while (oldest := self._queue.oldest_of(name)) is not None:
            # A replica that comes and goes starts the wait anew, but not for ever.
            last = oldest.since + bounds.hold_timeout_s + bounds.queue_timeout_s
            if min(last, max(oldest.since, standing.turned) + patience_s) > now:
                return
            self._queue.remove(oldest)
            oldest.refuse(self._refusal(now, name))

    def _look(self, now: float, name: str) -> int:
        """The room there is for `name`; notes whether there are replicas at all."""
        standing = self._standings.get(name)
        if standing is None:
            standing = self._standings[name] = _Standing(now)
        try:
            room, is_deserted = self._room(now, name), False
        except Unavailable as error:
            room, is_deserted = 0, True
            standing.reason = error.message
        if is_deserted is not standing.is_deserted:
            standing.is_deserted = is_deserted
            standing.turned = now
        return room

    def _forget_standings(self) -> None:
        """Keeps those of names that are waited for."""
        if len(self._standings) > 1:
            waited_for = {"", *self._queue.names}
            self._standings = {name: kept for name, kept in self._standings.items() if name in waited_for}

    def _refusal(self, now: float, name: str) -> ApiError:
        standing = self._standings.get(name)
        if standing is not None and standing.is_deserted:
            return Unavailable(standing.reason, retry_after_s=1.0)
        return TooManyRequests(
            f"model {self._model!r} has more requests than it can take",
            retry_after_s=self._drain.retry_after_s(len(self._queue) + 1, now),
        )
