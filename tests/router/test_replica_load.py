"""A replica's load: own dispatches on top of its reports."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from argosy_router.fleet.replica import ReplicaLoad


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["charge", "first", "release", "report"]))))
def test_every_charge_is_discharged_once(steps: list[tuple[int, str]]) -> None:
    load = ReplicaLoad()
    charges = {}
    for number, step in steps:
        if step == "charge" and number not in charges:
            charges[number] = load.charge(100 + number)
        elif step == "report":
            load.report(requests=number, tokens=number * 50)
        elif number in charges:
            charge = charges[number]
            charge.first_token() if step == "first" else charge.release()
        assert load.inflight >= 0
        assert load.inflight_tokens >= 0
    for charge in charges.values():
        charge.release()
        charge.release()
    assert (load.inflight, load.inflight_tokens) == (0, 0)


def test_own_dispatches_count_before_and_after_a_report() -> None:
    load = ReplicaLoad()
    load.report(requests=3, tokens=1000)
    first = load.charge(500)
    assert (load.queued_tokens, load.requests) == (1500, 4)
    load.report(requests=4, tokens=1400)  # the replica has it now, and has begun
    assert (load.queued_tokens, load.requests) == (1400, 4)
    first.first_token()
    assert (load.queued_tokens, load.requests) == (900, 4)
    first.release()
    assert (load.queued_tokens, load.requests) == (900, 3)
    load.forget()
    assert (load.queued_tokens, load.requests) == (0, 0)


def test_sequences_of_calls_with_several_yield_to_other_accounts() -> None:
    load = ReplicaLoad()
    load.report(requests=30, tokens=0, yielding=20)  # other routers'
    own = load.charge(10, 8, "a")
    load.charge(10, 1, "a")
    assert (load.requests, load.yielding, load.yielding_to("a"), load.yielding_to("b")) == (39, 28, 20, 28)
    load.report(requests=39, tokens=0, yielding=28)
    assert (load.yielding_to("a"), load.yielding_to("b")) == (20, 28), "not counted twice"
    own.release()
    own.release()
    assert (load.requests, load.yielding_to("a"), load.yielding_to("b")) == (31, 20, 20)
    load.report(requests=1, tokens=0)
    assert load.yielding == 0
    load.charge(10, 8, "a")
    load.forget()
    assert (load.yielding_to("a"), load.yielding_to("b")) == (0, 8), "of a silent replica, our own count"


def test_prompts_queue_at_one_core_of_several() -> None:
    """A prompt waits for those of one core, while requests fill the slots of all."""
    load = ReplicaLoad()
    load.max_num_seqs, load.data_parallel_size = 8, 4
    load.report(requests=6, tokens=4000, prefill_tokens_per_s=1000.0)
    assert (load.queued_tokens, load.requests, load.has_free_slot) == (1000, 6, True)
    charge = load.charge(400)
    assert (load.queued_tokens, load.requests) == (1100, 7)
    charge.release()
    load.forget()
    assert load.queued_tokens == 0
