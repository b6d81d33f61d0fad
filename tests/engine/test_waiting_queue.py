"""The waiting queue: tenants take turns, so one that queues much delays only itself."""

from __future__ import annotations

import weakref
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy_engine.core.kv_cache_manager import KVCacheManager
from argosy_engine.core.request import Request
from argosy_engine.core.scheduler import Scheduler
from argosy_engine.core.waiting_queue import MAX_IDLE_COUNTERS, LazyHeap, WaitingQueue
from argosy_engine.messages import EngineCoreRequest
from argosy_engine.params import SamplingParams
from fake_worker import FakeWorker

BLOCK, BUDGET = 4, 32


class Name(str):
    """A string with weak references."""

    __slots__ = ("__weakref__",)


def test_a_heap_does_not_keep_what_was_removed() -> None:
    """Entries stay in it until they come first, and what waits may be large."""
    heap = LazyHeap[str]()
    first, second = Name("a"), Name("b")
    heap.set(first, (1,))
    heap.set(second, (2,))
    removed = weakref.ref(second)
    heap.remove(second)
    del second
    assert removed() is None
    assert heap.first() is first


class Waiting:
    """A queue, and requests that are admitted one after the other."""

    def __init__(self) -> None:
        self.queue = WaitingQueue(8)
        self._count = 0

    def new(self, tenant: str, num_tokens: int = 10, priority: int = 0) -> Request:
        self._count += 1
        message = EngineCoreRequest(str(self._count), [1] * num_tokens, SamplingParams(), 0.0, tenant=tenant)
        request = Request(message, BLOCK, False)
        request.queue_key = (priority, 0, self._count)
        return request

    def push(self, tenant: str, num_tokens: int = 10, priority: int = 0) -> Request:
        request = self.new(tenant, num_tokens, priority)
        self.queue.push(request)
        return request

    def admit(self) -> Request:
        request = self.queue.peek()
        assert request is not None
        self.queue.admit(request, request.num_prompt_tokens)
        self.queue.remove(request)
        return request

    def admit_all(self) -> list[str]:
        return [self.admit().tenant for _ in range(len(self.queue))]


def test_removals_from_the_middle_leave_few_entries_behind() -> None:
    waiting, queue = Waiting(), LazyHeap[Request]()
    requests = [waiting.push("a") for _ in range(5000)]
    for request in requests:
        queue.set(request, request.queue_key)
    for request in requests[:4990]:
        queue.remove(request)
    assert queue.num_entries < 100
    assert queue.first() is requests[4990]


def test_one_tenant_is_served_in_the_order_of_arrival() -> None:
    waiting = Waiting()
    requests = [waiting.push("a", tokens) for tokens in (5, 100, 1, 7)]
    assert [waiting.admit() for _ in requests] == requests
    assert waiting.queue.peek() is None


def test_tenants_alternate_by_tokens_not_by_requests() -> None:
    waiting = Waiting()
    for _ in range(4):
        waiting.push("long", 100)
    for _ in range(8):
        waiting.push("short", 50)
    assert waiting.admit_all() == ["long", "short", "short", *["long", "short", "short"] * 3]


def test_a_newcomer_goes_before_what_others_have_queued_but_not_again_and_again() -> None:
    waiting = Waiting()
    for _ in range(10):
        waiting.push("crowd", 100)
    waiting.admit()
    waiting.push("newcomer", 100)
    waiting.push("newcomer", 100)
    assert waiting.admit_all()[:4] == ["newcomer", "crowd", "newcomer", "crowd"]


def test_idling_earns_nothing() -> None:
    waiting = Waiting()
    waiting.push("idle", 10)
    waiting.admit()
    for _ in range(50):
        waiting.push("busy", 10)
        waiting.admit()
    for _ in range(4):
        waiting.push("busy", 10)
        waiting.push("idle", 10)
    assert Counter(waiting.admit().tenant for _ in range(4)) == {"busy": 2, "idle": 2}


def test_generated_tokens_count() -> None:
    waiting = Waiting()
    waiting.push("writer", 10)
    waiting.admit()
    waiting.queue.charge("writer", 1000)
    for _ in range(3):
        waiting.push("writer", 10)
        waiting.push("reader", 100)
    assert waiting.admit_all() == ["reader"] * 3 + ["writer"] * 3


def test_priority_comes_first() -> None:
    waiting = Waiting()
    waiting.push("a", 10, priority=1)
    waiting.push("b", 10, priority=0)
    waiting.push("b", 1000, priority=0)
    assert waiting.admit_all() == ["b", "b", "a"]


