"""Turns of calls: one of many sequences yields running slots to other calls (`core.waiting_queue`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from argosy_engine.core.kv_cache_manager import KVCacheManager
from argosy_engine.core.request import Request
from argosy_engine.core.scheduler import Scheduler, SchedulingPolicy
from argosy_engine.messages import EngineCoreRequest
from argosy_engine.params import SamplingParams
from fake_worker import FakeWorker

BLOCK, SLOTS, LONG = 4, 8, 60


class Engine:
    """A scheduler and a worker without a model; counts tokens per request."""

    def __init__(
        self,
        *,
        max_num_seqs: int = SLOTS,
        policy: SchedulingPolicy = "fcfs",
        enable_prefix_caching: bool = True,
    ) -> None:
        self.scheduler = Scheduler(
            KVCacheManager(1 << 11, BLOCK, enable_prefix_caching, 0.0),
            max_num_batched_tokens=256,
            max_num_seqs=max_num_seqs,
            max_model_len=4096,
            eos_token_ids=frozenset(),
            policy=policy,
        )
        self.worker = FakeWorker(BLOCK)
        self.outputs: dict[str, list[int]] = {}
        self.num_computed = 0
        self._prompts = itertools.count(1)

    def add(self, name: str, max_tokens: int = 2, call_id: str = "", priority: int = 0) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        prompt = [next(self._prompts)] * 10
        message = EngineCoreRequest(name, prompt, params, 0.0, priority=priority, call_id=call_id)
        self.scheduler.add(Request(message, BLOCK, self.scheduler.kv.enable_prefix_caching))

    def add_call(self, name: str, num_sequences: int, max_tokens: int = LONG, priority: int = 0) -> list[str]:
        names = [f"{name}{number}" for number in range(num_sequences)]
        for sequence in names:
            self.add(sequence, max_tokens, name, priority)
        return names

    def step(self) -> None:
        step = self.scheduler.schedule()
        assert len(self.scheduler.running) <= self.scheduler.max_num_seqs
        self.num_computed += step.total_num_scheduled_tokens
        result = self.worker.execute(step)
        if step.num_scheduled_tokens:
            for output in self.scheduler.update_from_output(step, result):
                self.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
        self.scheduler.check()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def steps_until(self, name: str) -> int:
        """Steps until the request has its first token."""
        count = 0
        while name not in self.outputs:
            self.step()
            count += 1
        return count

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def slots(self, call: str) -> int:
        return sum(request.request_id.startswith(call) for request in self.scheduler.running)


@pytest.mark.parametrize("num_calls", [1, 2, 4, SLOTS])
def test_a_request_finds_a_slot_though_calls_of_many_sequences_hold_them_all(num_calls: int) -> None:
    engine = Engine()
    for number in range(num_calls):
        engine.add_call(f"greedy-{number}-", 9)
    engine.steps(5)
    assert len(engine.scheduler.running) == SLOTS
    engine.add("canary")
    if num_calls < SLOTS:
        assert engine.steps_until("canary") <= 2
    else:  # every call holds one slot, so the canary waits for the first sequence that ends
        assert engine.steps_until("canary") <= LONG + 1


def test_sequences_that_yield_are_those_of_calls_with_several() -> None:
    engine = Engine()
    engine.add("single")
    engine.add_call("call", 20, max_tokens=3)
    assert engine.scheduler.waiting.num_yielding == 20
    engine.steps(1)
    assert len(engine.scheduler.running) == SLOTS
    assert engine.scheduler.waiting.num_yielding == 20
    engine.steps(40)
    assert engine.scheduler.waiting.num_yielding == 0


def test_a_call_that_arrives_gets_as_many_slots_as_one_that_holds_them_all() -> None:
    engine = Engine()
    engine.add_call("first", 64)
    engine.steps(5)
    engine.add_call("second", 64)
    engine.steps(SLOTS)
    assert (engine.slots("first"), engine.slots("second")) == (SLOTS // 2, SLOTS // 2)
    preemptions = engine.scheduler.num_preemptions
    engine.steps(30)
    assert engine.scheduler.num_preemptions == preemptions == SLOTS // 2


def test_calls_of_several_sequences_keep_half_of_the_slots_while_others_keep_coming() -> None:
    engine = Engine()
    engine.add_call("call", 20)
    engine.steps(5)
    for number in range(200):
        engine.add(f"single{number}", 20)
    engine.steps(SLOTS)
    preemptions = engine.scheduler.num_preemptions
    for _ in range(30):
        engine.step()
        assert engine.slots("call") == SLOTS // 2
    assert engine.scheduler.num_preemptions == preemptions


def test_a_call_alone_takes_every_slot_and_gets_them_back() -> None:
    engine = Engine()
    engine.add_call("call", 20)
    engine.steps(5)
    assert engine.slots("call") == SLOTS
    engine.add("canary")
    engine.steps_until("canary")
    engine.steps(4)
    assert engine.slots("call") == SLOTS


def test_requests_of_one_sequence_never_take_each_others_slots() -> None:
    engine, names = Engine(), "abcdefghijkl"
    for name in names:
        engine.add(name, 20)
    engine.finish()
    assert engine.scheduler.num_preemptions == 0
    assert list(engine.outputs) == list(names)


def test_a_sequence_that_yielded_its_slot_computes_little_again() -> None:
    """The prefix cache holds what it had: a step of one block at most, for each request that takes a slot."""
    alone, shared = Engine(), Engine()
    for engine in (alone, shared):
        engine.add_call("call", SLOTS)
        engine.steps(30)
    num_others = 8
    for number in range(num_others):
        shared.add(f"other{number}", 1)
        shared.steps(3)
    for engine in (alone, shared):
        engine.finish()
    assert shared.scheduler.num_preemptions == num_others
    again = shared.num_computed - alone.num_computed - num_others * 10
    assert 0 <= again <= num_others * BLOCK
    assert all(shared.outputs[name] == tokens for name, tokens in alone.outputs.items())


@pytest.mark.parametrize(
    ("priority", "gives_way"), [(-1, True), (0, True), (1, False)], ids=["more", "as", "less"]
)
def test_only_what_is_not_more_urgent_gives_its_slot_up(priority: int, *, gives_way: bool) -> None:
    engine = Engine(policy="priority")
    engine.add_call("call", 16)
    engine.steps(5)
    engine.add("canary", priority=priority)
    assert (engine.steps_until("canary") <= 2) == gives_way


def test_the_only_slot_of_an_engine_is_never_yielded() -> None:
    engine = Engine(max_num_seqs=1)
    names = [*engine.add_call("call", 3, max_tokens=5), "canary"]
    engine.add("canary", 5)
    engine.finish()
    assert engine.scheduler.num_preemptions == 0
    assert set(engine.outputs) == set(names)


def events(seed: int) -> Iterator[int]:
    """Numbers that look random, the same everywhere."""
    while True:
        seed = (seed * 1103515245 + 12345) % (1 << 31)
        yield seed >> 8


@pytest.mark.parametrize(
    "seed", [1, 3, 6, *(pytest.param(seed, marks=pytest.mark.full) for seed in (0, 2, 4, 5, 7, 8, 9))]
)
def test_every_sequence_of_every_call_ends(seed: int) -> None:
    """Calls of all sizes, single requests and aborts in any order: none is lost, and every counted slot is held."""
    engine, choose = Engine(enable_prefix_caching=seed % 2 == 0), events(seed)
    expected: dict[str, int] = {}
    for number in range(30):
        max_tokens = 1 + next(choose) % 15
        match next(choose) % 4:
            case 0:
                names = engine.add_call(f"call{number}-", 2 + next(choose) % 20, max_tokens)
                expected |= dict.fromkeys(names, max_tokens)
            case 1 if expected:
                name = list(expected)[next(choose) % len(expected)]
                engine.scheduler.abort([name])
                del expected[name]
            case _:
                engine.add(f"single{number}", max_tokens)
                expected[f"single{number}"] = max_tokens
        engine.steps(next(choose) % 4)
    engine.finish()
    assert {name: len(engine.outputs[name]) for name in expected} == expected
    engine.scheduler.check()
