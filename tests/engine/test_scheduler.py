"""The scheduler without a model: budgets, fairness, preemption, stops, and no request left behind."""

from __future__ import annotations

from collections import deque
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from argosy_engine.attention.kv_cache_spec import (
    ChunkedAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from argosy_engine.core.kv_cache_manager import KVCacheManager
from argosy_engine.core.request import Request, RequestStatus
from argosy_engine.core.scheduler import MAX_PREEMPTIONS_FOR_SLOTS, Scheduler
from argosy_engine.messages import (
    ChunkEnd,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
)
from argosy_engine.params import SamplingParams
from fake_worker import FakeWorker, next_token

BLOCK = 4
EOS = 0


def make(num_blocks: int = 64, caching: bool = True, **changes: int | float | str) -> Scheduler:
    settings_: dict[str, Any] = {
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
        "max_model_len": 64,
        "watermark": 0.0,
        **changes,
    }
    kv = KVCacheManager(num_blocks, BLOCK, caching, settings_.pop("watermark"))
    return Scheduler(kv, eos_token_ids=frozenset({EOS}), **settings_)


def request(
    name: str,
    prompt: list[int],
    max_tokens: int = 4,
    chunk_ends: list[ChunkEnd] | None = None,
    priority: int = 0,
    **params: object,
) -> Request:
    fields = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    message = EngineCoreRequest(name, prompt, fields, 0.0, chunk_ends=chunk_ends or [], priority=priority)
    return Request(message, BLOCK, True)


def run_step(scheduler: Scheduler, token: int = 9) -> tuple[SchedulerOutput, list[EngineCoreOutput]]:
    """One step with a model that always says `token`."""
    step = scheduler.schedule()
    sampled = []
    for request_id in step.num_scheduled_tokens:
        live = scheduler.requests[request_id]
        sampled.append([token] if live.num_computed_tokens >= live.num_tokens else [])
    return step, scheduler.update_from_output(
        step, ModelRunnerOutput(list(step.num_scheduled_tokens), sampled)
    )


def run_all(scheduler: Scheduler, limit: int = 500) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for _ in range(limit):
        if not scheduler.has_work:
            return tokens
        for output in run_step(scheduler)[1]:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        scheduler.check()
    pytest.fail("the scheduler does not come to an end")


def test_prompts_share_the_budget_and_long_ones_are_chunked() -> None:
    scheduler = make(max_num_batched_tokens=10)
    scheduler.add(request("a", [1] * 6))
    scheduler.add(request("b", [2] * 20))
    assert run_step(scheduler)[0].num_scheduled_tokens == {"a": 6, "b": 4}
    assert run_step(scheduler)[0].num_scheduled_tokens == {"a": 1, "b": 9}
    assert run_step(scheduler)[0].num_scheduled_tokens == {"a": 1, "b": 7}


def test_a_decode_waits_for_few_prompt_tokens_only() -> None:
    scheduler = make(max_num_mixed_prefill_tokens=8)
    scheduler.add(request("a", [1] * 20, max_tokens=9))
    assert run_step(scheduler)[0].num_scheduled_tokens == {"a": 20}, "nobody decodes yet"
    scheduler.add(request("b", [2] * 13, max_tokens=1))
    scheduler.add(request("c", [3] * 5, max_tokens=1))
    assert run_step(scheduler)[0].num_scheduled_tokens == {"a": 1, "b": 8}
    assert run_step(scheduler)[0].num_scheduled_tokens == {"a": 1, "b": 5, "c": 3}
    assert run_step(scheduler)[0].num_scheduled_tokens == {"a": 1, "c": 2}
    whole = make(max_num_mixed_prefill_tokens=8, enable_chunked_prefill=False)
    whole.add(request("a", [1] * 20, max_tokens=9))
    run_step(whole)
    whole.add(request("b", [2] * 13))
    assert run_step(whole)[0].num_scheduled_tokens == {"a": 1, "b": 13}


def test_long_prefill_threshold_leaves_room_for_others() -> None:
    scheduler = make(long_prefill_token_threshold=5)
    scheduler.add(request("long", [1] * 40))
    scheduler.add(request("short", [2] * 3))
    assert run_step(scheduler)[0].num_scheduled_tokens == {"long": 5, "short": 3}


def test_num_seqs_bounds_what_runs() -> None:
    scheduler = make(max_num_seqs=2)
    for name in "abc":
        scheduler.add(request(name, [1, 2, 3]))
    assert set(run_step(scheduler)[0].num_scheduled_tokens) == {"a", "b"}
    assert len(scheduler.waiting) == 1


@pytest.mark.parametrize(
    ("token", "params", "reason", "stop_reason", "count"),
    [
        (EOS, {}, FinishReason.STOP, None, 1),
        (EOS, {"ignore_eos": True, "max_tokens": 3}, FinishReason.LENGTH, None, 3),
        (7, {"stop_token_ids": (7,)}, FinishReason.STOP, 7, 1),
        (9, {"max_tokens": 2}, FinishReason.LENGTH, None, 2),
        (9, {"max_tokens": 1000}, FinishReason.LENGTH, None, 61),
    ],
)
def test_stop_conditions(
    token: int, params: dict[str, object], reason: FinishReason, stop_reason: int | None, count: int
) -> None:
    scheduler = make()
    scheduler.add(request("a", [1, 2, 3], **params))  # type: ignore[arg-type]
    outputs = []
    while scheduler.has_work:
        outputs += run_step(scheduler, token)[1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (reason, stop_reason)
    assert sum(len(output.new_token_ids) for output in outputs) == count
    assert scheduler.kv.usage == 0.0


def test_a_second_request_hits_the_prefix_of_the_first() -> None:
    scheduler = make()
    scheduler.add(request("a", list(range(10, 26))))
    run_all(scheduler)
    scheduler.add(request("b", list(range(10, 26))))
    step, outputs = run_step(scheduler)
    # The last token must run to give logits, so of 16 tokens 12 come from the cache.
    assert step.num_scheduled_tokens == {"b": 4}
    assert step.new_requests[0].num_computed_tokens == 12
    assert outputs[0].prefill_stats is not None
    assert outputs[0].prefill_stats.num_cached_tokens == 12


def test_salts_do_not_share_prefixes() -> None:
    scheduler = make()
    for name, salt in (("a", None), ("b", "tenant"), ("c", "tenant")):
        message = EngineCoreRequest(name, [5] * 12, SamplingParams(max_tokens=1), 0.0, cache_salt=salt)
        scheduler.add(Request(message, BLOCK, True))
        _, outputs = run_step(scheduler)
        assert outputs[0].prefill_stats is not None
        assert outputs[0].prefill_stats.num_cached_tokens == (8 if name == "c" else 0)


def test_the_newest_request_is_preempted_and_still_finishes() -> None:
    scheduler = make(num_blocks=9, caching=False)
    scheduler.add(request("a", [1] * 14, max_tokens=12))
    scheduler.add(request("b", [2] * 14, max_tokens=12))
    tokens = run_all(scheduler)
    assert {name: len(ids) for name, ids in tokens.items()} == {"a": 12, "b": 12}


@pytest.mark.parametrize(
    "spec", [FullAttentionSpec(0), SlidingWindowSpec(0, 48), ChunkedAttentionSpec(0, 120)], ids=str
)
@pytest.mark.parametrize("threshold", [0, 16, 24])
def test_prompts_in_chunks_are_admitted_only_beside_what_those_before_them_still_take(
    threshold: int, spec: KVCacheSpec
) -> None:
    kv = KVCacheManager(101, BLOCK, True, specs=[spec], max_num_batched_tokens=64)
    scheduler = Scheduler(
        kv,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        max_model_len=400,
        eos_token_ids=frozenset({EOS}),
        long_prefill_token_threshold=threshold,
    )
    for index in range(4):
        scheduler.add(request(str(index), [index + 1] * 240, max_tokens=2))
    num_computed = 0
    while scheduler.has_work:
        num_computed += run_step(scheduler)[0].total_num_scheduled_tokens
        scheduler.check()
    assert (scheduler.num_preemptions, num_computed) == (0, 4 * 241)
    assert kv.pool.num_reserved_blocks == 0


def test_blocks_reserved_for_a_request_that_ends_early_are_free_again() -> None:
    scheduler = make(num_blocks=17, max_num_batched_tokens=8)
    scheduler.add(request("a", [1] * 56))
    scheduler.add(request("b", [2] * 40))
    assert list(run_step(scheduler)[0].num_scheduled_tokens) == ["a"]
    scheduler.abort(["a"])
    assert list(run_step(scheduler)[0].num_scheduled_tokens) == ["b"]
    scheduler.rebuild()
    scheduler.check()
    assert run_all(scheduler).keys() == {"b"}


def test_a_request_that_can_never_fit_is_failed() -> None:
    scheduler = make(num_blocks=4)
    scheduler.add(request("huge", [1] * 40))
    scheduler.add(request("small", [2] * 4, max_tokens=2))
    outputs = []
    while scheduler.has_work:
        outputs += run_step(scheduler)[1]
    by_name = {output.request_id: output for output in outputs}
    assert by_name["huge"].finish_reason is FinishReason.ERROR
    assert "do not fit" in (by_name["huge"].error or "")
    assert by_name["small"].finish_reason is FinishReason.LENGTH


def test_a_request_aborted_while_its_step_runs_gives_no_output() -> None:
    scheduler = make()
    scheduler.add(request("a", [1, 2, 3]))
    step = scheduler.schedule()
    scheduler.abort(["a", "unknown"])
    assert scheduler.update_from_output(step, ModelRunnerOutput(["a"], [[9]])) == []
    assert scheduler.schedule().finished_request_ids == ["a"]
    scheduler.check()


def test_the_most_urgent_waiting_request_goes_first_and_ties_go_by_arrival() -> None:
    scheduler = make(policy="priority", max_num_seqs=1)
    for name, priority in (("late", 5), ("a", 0), ("b", 0), ("urgent", -1)):
        scheduler.add(request(name, [1, 2, 3], priority=priority, max_tokens=1))
    assert list(run_all(scheduler)) == ["urgent", "a", "b", "late"]


def test_first_come_first_served_ignores_priority() -> None:
    scheduler = make(max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 0)):
        scheduler.add(request(name, [1, 2, 3], priority=priority, max_tokens=1))
    assert list(run_all(scheduler)) == ["a", "b"]


def test_the_least_urgent_request_is_preempted_although_others_are_newer() -> None:
    scheduler = make(num_blocks=9, policy="priority", caching=False)
    scheduler.add(request("patient", [1] * 14, priority=1, max_tokens=12))
    run_step(scheduler)
    scheduler.add(request("urgent", [2] * 14, max_tokens=12))
    preempted = []
    while scheduler.has_work:
        step, _ = run_step(scheduler)
        preempted += step.finished_request_ids if scheduler.num_preemptions else []
        scheduler.check()
    assert preempted[0] == "patient"


def test_a_more_urgent_request_takes_the_slot_of_the_least_urgent() -> None:
    scheduler = make(policy="priority", max_num_seqs=3, caching=False)
    for name, priority in (("middle", 3), ("old", 5), ("new", 5)):
        scheduler.add(request(name, [1] * 5, priority=priority, max_tokens=9))
    run_step(scheduler)
    run_step(scheduler)
    scheduler.add(request("urgent", [2] * 3, priority=0, max_tokens=2))
    step, _ = run_step(scheduler)
    assert step.num_scheduled_tokens == {"middle": 1, "old": 1, "urgent": 3}
    assert (scheduler.num_preemptions, scheduler.num_recomputed_tokens) == (1, 0)
    run_step(scheduler)  # which ends the urgent one
    step, _ = run_step(scheduler)
    assert step.num_scheduled_tokens == {"middle": 1, "old": 1, "new": 7}
    assert (scheduler.num_preemptions, scheduler.num_recomputed_tokens) == (1, 6)
    assert {name: len(tokens) for name, tokens in run_all(scheduler).items()} == {
        "middle": 4,
        "old": 4,
        "new": 6,
    }


@pytest.mark.parametrize(("policy", "priority"), [("priority", 5), ("priority", 6), ("fcfs", 0)])
def test_a_request_that_is_not_more_urgent_waits_for_a_slot(policy: str, priority: int) -> None:
    scheduler = make(policy=policy, max_num_seqs=1)
    scheduler.add(request("first", [1] * 3, priority=5))
    run_step(scheduler)
    scheduler.add(request("second", [2] * 3, priority=priority))
    assert run_step(scheduler)[0].num_scheduled_tokens == {"first": 1}
    assert scheduler.num_preemptions == 0


def test_a_request_that_lost_its_slot_often_keeps_it_until_it_ends() -> None:
    scheduler = make(policy="priority", max_num_seqs=1, caching=False)
    patient = request("patient", [1] * 3, priority=1, max_tokens=20)
    scheduler.add(patient)
    num_urgent = 0
    for _ in range(200):
        run_step(scheduler)
        scheduler.check()
        if patient.is_finished:
            break
        if patient.status is RequestStatus.RUNNING and not scheduler.waiting:
            num_urgent += 1
            scheduler.add(request(f"urgent{num_urgent}", [2] * 3, max_tokens=1))
    assert patient.is_finished
    assert scheduler.num_preemptions == MAX_PREEMPTIONS_FOR_SLOTS
    assert len(scheduler.waiting) == 1, "the last urgent one has waited for the patient one"
    run_all(scheduler)


def test_sequences_of_one_call_take_slots_one_step_at_a_time_and_give_none_back_to_the_less_urgent() -> None:
    """The shares of calls (`WaitingQueue`) are counted within a priority and below it only."""
    scheduler = make(policy="priority", max_num_seqs=4, max_num_batched_tokens=64)
    for name in "abcd":
        scheduler.add(request(name, [1] * 3, priority=5, max_tokens=9))
    run_step(scheduler)
    for index in range(4):
        message = EngineCoreRequest(
            f"choice{index}", [2] * 3, SamplingParams(max_tokens=9), 0.0, priority=0, call_id="call"
        )
        scheduler.add(Request(message, BLOCK, True))
    for steps in range(1, 5):
        step, _ = run_step(scheduler)
        assert sum(name.startswith("choice") for name in step.num_scheduled_tokens) == steps
        scheduler.check()
    for _ in range(3):
        step, _ = run_step(scheduler)
        assert all(name.startswith("choice") for name in step.num_scheduled_tokens)
    assert scheduler.num_preemptions == 4


def test_blocks_of_a_request_that_leaves_the_step_being_planned_are_not_shared() -> None:
    """`patient` gets the last free blocks and tokens that fill two of them; then `urgent` needs one in that step."""
    scheduler = make(
        num_blocks=9, policy="priority", max_num_batched_tokens=12, long_prefill_token_threshold=8
    )
    scheduler.add(request("patient", list(range(10, 38)), priority=1))
    assert run_step(scheduler)[0].num_scheduled_tokens == {"patient": 12}
    scheduler.add(request("urgent", list(range(50, 54)), max_tokens=20))
    assert run_step(scheduler)[0].num_scheduled_tokens == {"patient": 8, "urgent": 4}
    step, _ = run_step(scheduler)
    assert (step.num_scheduled_tokens, step.finished_request_ids) == ({"urgent": 1}, ["patient"])
    assert step.total_num_scheduled_tokens == 1
    scheduler.abort(["urgent"])
    (resumed,) = run_step(scheduler)[0].new_requests
    assert (resumed.request_id, resumed.num_computed_tokens) == ("patient", 20)


def test_a_blocked_request_keeps_its_place_and_needs_no_step() -> None:
    scheduler = make(max_num_seqs=1)
    blocked = request("blocked", [1, 2, 3], max_tokens=1)
    blocked.status = RequestStatus.WAITING_FOR_GRAMMAR
    scheduler.add(blocked)
    assert not scheduler.has_work
    assert scheduler.has_unfinished_requests
    for name in "abc":
        scheduler.add(request(name, [1, 2, 3], max_tokens=1))
    assert set(run_step(scheduler)[0].num_scheduled_tokens) == {"a"}
    scheduler.unblock("blocked")
    assert list(run_all(scheduler)) == ["blocked", "b", "c"]


def test_a_blocked_request_can_fail_or_be_aborted() -> None:
    scheduler = make()
    for name in "ab":
        blocked = request(name, [1, 2, 3])
        blocked.status = RequestStatus.WAITING_FOR_GRAMMAR
        scheduler.add(blocked)
    scheduler.abort(["a"])
    scheduler.fail("b", "the grammar is not one")
    _, outputs = run_step(scheduler)
    assert [(out.request_id, out.finish_reason, out.error) for out in outputs] == [
        ("b", FinishReason.ERROR, "the grammar is not one")
    ]
    assert not scheduler.has_unfinished_requests


def test_an_id_in_use_is_refused() -> None:
    scheduler = make()
    scheduler.add(request("a", [1, 2, 3]))
    with pytest.raises(ValueError, match="'a' is in use"):
        scheduler.add(request("a", [4]))
    assert set(run_all(scheduler)) == {"a"}


def test_the_watermark_keeps_room_for_those_that_run() -> None:
    scheduler = make(num_blocks=11, watermark=0.3, caching=False)
    scheduler.add(request("a", [1] * 16, max_tokens=2))
    scheduler.add(request("b", [2] * 16, max_tokens=2))
    assert set(run_step(scheduler)[0].num_scheduled_tokens) == {"a"}
    assert set(run_all(scheduler)) == {"a", "b"}


def test_choices_of_one_prompt_share_its_blocks_in_the_first_step() -> None:
    scheduler = make()
    for name in "abc":
        scheduler.add(request(name, list(range(10, 27))))
    step, _ = run_step(scheduler)
    assert step.num_scheduled_tokens == {"a": 17, "b": 1, "c": 1}
    assert scheduler.kv.pool.num_free_blocks == 63 - 4 - 3


def test_drafts_are_verified_and_those_not_accepted_do_not_count() -> None:
    scheduler = make()
    scheduler.add(request("a", [1, 2, 3], max_tokens=20))
    step = scheduler.schedule()
    scheduler.update_from_output(step, ModelRunnerOutput(["a"], [[9]], draft_token_ids={"a": [5, 6, 7]}))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"a": 4}
    assert step.scheduled_spec_token_ids == {"a": [5, 6, 7]}
    (output,) = scheduler.update_from_output(step, ModelRunnerOutput(["a"], [[5, 8]]))
    assert output.new_token_ids == [5, 8]
    live = scheduler.requests["a"]
    assert live.all_token_ids == [1, 2, 3, 9, 5, 8]
    assert live.num_computed_tokens == 5
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}