def test_counters_of_tenants_that_went_are_forgotten() -> None:
    waiting = Waiting()
    for number in range(3 * MAX_IDLE_COUNTERS):
        waiting.push(f"tenant {number}", 10)
        waiting.admit()
    for number in range(3 * MAX_IDLE_COUNTERS):
        waiting.queue.charge(f"debtor {number}", 1_000_000)
    assert waiting.queue.num_counters <= MAX_IDLE_COUNTERS + 1


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 200)), min_size=1, max_size=60),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 200)), max_size=60),
)
def test_no_tenant_gets_ahead_by_more_than_the_largest_requests(
    first: list[tuple[str, int]], later: list[tuple[str, int]]
) -> None:
    """Of tenants that wait all the time."""
    waiting = Waiting()
    for tenant, tokens in first:
        waiting.push(tenant, tokens)
    arrivals = iter(later)
    served: Counter[str] = Counter()
    largest = max(tokens for _, tokens in [*first, *later])
    backlogged = {tenant for tenant, _ in first}
    while len(waiting.queue):
        request = waiting.admit()
        served[request.tenant] += request.num_prompt_tokens
        backlogged &= {left.tenant for left in waiting.queue}
        if arrival := next(arrivals, None):
            waiting.push(*arrival)
        shares = [served[tenant] for tenant in backlogged]
        assert max(shares, default=0) - min(shares, default=0) <= 2 * largest


def test_a_request_that_has_run_keeps_its_place() -> None:
    """A stream that was preempted must not wait until other tenants have caught up with what it was charged."""
    waiting = Waiting()
    stream = waiting.push("writer", 10)
    assert waiting.admit() is stream
    stream.num_cached_tokens = 0  # the scheduler has admitted it
    for _ in range(3):
        waiting.push("reader", 10)
    urgent = waiting.push("reader", 10, priority=-1)
    waiting.queue.charge("writer", 8000)
    waiting.queue.push(stream)
    assert len(waiting.queue) == 5
    assert stream in list(waiting.queue)
    assert waiting.admit() is urgent
    assert waiting.admit() is stream
    assert waiting.admit_all() == ["reader"] * 3


def test_a_call_of_several_sequences_does_not_move_the_turns_of_others() -> None:
    """Its sequences take slots by the call's share, so its tenant's counter says nothing about turns."""
    waiting = Waiting()
    waiting.queue.charge("batches", 1_000_000)
    for _ in range(2):
        waiting.push("long", 100)
    for _ in range(20):
        waiting.push("short", 10)
    order = []
    while len(waiting.queue):
        sequence = waiting.new("batches", 10)
        sequence.call_id = "call"
        waiting.queue.admit(sequence, 10)
        order.append(waiting.admit().tenant)
    assert order == ["long", *["short"] * 10, "long", *["short"] * 10]


def test_a_newcomer_starts_with_those_that_wait_not_with_a_more_urgent_tenant() -> None:
    waiting = Waiting()
    waiting.push("urgent", 10, priority=-1)
    waiting.queue.charge("urgent", 1_000_000)
    waiting.push("patient", 10)
    waiting.push("patient", 10)
    assert waiting.admit().tenant == "urgent"
    waiting.push("newcomer", 10)
    assert waiting.admit_all() == ["patient", "newcomer", "patient"]


def test_a_newcomer_does_not_profit_from_a_less_urgent_tenant_that_starves() -> None:
    waiting = Waiting()
    waiting.push("starved", 10, priority=1)
    for _ in range(10):
        waiting.push("busy", 10)
        waiting.admit()
    for _ in range(3):
        waiting.push("busy", 10)
        waiting.push("newcomer", 10)
    assert Counter(waiting.admit().tenant for _ in range(4)) == {"busy": 2, "newcomer": 2}


def test_waiting_with_a_request_that_is_not_urgent_earns_nothing() -> None:
    waiting = Waiting()
    waiting.push("parked", 10, priority=1_000_000)
    for _ in range(100):
        waiting.push("busy", 10)
        waiting.admit()
    for _ in range(20):
        waiting.push("busy", 10)
        waiting.push("parked", 10)
    assert Counter(waiting.admit().tenant for _ in range(20)) == {"busy": 10, "parked": 10}


def test_a_tenant_that_sent_only_batches_is_charged_from_the_present_level() -> None:
    waiting = Waiting()
    for _ in range(10):
        waiting.push("busy", 10)
        waiting.admit()
    sequence = waiting.new("batches", 10)
    sequence.call_id = "call"
    waiting.queue.admit(sequence, 10)
    assert waiting.queue.counter("batches") == waiting.queue.counter("busy")


