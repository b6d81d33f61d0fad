"""Queues in front of a service, without sockets: what waits, what is refused, and what the hint says."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from argosy_protocol.errors import ApiError, TooManyRequests, Unavailable
from argosy_router.auth.accounts import Account
from argosy_router.fair_queue import QueuedRequest
from argosy_router.flow_control import MAX_RETRY_AFTER_S, Bounds, ServiceQueue
from argosy_router.prefixes import MODEL_ITSELF

from .accounts import account


class Told:
    """Remembers how it ended."""

    def __init__(self, owner: Account, priority: int = 0, size: int = 1, sequences: int = 1) -> None:
        self.request = QueuedRequest(
            owner, priority, 1.0, size, MODEL_ITSELF, sequences, self.admit, self.refuse
        )
        self.told: list[str | ApiError] = []

    def admit(self) -> None:
        self.told.append("admit")
        FakeReplicas.current.requests += self.request.sequences

    def refuse(self, error: ApiError) -> None:
        self.told.append(error)


class FakeReplicas:
    """Replicas with room for `seats` sequences; None: there is no replica."""

    current: FakeReplicas

    def __init__(self, seats: int | None) -> None:
        self.seats = seats
        self.requests = 0
        FakeReplicas.current = self

    def room(self, now: float, name: str = "", account: Account | None = None) -> int:
        if self.seats is None:
            raise Unavailable("none")
        return self.seats - self.requests


def service_queue_of(
    replicas: FakeReplicas, *, queue_s: float = 60.0, hold_s: float = 0.0, entries: int = 100
) -> ServiceQueue:
    return ServiceQueue("tiny", replicas.room, lambda: Bounds(entries, 1000, queue_s, hold_s), 0.0)


def test_a_tick_tells_no_more_than_it_is_asked_to() -> None:
    replicas = FakeReplicas(None)
    queue = service_queue_of(replicas, hold_s=10.0)
    requests = [Told(account()) for _ in range(5)]
    for request in requests:
        queue.enqueue(request.request, 0.0)
    replicas.seats = 2
    assert [queue.tick(1.0, 1), queue.tick(1.0, 0), queue.tick(1.0, 9)] == [1, 0, 1]
    replicas.seats = None
    queue.tick(2.0)
    assert [queue.tick(100.0, 2), queue.num_queued, queue.tick(100.0, 2)] == [2, 1, 1]
    assert [len(request.told) for request in requests] == [1] * 5


def enter(queue: ServiceQueue, replicas: FakeReplicas, now: float) -> bool:
    is_admitted = queue.try_admit(now)
    replicas.requests += is_admitted
    return is_admitted


def end(queue: ServiceQueue, replicas: FakeReplicas, now: float) -> None:
    replicas.requests -= 1
    queue.ended(now)
    queue.tick(now)


def test_a_request_waits_for_the_first_end() -> None:
    replicas = FakeReplicas(2)
    queue = service_queue_of(replicas)
    assert [enter(queue, replicas, 0.0) for _ in range(3)] == [True, True, False]
    waiter = Told(account())
    queue.enqueue(waiter.request, 0.0)
    queue.tick(0.1)
    assert waiter.told == []
    end(queue, replicas, 0.2)
    assert waiter.told == ["admit"]
    assert (queue.active, queue.num_queued) == (2, 0)


def test_new_requests_do_not_overtake_queued_ones() -> None:
    replicas = FakeReplicas(1)
    queue = service_queue_of(replicas)
    assert enter(queue, replicas, 0.0)
    queue.enqueue(Told(account()).request, 0.0)
    replicas.requests = 0
    assert not enter(queue, replicas, 9.0)


def test_waiting_ends_with_a_hint_when_to_come_back() -> None:
    replicas = FakeReplicas(1)
    queue = service_queue_of(replicas, queue_s=10.0)
    assert enter(queue, replicas, 0.0)
    for second in range(20):  # one request ends every half second
        end(queue, replicas, second / 2)
        assert enter(queue, replicas, second / 2)
    waiters = [Told(account()) for _ in range(8)]
    for waiter in waiters:
        queue.enqueue(waiter.request, 10.0)
    queue.tick(19.9)
    assert not any(waiter.told for waiter in waiters)
    queue.tick(20.0)
    errors = [waiter.told[0] for waiter in waiters]
    assert all(isinstance(error, TooManyRequests) and error.headers()["retry-after"] for error in errors)
    assert queue.num_queued == 0


def test_the_hint_is_the_queue_over_its_drain() -> None:
    replicas = FakeReplicas(1)
    queue = service_queue_of(replicas, entries=9)
    assert enter(queue, replicas, 0.0)
    for half in range(1, 101):
        end(queue, replicas, half / 2)
        assert enter(queue, replicas, half / 2)
    for _ in range(9):
        queue.enqueue(Told(account()).request, 50.0)
    with pytest.raises(TooManyRequests) as refused:
        queue.enqueue(Told(account()).request, 50.0)
    assert refused.value.retry_after_s == pytest.approx(10 / 2, rel=0.1)
    with pytest.raises(TooManyRequests) as refused:
        queue.enqueue(Told(account()).request, 500.0)
    assert refused.value.retry_after_s == MAX_RETRY_AFTER_S, "nothing has ended for a long time"


def test_without_replicas_requests_are_refused_or_held() -> None:
    with pytest.raises(Unavailable):
        service_queue_of(FakeReplicas(None)).enqueue(Told(account()).request, 0.0)
    replicas = FakeReplicas(None)
    queue = service_queue_of(replicas, hold_s=300.0)
    assert not queue.try_admit(0.0)
    held, late = Told(account()), Told(account())
    queue.enqueue(held.request, 0.0)
    queue.enqueue(late.request, 200.0)
    queue.tick(299.0)
    assert held.told == []
    queue.tick(300.0)
    assert isinstance(held.told[0], Unavailable)
    replicas.seats = 1
    queue.tick(301.0)
    assert late.told == ["admit"]


def test_held_requests_get_the_queue_timeout_once_there_is_a_replica() -> None:
    replicas = FakeReplicas(None)
    queue = service_queue_of(replicas, queue_s=60.0, hold_s=300.0)
    held = Told(account())
    queue.enqueue(held.request, 0.0)
    replicas.seats = 0  # it came, and is full
    queue.tick(250.0)
    queue.tick(309.0)
    assert held.told == []
    queue.tick(311.0)
    assert isinstance(held.told[0], TooManyRequests)


def test_a_replica_that_comes_and_goes_does_not_put_the_end_off_for_ever() -> None:
    replicas = FakeReplicas(None)
    queue = service_queue_of(replicas, queue_s=5.0, hold_s=8.0)
    held = Told(account())
    queue.enqueue(held.request, 0.0)
    for second in range(1, 14):
        assert held.told == []
        replicas.seats = None if second % 2 else 0
        queue.tick(float(second))
    assert held.told


def test_a_service_is_idle_from_when_the_last_held_request_left() -> None:
    queue = service_queue_of(FakeReplicas(None), hold_s=600.0)
    waiters = Told(account()), Told(account())
    for waiter in waiters:
        queue.enqueue(waiter.request, 36_000.0)
    queue.remove(waiters[0].request, 36_050.0)
    assert queue.idle_s(36_055.0) == 0.0
    queue.remove(waiters[1].request, 36_060.0)
    assert queue.idle_s(36_070.0) == 10.0


def test_losing_all_replicas_ends_the_waiting_where_nothing_is_held() -> None:
    replicas = FakeReplicas(0)
    queue = service_queue_of(replicas)
    waiter = Told(account())
    queue.enqueue(waiter.request, 0.0)
    replicas.seats = None
    queue.tick(1.0)
    assert isinstance(waiter.told[0], Unavailable)


class ServiceQueueMachine(RuleBasedStateMachine):
    """Each request is admitted or refused once, or has left; each admitted one ends once."""

    @initialize(seats=st.one_of(st.none(), st.integers(0, 4)))
    def begin(self, seats: int | None) -> None:
        self.now = 0.0
        self.replicas = FakeReplicas(seats)
        self.queue = service_queue_of(self.replicas, queue_s=5.0, hold_s=8.0, entries=6)
        self.accounts = [account("a"), account("b", weight=3.0)]
        self.waiting: list[Told] = []
        self.admitted: list[int] = []

    @rule(number=st.integers(0, 1), priority=st.integers(0, 1), sequences=st.sampled_from([1, 1, 2, 5]))
    def arrive(self, number: int, priority: int, sequences: int) -> None:
        if self.queue.try_admit(self.now, MODEL_ITSELF, sequences):
            if self.replicas.seats is None:  # the last look is a moment old
                self.queue.retract(self.now, sequences)
                return
            self.replicas.requests += sequences
            self.admitted.append(sequences)
            return
        waiter = Told(self.accounts[number], priority, sequences=sequences)
        try:
            self.queue.enqueue(waiter.request, self.now)
        except ApiError:
            assert not waiter.told
        else:
            self.waiting.append(waiter)
        self.sort_out()

    @rule()
    def finish(self) -> None:
        if self.admitted:
            sequences = self.admitted.pop()
            self.replicas.requests -= sequences
            self.queue.ended(self.now, sequences)
            self.queue.tick(self.now)
            self.sort_out()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.waiting:
            waiter = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
            self.queue.remove(waiter.request, self.now)
            assert not waiter.told

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.queue.tick(self.now)
        self.sort_out()

    @rule(seats=st.one_of(st.none(), st.integers(0, 4)))
    def scale(self, seats: int | None) -> None:
        self.replicas.seats = seats

    def sort_out(self) -> None:
        for waiter in list(self.waiting):
            if waiter.told:
                assert len(waiter.told) == 1
                self.admitted += [waiter.request.sequences] * (waiter.told[0] == "admit")
                self.waiting.remove(waiter)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "queue"):
            assert self.queue.num_queued == len(self.waiting)
            assert self.queue.active == len(self.admitted)
            assert self.queue.sequences == sum(self.admitted) == self.replicas.requests
            assert all(self.now - waiter.request.since < 5.0 + 8.0 for waiter in self.waiting)


TestServiceQueue = ServiceQueueMachine.TestCase
TestServiceQueue.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