def test_drafts_that_do_not_fit_into_a_step_are_dropped() -> None:
    scheduler = make(max_num_batched_tokens=3)
    scheduler.add(request("a", [1, 2, 3], max_tokens=20))
    step = scheduler.schedule()
    scheduler.update_from_output(step, ModelRunnerOutput(["a"], [[9]], draft_token_ids={"a": [5, 6, 7]}))
    live = scheduler.requests["a"]
    assert (live.num_tokens, live.num_tokens_with_spec, live.num_output_placeholders) == (4, 7, 0)
    step = scheduler.schedule()
    assert step.scheduled_spec_token_ids == {"a": [5, 6]}
    assert (live.num_tokens, live.num_tokens_with_spec, live.num_output_placeholders) == (4, 4, 2)
    assert scheduler.schedule().num_scheduled_tokens == {}, "nobody knows how many drafts will be accepted"
    scheduler.update_from_output(step, ModelRunnerOutput(["a"], [[5, 6, 8]]))
    assert (live.num_tokens, live.num_tokens_with_spec, live.num_output_placeholders) == (7, 7, 0)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}


def test_aborting_thousands_of_waiting_requests_touches_each_a_few_times() -> None:
    scheduler = make()
    names = [str(index) for index in range(5000)]
    for name in names:
        scheduler.add(request(name, [1, 2, 3]))
    scheduler.abort(names[:4990])
    assert set(run_all(scheduler)) == set(names[4990:])