def test_the_largest_debts_are_kept() -> None:
    waiting = Waiting()
    for number in range(3 * MAX_IDLE_COUNTERS):
        waiting.queue.charge(f"tenant {number}", number)
    debtor = f"tenant {3 * MAX_IDLE_COUNTERS - 1}"
    assert waiting.queue.counter(debtor) == 3 * MAX_IDLE_COUNTERS - 1
    assert waiting.queue.counter("tenant 1") == 0
    assert waiting.queue.num_counters <= MAX_IDLE_COUNTERS


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 60), st.integers(0, 2)), max_size=80))
def test_the_next_request_is_that_of_the_lowest_rank(events: list[tuple[str, int, int]]) -> None:
    """The heap of ranks agrees with a search over all that wait, whatever is pushed, charged, removed and admitted."""
    waiting, present = Waiting(), list[Request]()
    for tenant, number, priority in events:
        if number < 35:
            present.append(waiting.push(tenant, number + 1, priority))
        elif number < 45:
            waiting.queue.charge(tenant, number)
        elif present and number < 50:
            waiting.queue.remove(present.pop(number % len(present)))
        elif present:
            present.remove(waiting.admit())
        heads: dict[str, Request] = {}
        for request in sorted(present, key=lambda request: request.queue_key):
            heads.setdefault(request.tenant, request)
        expected = min(
            heads.values(),
            key=lambda head: (head.queue_key[0], waiting.queue.counter(head.tenant), head.queue_key),
            default=None,
        )
        assert waiting.queue.peek() is expected
        assert len(waiting.queue) == len(present)


def test_each_token_is_charged_once_however_often_a_request_is_preempted() -> None:
    scheduler = Scheduler(
        KVCacheManager(14, BLOCK, False, 0.0),
        max_num_batched_tokens=BUDGET,
        max_num_seqs=8,
        max_model_len=64,
        eos_token_ids=frozenset(),
    )
    worker = FakeWorker(BLOCK)
    requests = []
    for number in range(3):
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        message = EngineCoreRequest(str(number), [1] * 8, params, 0.0, tenant="writer")
        requests.append(Request(message, BLOCK, False))
        scheduler.add(requests[-1])
    while scheduler.has_work:
        planned = scheduler.schedule()
        scheduler.update_from_output(planned, worker.execute(planned))
        scheduler.check()
    assert scheduler.num_preemptions > 2
    assert scheduler.waiting.counter("writer") == 3 * (8 + 24)


def test_a_tenant_s_short_prompt_does_not_wait_for_another_s_long_ones() -> None:
    scheduler = Scheduler(
        KVCacheManager(4096, BLOCK, False, 0.0),
        max_num_batched_tokens=BUDGET,
        max_num_seqs=64,
        max_model_len=4096,
        eos_token_ids=frozenset(),
    )
    worker = FakeWorker(BLOCK)

    def add(name: str, tenant: str, num_tokens: int) -> None:
        message = EngineCoreRequest(name, [1] * num_tokens, SamplingParams(max_tokens=1), 0.0, tenant=tenant)
        scheduler.add(Request(message, BLOCK, False))

    def step() -> list[str]:
        planned = scheduler.schedule()
        return [
            output.request_id for output in scheduler.update_from_output(planned, worker.execute(planned))
        ]

    for number in range(8):
        add(f"long {number}", "crowd", 10 * BUDGET)
    step()
    add("canary", "another", 8)
    order: list[str] = []
    while scheduler.has_work:
        order += step()
        scheduler.check()
    assert order.index("canary") <= 1, "only the prompt that had begun may come first"
    assert len(order) == 9


@pytest.mark.parametrize("error", [None, "failed"])
def test_what_tenants_were_charged_survives_a_rebuild(error: str | None) -> None:
    scheduler = Scheduler(
        KVCacheManager(256, BLOCK, False, 0.0),
        max_num_batched_tokens=BUDGET,
        max_num_seqs=2,
        max_model_len=256,
        eos_token_ids=frozenset(),
    )
    worker = FakeWorker(BLOCK)

    def add(name: str, tenant: str, num_tokens: int) -> None:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        message = EngineCoreRequest(name, [1] * num_tokens, params, 0.0, tenant=tenant)
        scheduler.add(Request(message, BLOCK, False))

    for number in range(6):
        add(f"many {number}", "many", 16)
    add("few", "few", 4)
    for _ in range(3):
        planned = scheduler.schedule()
        scheduler.update_from_output(planned, worker.execute(planned))
    tenants = "many", "few"
    num_output = sum(request.num_output_tokens for request in scheduler.running)
    before = [scheduler.waiting.counter(tenant) for tenant in tenants]
    assert before[0] != before[1]
    assert num_output
    scheduler.rebuild(error)
    scheduler.check()
    after = [scheduler.waiting.counter(tenant) for tenant in tenants]
    assert sum(after) == sum(before) + num_output, "and the output of what ran is charged"
