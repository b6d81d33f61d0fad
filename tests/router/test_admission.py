"""Authentication, rate limits, the fair queue and the queue in front of a service, without sockets."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from argosy_protocol.errors import ApiError, TooManyRequests, Unavailable
from argosy_router.auth.accounts import Account, Anyone, RateLimited, Reservation
from argosy_router.auth.keys import KeyFileError, KeyTable, parse_line
from argosy_router.auth.terms import KeyTerms
from argosy_router.flow_control.fair_queue import FairQueue, QueueFull
from argosy_router.flow_control.queued_request import Entry, QueuedRequest
from argosy_router.flow_control.service_queue import MAX_RETRY_AFTER_S, Bounds, ServiceQueue
from argosy_router.ratelimit.token_bucket import PERIOD_S, TokenBucket, duration

UNBOUNDED = (1 << 30, 1 << 30)


def account(name: str = "a", **terms: Any) -> Account:
    return Account(KeyTerms(name=name, **terms), 0.0)


# keys


def bearer(key: str) -> bytes:
    return b"Bearer " + key.encode()


def test_a_key_is_given_as_it_is_or_as_its_digest() -> None:
    table = KeyTable(is_closed=True)
    digest = hashlib.sha256(b"sk-one").hexdigest()
    assert table.load(f"# keys\n\n  sha256:{digest} name=one\nsk-two name=two weight=2.5\n", 0.0) == []
    one, two = table.account_of(b"bearer  sk-one"), table.account_of(bearer("sk-two"))
    assert one is not None
    assert two is not None
    assert (one.name, two.name, two.weight) == ("one", "two", 2.5)
    for wrong in (
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"sk-one",
        b"Basic sk-one",
        bearer(f"sha256:{digest}"),
        bearer(digest),
    ):
        assert table.account_of(wrong) is None, wrong


def test_only_a_table_without_keys_and_file_is_open() -> None:
    assert KeyTable().account_of(None) is not None
    assert KeyTable(is_closed=True).account_of(None) is None
    assert KeyTable(["k"]).account_of(None) is None
    assert KeyTable(["k"]).account_of(bearer("k")) is not None


@pytest.mark.parametrize(
    ("line", "problem"),
    {
        "an unknown term": ("k rpm=5", "terms are"),
        "a word without value": ("k team", "NAME=VALUE"),
        "a term twice": ("k weight=1 weight=2", "once each"),
        "no number": ("k requests_per_minute=many", "int"),
        "a negative limit": ("k tokens_per_minute=-1", ">= 0"),
        "a weight of zero": ("k weight=0", ">= 0.01"),
        "a weight that is none": ("k weight=nan", "weight"),
        "a name with spaces in disguise": ("k name=a\u00a0b", "NAME=VALUE"),
        "an odd name": ("k name=a/b", "name"),
        "no model": ("k models=", "models"),
        "a short digest": ("sha256:abcd", "64 hexadecimal"),
        "no digest": ("sha256:" + "x" * 64, "64 hexadecimal"),
        "the digest of nothing": ("sha256:" + hashlib.sha256(b"").hexdigest(), "nothing at all"),
    }.values(),
)
def test_bad_lines_are_refused_without_their_key(line: str, problem: str) -> None:
    with pytest.raises(KeyFileError, match=problem):
        parse_line(line)
    table = KeyTable(is_closed=True)
    (told,) = table.load(f"good\n{line.replace('k ', 'sk-secret ')}\n", 0.0)
    assert told.startswith("line 2: ")
    assert "sk-secret" not in told
    assert table.account_of(bearer("good")) is not None, "one bad line costs no other key"
    assert table.account_of(bearer("sk-secret")) is None


def test_two_keys_of_one_name_share_an_account_and_must_agree() -> None:
    table = KeyTable(is_closed=True)
    assert table.load("old name=a weight=2\nnew name=a weight=2", 0.0) == []
    assert table.account_of(bearer("old")) is table.account_of(bearer("new"))
    assert table.load("old name=a weight=2\nnew name=a weight=3\nold name=b", 0.0) == [
        "line 2: keys named 'a' must have the same terms",
        "line 3: the key was given before",
    ]


def test_a_reload_keeps_what_was_used() -> None:
    table = KeyTable(is_closed=True)
    table.load("k name=a requests_per_minute=2", 0.0)
    before = table.account_of(bearer("k"))
    assert before is not None
    for _ in range(2):
        before.reserve(1, 0.0)
    table.load("other\nk name=a requests_per_minute=3", 0.0)
    assert table.account_of(bearer("k")) is before
    with pytest.raises(RateLimited):
        before.reserve(1, 0.0)
    table.load("k name=a", 0.0)
    assert not before.is_limited
    table.load("", 0.0)
    assert table.account_of(bearer("k")) is None


@pytest.mark.parametrize(
    ("terms", "asked", "priority"),
    [
        ({}, 0, 0),
        ({}, 5, 5),
        ({}, -5, 0),
        ({"priority": -3}, 0, -3),
        ({"priority": 10}, -20, 10),
        ({"priority": 10}, 1, 11),
    ],
)
def test_a_request_steps_back_but_never_ahead_of_its_key(
    terms: dict[str, int], asked: int, priority: int
) -> None:
    assert account("a", **terms).priority(asked) == priority
    assert Anyone().priority(asked) == asked


def test_keys_open_their_own_models_only() -> None:
    assert account().may_use("anything")
    limited = account(models=("tiny", "team/large"))
    assert limited.may_use("x", "tiny")
    assert not limited.may_use("x", "TINY")


# limits


def left(reservation: Reservation, kind: str) -> int:
    """What an answer says is left of a limit."""
    lines = reservation.header_lines.decode().split("\r\n")
    return next(
        int(line.split(": ")[1]) for line in lines if line.startswith(f"x-ratelimit-remaining-{kind}")
    )


def test_a_limit_is_refilled_by_the_minute() -> None:
    limited = account(requests_per_minute=60)
    for _ in range(60):
        limited.reserve(1, 0.0)
    with pytest.raises(RateLimited) as refused:
        limited.reserve(1, 0.0)
    headers = refused.value.headers()
    assert headers["retry-after-ms"] == "1000"
    assert headers["x-ratelimit-limit-requests"] == "60"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-reset-requests"] == "1m0s"
    assert "x-ratelimit-limit-tokens" not in headers
    assert left(limited.reserve(1, 1.0), "requests") == 0


def test_tokens_are_settled_by_what_was_used() -> None:
    limited = account(tokens_per_minute=600)
    reservation = limited.reserve(500, 0.0)
    assert left(reservation, "tokens") == 100
    reservation.settle(100)
    limited.reserve(400, 0.0).settle(700)  # 200 more than there were
    with pytest.raises(RateLimited) as refused:
        limited.reserve(100, 0.0)
    assert refused.value.retry_after_s == pytest.approx(30.0)
    assert left(limited.reserve(100, 30.1), "tokens") == 1


def test_a_request_larger_than_the_limit_needs_all_of_it_and_passes() -> None:
    limited = account(tokens_per_minute=100)
    first = limited.reserve(5000, 0.0)
    with pytest.raises(RateLimited) as refused:
        limited.reserve(50, 0.0)
    assert refused.value.retry_after_s == pytest.approx(30.0), "the bucket is empty, not in debt"
    first.settle(60)
    assert left(limited.reserve(40, 0.0), "tokens") == 0


def test_parallel_requests_are_counted() -> None:
    limited = account(max_parallel_requests=2)
    first, second = limited.reserve(1, 0.0), limited.reserve(1, 0.0)
    with pytest.raises(RateLimited, match="under way"):
        limited.reserve(1, 0.0)
    first.settle(5)
    first.cancel()
    limited.reserve(1, 0.0)
    with pytest.raises(RateLimited):
        limited.reserve(1, 0.0)
    second.cancel()
    limited.reserve(1, 0.0)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 400), st.integers(0, 800)), max_size=60))
def test_no_minute_passes_more_than_twice_the_limit_plus_what_was_underestimated(
    steps: list[tuple[float, int, int]],
) -> None:
    """A full bucket and a minute's refill: what any token bucket promises."""
    limited = account(tokens_per_minute=1000, requests_per_minute=10)
    now, passed = 0.0, []
    for pause_s, asked, used in steps:
        now += pause_s
        try:
            limited.reserve(asked, now).settle(used)
        except RateLimited as error:
            now += (error.retry_after_s or 0.0) + 1e-6
            limited.reserve(asked, now).cancel()
        else:
            passed.append((now, used))
    for start, _ in passed:
        minute = [used for time, used in passed if start <= time <= start + PERIOD_S]
        assert len(minute) <= 2 * 10
        assert sum(minute[:-1]) <= 2 * 1000 + max(minute)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(-500, 1500)), max_size=50))
