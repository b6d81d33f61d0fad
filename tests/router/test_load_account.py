"""A replica's in-flight account: own dispatches on top of its reports."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from argosy_router.fleet.load_account import LoadAccount


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["charge", "first", "release", "report"]))))
def test_every_charge_is_discharged_once(steps: list[tuple[int, str]]) -> None:
    account = LoadAccount()
    charges = {}
    for number, step in steps:
        if step == "charge" and number not in charges:
            charges[number] = account.charge(100 + number)
        elif step == "report":
            account.report(requests=number, tokens=number * 50)
        elif number in charges:
            charge = charges[number]
            charge.first_token() if step == "first" else charge.release()
        assert account.inflight >= 0
        assert account.inflight_tokens >= 0
    for charge in charges.values():
        charge.release()
        charge.release()
    assert (account.inflight, account.inflight_tokens) == (0, 0)


def test_own_dispatches_count_before_and_after_a_report() -> None:
    account = LoadAccount()
    account.report(requests=3, tokens=1000)
    first = account.charge(500)
    assert (account.queued_tokens, account.requests) == (1500, 4)
    account.report(requests=4, tokens=1400)  # the replica has it now, and has begun
    assert (account.queued_tokens, account.requests) == (1400, 4)
    first.first_token()
    assert (account.queued_tokens, account.requests) == (900, 4)
    first.release()
    assert (account.queued_tokens, account.requests) == (900, 3)
    account.forget()
    assert (account.queued_tokens, account.requests) == (0, 0)