def test_chunks_are_announced_when_their_block_is_cached_and_when_it_is_lost() -> None:
    scheduler = make(num_blocks=8)
    ends = [ChunkEnd(101, 3), ChunkEnd(102, 8), ChunkEnd(103, 11)]
    scheduler.add(request("a", list(range(20, 32)), chunk_ends=ends, max_tokens=1))
    run_all(scheduler)
    delta = scheduler.kv.announcer.take_delta()
    assert delta is not None
    # The first chunk ends inside the first block: a hit on it is worth nothing, but the chain of hashes begins with it.
    assert [(end.hash, end.token_end) for end in delta.stored] == [(101, 0), (102, 8), (103, 8)]
    assert scheduler.kv.announcer.take_delta() is None
    scheduler.add(request("b", list(range(40, 64)), max_tokens=1))
    run_all(scheduler)
    delta = scheduler.kv.announcer.take_delta()
    assert delta is not None
    assert sorted(delta.removed) == [102, 103], "a beginning is evicted last"


def test_a_prefix_hit_announces_the_chunks_of_the_new_request() -> None:
    scheduler = make()
    scheduler.add(request("a", list(range(20, 32)), chunk_ends=[ChunkEnd(1, 8)], max_tokens=1))
    run_all(scheduler)
    scheduler.kv.announcer.take_delta()
    scheduler.add(request("b", list(range(20, 32)), chunk_ends=[ChunkEnd(2, 8)], max_tokens=1))
    run_all(scheduler)
    delta = scheduler.kv.announcer.take_delta()
    assert delta is not None
    assert [end.hash for end in delta.stored] == [2]