def test_a_bucket_never_holds_more_than_a_minute(steps: list[tuple[float, int]]) -> None:
    bucket = TokenBucket(1000, 0.0)
    now = 0.0
    for pause_s, amount in steps:
        now += pause_s
        bucket.wait_s(1, now)
        bucket.take(amount)
        assert 0 <= bucket.remaining() <= 1000
        assert bucket.reset_s() >= 0


def test_durations_are_written_as_openai_writes_them() -> None:
    assert [duration(s) for s in (0, 0.0004, 0.12, 1, 1.5, 59.9991, 60, 359.2, 3600)] == [
        *("0ms", "1ms", "120ms", "1s", "1.5s", "1m0s", "1m0s", "6m0s", "60m0s"),
    ]


# the queue


def drain(queue: FairQueue[Entry]) -> list[Entry]:
    return [queue.pop() for _ in range(len(queue))]


def test_lower_priorities_go_first_and_equals_in_order() -> None:
    queue: FairQueue[Entry] = FairQueue()
    one = account()
    entries = [Entry(one, priority, 1.0, 1) for priority in (0, 5, -1, 0, 5)]
    for entry in entries:
        queue.push(entry, *UNBOUNDED)
    assert drain(queue) == [entries[index] for index in (2, 0, 3, 1, 4)]
    assert queue.bytes == 0


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.floats(1, 100)), min_size=1, max_size=80),
)
def test_backlogged_accounts_get_shares_by_weight(
    weights: list[float], work: list[tuple[int, float]]
) -> None:
    """Goyal, Vin, Cheng: the services of two accounts that both wait, over their weights, differ by at most the sum
    of their largest requests over their weights."""
    accounts = [account(f"a{number}", weight=weight) for number, weight in enumerate(weights)]
    queue: FairQueue[Entry] = FairQueue()
    pending: dict[Account, int] = defaultdict(int)
    largest: dict[Account, float] = defaultdict(float)
    for number, cost in work:
        owner = accounts[number % len(accounts)]
        queue.push(Entry(owner, 0, cost, 1), *UNBOUNDED)
        pending[owner] += 1
        largest[owner] = max(largest[owner], cost)
    served: dict[Account, float] = defaultdict(float)
    for entry in drain(queue):
        served[entry.account] += entry.cost / entry.account.weight
        pending[entry.account] -= 1
        waiting = [owner for owner in accounts if pending[owner]]
        for one in waiting:
            for other in waiting:
                bound = largest[one] / one.weight + largest[other] / other.weight
                assert served[one] - served[other] <= bound + 1e-6


