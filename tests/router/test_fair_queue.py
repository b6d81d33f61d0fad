"""The fair queue: order by priority, shares by weight, and its bounds."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from argosy_router.auth.accounts import Account
from argosy_router.fair_queue import MAX_PRIORITIES, MIN_FLOWS, Entry, FairQueue, QueueFull

from .accounts import account

UNBOUNDED = (1 << 30, 1 << 30)


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


def test_an_account_has_so_many_priorities_at_a_time_and_others_are_not_touched() -> None:
    """Each look for the next entry went through all of them: with four thousand of one key a tick of the queue took a
    fifth of a second."""
    queue: FairQueue[Entry] = FairQueue()
    one, other = account("one"), account("other")
    entries = [Entry(one, 10 * number, 1.0, 1) for number in range(MAX_PRIORITIES)]
    further = [Entry(one, asked, 1.0, 1) for asked in (-1, 15, 20, 10**6)]
    foreign = [Entry(other, 15, 1.0, 1), Entry(other, 10**6, 1.0, 1)]
    for entry in [*entries, *further, *foreign]:
        queue.push(entry, *UNBOUNDED)
    last = 10 * (MAX_PRIORITIES - 1)
    assert [entry.priority for entry in further] == [0, 20, 20, last]
    assert [entry.priority for entry in foreign] == [15, 10**6]
    order = drain(queue)
    assert order[:6] == [entries[0], further[0], entries[1], foreign[0], entries[2], further[1]]
    assert order[-3:] == [entries[-1], further[3], foreign[1]]
    again = Entry(one, 3, 1.0, 1)
    queue.push(again, *UNBOUNDED)
    assert again.priority == 3


def test_idle_accounts_earn_no_credit() -> None:
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


@pytest.mark.parametrize("is_served", [True, False], ids=["served", "given up"])
def test_accounts_that_have_gone_are_forgotten(is_served: bool) -> None:
    queue: FairQueue[Entry] = FairQueue()
    staying = account("staying")
    queue.push(Entry(staying, 0, 1e9, 1), *UNBOUNDED)
    most = 0
    for number in range(2000):
        entry = Entry(account(f"a{number}"), 0, 1.0, 1)
        queue.push(entry, *UNBOUNDED)
        if is_served:
            queue.take(entry)
            another = Entry(staying, 0, 1.0, 1)  # time passes
            queue.push(another, *UNBOUNDED)
            queue.take(another)
        else:
            queue.remove(entry)
        most = max(most, queue.num_accounts)
    assert most <= 2 * MIN_FLOWS
    assert len(queue) == 1


def test_an_account_that_is_ahead_stays_so_while_others_come_and_go() -> None:
    queue: FairQueue[Entry] = FairQueue()
    ahead, behind = account("ahead"), account("behind")
    large = Entry(ahead, 0, 100.0, 1)
    queue.push(Entry(behind, 0, 1.0, 1), *UNBOUNDED)
    queue.push(large, *UNBOUNDED)
    queue.take(large)
    for number in range(3 * MIN_FLOWS):
        passing = Entry(account(f"a{number}"), 0, 1.0, 1)
        queue.push(passing, *UNBOUNDED)
        queue.remove(passing)
    queue.push(Entry(ahead, 0, 1.0, 1), *UNBOUNDED)
    for _ in range(5):
        queue.push(Entry(behind, 0, 1.0, 1), *UNBOUNDED)
    assert [entry.account.name for entry in drain(queue)] == ["behind"] * 6 + ["ahead"]


def test_a_full_queue_evicts_for_accounts_with_fewer_entries() -> None:
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


def test_a_queue_out_of_bytes_evicts_for_accounts_with_fewer_bytes() -> None:
    queue: FairQueue[Entry] = FairQueue()
    hog, modest = account("hog"), account("modest")
    large = [Entry(hog, 0, 1.0, 30) for _ in range(3)]
    for entry in large:
        queue.push(entry, 100, 100)
    queue.push(Entry(hog, 0, 1.0, 1), 100, 100)
    for _ in range(9):
        queue.push(Entry(modest, 0, 1.0, 1), 100, 100)
    assert queue.bytes == 100
    assert queue.push(Entry(modest, 0, 1.0, 5), 100, 100) is large[-1], "its newest that is large enough"
    with pytest.raises(QueueFull):
        queue.push(Entry(hog, 0, 1.0, 30), 100, 100)
    with pytest.raises(QueueFull):
        queue.push(Entry(modest, 0, 1.0, 60), 100, 100)
    assert (queue.num_of(hog), queue.num_of(modest)) == (3, 10)


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