@settings(max_examples=50, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=30), min_size=1, max_size=12),
    num_blocks=st.integers(6, 24),
    budget=st.integers(1, 24),
    max_num_seqs=st.integers(1, 6),
    aborts=st.sets(st.integers(0, 11)),
    coins=st.lists(st.booleans(), min_size=40, max_size=40).filter(any),
)
def test_every_request_is_answered_and_nothing_leaks(
    prompts: list[list[int]],
    num_blocks: int,
    budget: int,
    max_num_seqs: int,
    aborts: set[int],
    coins: list[bool],
) -> None:
    scheduler = make(num_blocks, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    pending = list(enumerate(prompts))
    finished: dict[str, FinishReason] = {}
    aborted: set[str] = set()
    for turn in range(2000):
        if pending and coins[turn % 40]:
            index, prompt = pending.pop()
            scheduler.add(request(str(index), prompt, max_tokens=6))
        if aborts and coins[turn * 7 % 40]:
            victim = str(aborts.pop())
            if victim in scheduler.requests:
                aborted.add(victim)
            scheduler.abort([victim])
        step, outputs = run_step(scheduler)
        assert step.total_num_scheduled_tokens <= budget
        assert len(scheduler.running) <= max_num_seqs
        for output in outputs:
            if output.finish_reason is not None:
                assert output.request_id not in finished
                finished[output.request_id] = output.finish_reason
        scheduler.check()
        if not pending and not scheduler.has_work:
            break
    else:
        pytest.fail("the scheduler does not come to an end")
    assert set(finished) | aborted == {str(index) for index in range(len(prompts))}
    assert not set(finished) & aborted
    assert scheduler.kv.usage == 0.0


# Two steps in flight


class Pipeline:
    """Steps that are booked only when the test says so, computed by a worker that knows what comes next."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.worker = FakeWorker(BLOCK)
        self.results: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.received: dict[str, list[int]] = {}

    def launch(self) -> dict[str, int]:
        step = self.scheduler.schedule()
        self.results.append((step, self.worker.execute(step)))
        return step.num_scheduled_tokens

    def book(self) -> list[EngineCoreOutput]:
        outputs = self.scheduler.update_from_output(*self.results.popleft())
        for output in outputs:
            self.received.setdefault(output.request_id, []).extend(output.new_token_ids)
        self.scheduler.check()
        return outputs


def answer(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(prompt) :]


def test_a_step_is_scheduled_before_the_last_ones_tokens_are_known() -> None:
    pipeline = Pipeline(make())
    pipeline.scheduler.add(request("a", [1, 2, 3], max_tokens=3, ignore_eos=True))
    assert [pipeline.launch(), pipeline.launch(), pipeline.launch()] == [{"a": 3}, {"a": 1}, {"a": 1}]
    assert pipeline.launch() == {}, "the last token is under way"
    for _ in range(3):
        (output,) = pipeline.book()
    assert output.finish_reason is FinishReason.LENGTH
    assert pipeline.received["a"] == answer([1, 2, 3], 3)


def test_tokens_in_flight_are_counted_as_placeholders() -> None:
    pipeline = Pipeline(make())
    pipeline.scheduler.add(request("a", [1, 2, 3], max_tokens=5, ignore_eos=True))
    live = pipeline.scheduler.requests["a"]
    counts = []
    for act in (pipeline.launch, pipeline.launch, pipeline.book, pipeline.book):
        act()
        counts.append((live.num_tokens, live.num_output_placeholders))
    assert counts == [(3, 1), (3, 2), (4, 1), (5, 0)]


def test_tokens_computed_beyond_a_stop_are_dropped() -> None:
    pipeline = Pipeline(make())
    first, second = answer([1, 2, 3], 2)
    assert first != second
    pipeline.scheduler.add(request("a", [1, 2, 3], stop_token_ids=(first,), ignore_eos=True))
    pipeline.launch()
    assert pipeline.launch() == {"a": 1}
    (output,) = pipeline.book()
    assert output.finish_reason is FinishReason.STOP
    assert pipeline.book() == []
    assert pipeline.received["a"] == [first]
    assert pipeline.scheduler.kv.usage == 0.0


def test_a_new_request_does_not_get_tokens_in_flight_for_an_old_one_of_its_id() -> None:
    pipeline = Pipeline(make())
    pipeline.scheduler.add(request("a", [1, 2, 3], ignore_eos=True))
    pipeline.launch()
    pipeline.scheduler.abort(["a"])
    pipeline.scheduler.add(request("a", [4, 5], max_tokens=2, ignore_eos=True))
    pipeline.launch()
    pipeline.launch()
    for _ in range(3):
        pipeline.book()
    assert pipeline.received["a"] == answer([4, 5], 2)


def preempt_in_flight(max_tokens: int) -> Pipeline:
    """Two requests grow until the cache is full; the newer one is preempted while its token is in flight."""
    pipeline = Pipeline(make(num_blocks=5, caching=False))
    pipeline.scheduler.add(request("a", [1] * 7, max_tokens=9, ignore_eos=True))
    pipeline.scheduler.add(request("b", [2] * 7, max_tokens=max_tokens, ignore_eos=True))
    assert pipeline.launch() == {"a": 7, "b": 7}
    assert pipeline.launch() == {"a": 1, "b": 1}
    pipeline.book()
    assert pipeline.launch() == {"a": 1}
    assert pipeline.scheduler.requests["b"].status is RequestStatus.PREEMPTED
    return pipeline


def test_a_preempted_request_gets_its_tokens_in_flight_before_it_is_resumed() -> None:
    pipeline = preempt_in_flight(max_tokens=4)
    pipeline.scheduler.abort(["a"])
    assert pipeline.launch() == {}, "its token would come twice"
    pipeline.book()
    assert pipeline.received["b"] == answer([2] * 7, 2)
    assert pipeline.launch() == {"b": 9}
    while pipeline.results or pipeline.scheduler.has_work:
        pipeline.book()
        pipeline.launch()
        if not pipeline.scheduler.requests:
            break
    assert pipeline.received["b"] == answer([2] * 7, 4)


def test_a_preempted_request_may_end_with_its_tokens_in_flight() -> None:
    pipeline = preempt_in_flight(max_tokens=2)
    (finished,) = [output for output in pipeline.book() if output.finish_reason is not None]
    assert (finished.request_id, pipeline.received["b"]) == ("b", answer([2] * 7, 2))
    assert "b" not in pipeline.scheduler.requests


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("budget", [32, 8])
def test_a_long_prompt_takes_no_request_s_turn_in_a_pipeline(num_stages: int, budget: int) -> None:
    scheduler = make(
        num_blocks=512,
        max_model_len=2000,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=4,
        pipeline_parallel_size=num_stages,
    )
    pipeline = Pipeline(scheduler)
    scheduler.add(request("first", [1], max_tokens=500, ignore_eos=True))
    pipeline.launch()
    scheduler.add(request("long", [2] * 1000, max_tokens=1))
    for name in "abcde":
        scheduler.add(request(name, [3], max_tokens=500, ignore_eos=True))
    waited: dict[str, int] = {}
    for _ in range(200):
        step = pipeline.launch()
        running = [live.request_id for live in scheduler.running]
        waited = {name: 0 if name in step else waited.get(name, 0) + 1 for name in running}
        assert max(waited.values()) < 2 * len(running)
        if len(pipeline.results) == num_stages:
            pipeline.book()
    assert not scheduler.requests["long"].has_first_token
    counts = [len(pipeline.received[name]) for name in ("first", *"abcde")]
    assert max(counts) - min(counts) <= 10