def test_who_idled_has_no_claim_on_the_past() -> None:
    queue: FairQueue[Entry] = FairQueue()
    busy, idle = account("busy"), account("idle")
    for _ in range(20):
        queue.push(Entry(busy, 0, 1.0, 1), *UNBOUNDED)
    for _ in range(10):
        queue.pop()
    for _ in range(10):
        queue.push(Entry(idle, 0, 1.0, 1), *UNBOUNDED)
    owners = [entry.account.name for entry in drain(queue)]
    assert abs(owners[:10].count("idle") - 5) <= 1


def test_a_full_queue_makes_room_for_those_who_have_less() -> None:
    queue: FairQueue[Entry] = FairQueue()
    hog, modest = account("hog"), account("modest")
    for _ in range(4):
        queue.push(Entry(hog, 0, 1.0, 1), 4, 100)
    out = queue.push(Entry(modest, 0, 1.0, 1), 4, 100)
    assert out is not None
    assert out.account is hog
    queue.push(Entry(modest, 0, 1.0, 1), 4, 100)
    for newcomer in (Entry(modest, 0, 1.0, 1), Entry(hog, 0, 1.0, 1), Entry(modest, 1, 1.0, 1)):
        with pytest.raises(QueueFull):
            queue.push(newcomer, 4, 100)
    urgent = queue.push(Entry(hog, -1, 1.0, 1), 4, 100)
    assert urgent is not None
    assert len(queue) == 4


class QueueMachine(RuleBasedStateMachine):
    """Everything that goes in comes out once, however; bounds hold; nothing starves."""

    MAX_ENTRIES, MAX_BYTES = 12, 60

    @initialize()
    def begin(self) -> None:
        self.queue: FairQueue[Entry] = FairQueue()
        self.accounts = [
            account(f"a{number}", weight=weight) for number, weight in enumerate((0.5, 1.0, 4.0))
        ]
        self.inside: list[Entry] = []
        self.passed_by: dict[Entry, int] = {}

    @rule(
        number=st.integers(0, 2), priority=st.integers(-1, 1), cost=st.floats(1, 50), size=st.integers(0, 70)
    )
    def push(self, number: int, priority: int, cost: float, size: int) -> None:
        entry = Entry(self.accounts[number], priority, cost, size)
        try:
            out = self.queue.push(entry, self.MAX_ENTRIES, self.MAX_BYTES)
        except QueueFull:
            assert len(self.inside) == self.MAX_ENTRIES or self.queue.bytes + size > self.MAX_BYTES
            return
        if out is not None:
            assert out.priority >= priority
            self.inside.remove(out)
        self.inside.append(entry)
        self.passed_by[entry] = 0

    @rule()
    def pop(self) -> None:
        if not self.inside:
            return
        entry = self.queue.pop()
        self.inside.remove(entry)
        assert entry.priority == min([entry.priority, *(other.priority for other in self.inside)])
        for other in self.inside:
            if other.account is entry.account and other.priority == entry.priority:
                assert self.arrival(entry) < self.arrival(other), "first come, first served within an account"
            if other.priority == entry.priority:
                self.passed_by[other] += 1
                assert self.passed_by[other] <= 12 + 2 * 50 * 4.0 / 0.5, "waited for ever among equals"

    def arrival(self, entry: Entry) -> int:
        return list(self.passed_by).index(entry)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.inside:
            entry = self.inside.pop(data.draw(st.integers(0, len(self.inside) - 1)))
            self.queue.remove(entry)

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert len(self.queue) == len(self.inside) <= self.MAX_ENTRIES
        assert self.queue.bytes == sum(entry.size for entry in self.inside) <= self.MAX_BYTES
        assert self.queue.oldest is (self.inside[0] if self.inside else None)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


# the queue of a service


class Told(QueuedRequest):
    """Remembers what it was told."""

    def __init__(self, owner: Account, priority: int = 0, size: int = 1, sequences: int = 1) -> None:
        super().__init__(owner, priority, 1.0, size, "", sequences)
        self.told: list[str | ApiError] = []

    def admit(self) -> None:
        self.told.append("admit")
        FakeReplicas.current.requests += self.sequences

    def refuse(self, error: ApiError) -> None:
        self.told.append(error)


class FakeReplicas:
    """So many seats; None: no replica."""

    current: FakeReplicas

    def __init__(self, seats: int | None) -> None:
        self.seats = seats
        self.requests = 0
        FakeReplicas.current = self

    def room(self, now: float, name: str = "") -> int:
        if self.seats is None:
            raise Unavailable("none")
        return self.seats - self.requests


def service_queue_of(
    replicas: FakeReplicas, *, queue_s: float = 60.0, hold_s: float = 0.0, entries: int = 100
) -> ServiceQueue:
    return ServiceQueue("tiny", replicas.room, lambda: Bounds(entries, 1000, queue_s, hold_s), 0.0)


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
    queue.enqueue(waiter, 0.0)
    queue.tick(0.1)
    assert waiter.told == []
    end(queue, replicas, 0.2)
    assert waiter.told == ["admit"]
    assert (queue.active, queue.num_queued) == (2, 0)


def test_nobody_overtakes_those_who_wait() -> None:
    replicas = FakeReplicas(1)
    queue = service_queue_of(replicas)
    assert enter(queue, replicas, 0.0)
    queue.enqueue(Told(account()), 0.0)
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
        queue.enqueue(waiter, 10.0)
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
        queue.enqueue(Told(account()), 50.0)
    with pytest.raises(TooManyRequests) as refused:
        queue.enqueue(Told(account()), 50.0)
    assert refused.value.retry_after_s == pytest.approx(10 / 2, rel=0.1)
    with pytest.raises(TooManyRequests) as refused:
        queue.enqueue(Told(account()), 500.0)
    assert refused.value.retry_after_s == MAX_RETRY_AFTER_S, "nothing has ended for a long time"


def test_without_replicas_requests_are_refused_or_held() -> None:
    with pytest.raises(Unavailable):
        service_queue_of(FakeReplicas(None)).enqueue(Told(account()), 0.0)
    replicas = FakeReplicas(None)
    queue = service_queue_of(replicas, hold_s=300.0)
    assert not queue.try_admit(0.0)
    held, late = Told(account()), Told(account())
    queue.enqueue(held, 0.0)
    queue.enqueue(late, 200.0)
    queue.tick(299.0)
    assert held.told == []
    queue.tick(300.0)
    assert isinstance(held.told[0], Unavailable)
    replicas.seats = 1
    queue.tick(301.0)
    assert late.told == ["admit"]


def test_those_held_get_the_queue_s_time_once_there_is_a_replica() -> None:
    replicas = FakeReplicas(None)
    queue = service_queue_of(replicas, queue_s=60.0, hold_s=300.0)
    held = Told(account())
    queue.enqueue(held, 0.0)
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
    queue.enqueue(held, 0.0)
    for second in range(1, 14):
        assert held.told == []
        replicas.seats = None if second % 2 else 0
        queue.tick(float(second))
    assert held.told


def test_losing_all_replicas_ends_the_waiting_where_nothing_is_held() -> None:
    replicas = FakeReplicas(0)
    queue = service_queue_of(replicas)
    waiter = Told(account())
    queue.enqueue(waiter, 0.0)
    replicas.seats = None
    queue.tick(1.0)
    assert isinstance(waiter.told[0], Unavailable)


class ServiceQueueMachine(RuleBasedStateMachine):
    """Whatever happens, each request is told one thing or has left, and what is admitted ends once."""

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
        if self.queue.try_admit(self.now, "", sequences):
            if self.replicas.seats is None:  # the last look is a moment old
                self.queue.retract(self.now, sequences)
                return
            self.replicas.requests += sequences
            self.admitted.append(sequences)
            return
        waiter = Told(self.accounts[number], priority, sequences=sequences)
        try:
            self.queue.enqueue(waiter, self.now)
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
            self.queue.remove(waiter)
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
                self.admitted += [waiter.sequences] * (waiter.told[0] == "admit")
                self.waiting.remove(waiter)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "queue"):
            assert self.queue.num_queued == len(self.waiting)
            assert self.queue.active == len(self.admitted)
            assert self.queue.sequences == sum(self.admitted) == self.replicas.requests
            assert all(self.now - waiter.since < 5.0 + 8.0 for waiter in self.waiting)


TestServiceQueue = ServiceQueueMachine.TestCase
TestServiceQueue.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
