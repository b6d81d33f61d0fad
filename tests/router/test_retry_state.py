"""The decision after a failed or stalled attempt, as a table."""

from __future__ import annotations

from typing import Any

import pytest

from argosy_router.fleet.replica import CoreStalled
from argosy_router.http.upstream import ConnectFailed, ConnectionLost, FirstByteTimeout, UpstreamError
from argosy_router.proxy.relay import EngineError, Refused
from argosy_router.proxy.resilience import (
    MAX_ATTEMPTS,
    MAX_MIGRATIONS,
    MAX_RETRY_CREDIT,
    RESERVED_CREDIT,
    AnswerProgress,
    NextStep,
    RetryBudget,
    RetryState,
)

STALE = ConnectionLost("closed", stale=True)


def retry_state(*, is_request_at_fault: bool = False, credit: int = int(MAX_RETRY_CREDIT)) -> RetryState:
    budget = RetryBudget(0.0)
    for _ in range(int(MAX_RETRY_CREDIT) - credit):
        assert budget.spend(0.0)
    state = RetryState(budget)
    state.is_request_at_fault = is_request_at_fault
    return state


@pytest.mark.parametrize(
    ("answer", "attempts", "migrations", "at_fault", "racing", "failed", "stalled"),
    [
        ("none", 1, 0, False, False, "retry", "retry"),
        ("none", MAX_ATTEMPTS - 1, 0, False, False, "retry", "retry"),
        ("none", MAX_ATTEMPTS, 0, False, False, "give_up", "wait"),
        ("none", 2, 0, True, False, "give_up", "retry"),
        ("none", 2, 0, False, True, "leave_to_other", "wait"),
        ("none", MAX_ATTEMPTS, 0, True, True, "leave_to_other", "wait"),
        ("resumable", 1, 0, False, False, "migrate", "migrate"),
        ("resumable", MAX_ATTEMPTS + 1, 1, False, False, "migrate", "migrate"),
        ("resumable", 4, MAX_MIGRATIONS - 1, False, False, "migrate", "migrate"),
        ("resumable", 5, MAX_MIGRATIONS, False, False, "interrupt", "wait"),
        ("resumable", 2, 1, True, False, "interrupt", "migrate"),
        ("unresumable", 1, 0, False, False, "interrupt", "wait"),
        ("unresumable", 5, MAX_MIGRATIONS, True, False, "interrupt", "wait"),
        ("complete", 1, 0, False, False, "complete", "complete"),
        ("complete", 5, MAX_MIGRATIONS, True, False, "complete", "complete"),
    ],
)
def test_decision_after_an_attempt(
    answer: AnswerProgress,
    attempts: int,
    migrations: int,
    at_fault: bool,
    racing: bool,
    failed: NextStep,
    stalled: NextStep,
) -> None:
    state = retry_state(is_request_at_fault=at_fault)
    made: dict[str, Any] = {"attempts": attempts, "migrations": migrations, "is_racing": racing}
    assert state.after_failure(answer, **made) == failed
    assert state.after_stall(answer, **made) == stalled


@pytest.mark.parametrize(
    ("error", "attempts", "migrations", "is_routable", "credit", "may"),
    [
        (STALE, 1, 0, True, 1, True),
        (STALE, MAX_ATTEMPTS - 1, 0, True, 1, True),
        (STALE, MAX_ATTEMPTS, 0, True, 1, False),
        (STALE, MAX_ATTEMPTS, 1, True, 1, True),
        (STALE, 1, 0, False, 1, False),
        (STALE, 1, 0, True, 0, False),
        (ConnectionLost("reset"), 1, 0, True, 1, False),
        (ConnectFailed("refused", refused=True), 1, 0, True, 1, False),
        (Refused(503), 1, 0, True, 1, False),
    ],
)
def test_when_a_request_is_sent_again_to_the_same_replica(
    error: UpstreamError, attempts: int, migrations: int, is_routable: bool, credit: int, may: bool
) -> None:
    state = retry_state(credit=credit)
    assert may is state.may_reconnect(
        error, attempts=attempts, migrations=migrations, is_routable=is_routable, now=0.0
    )
    left = credit - may
    assert (
        sum(state.take_credit("retry", FirstByteTimeout("late"), migrations=0, now=0.0) for _ in "xx") == left
    )


@pytest.mark.parametrize(
    ("step", "error", "migrations", "needs"),
    [
        ("retry", FirstByteTimeout("late"), 0, 1),
        ("retry", CoreStalled("silent"), 0, 1),
        ("retry", Refused(503), 0, 1),
        ("retry", Refused(503, is_resource_busy=True), 0, 1 + int(RESERVED_CREDIT)),
        ("retry", Refused(503, b"X-Argosy-Resource-Busy: true\r\n"), 0, 1 + int(RESERVED_CREDIT)),
        ("retry", Refused(401), 0, 1),
        ("retry", Refused(502), 0, 1 + int(RESERVED_CREDIT)),
        ("retry", EngineError(500, b"", b""), 0, 1 + int(RESERVED_CREDIT)),
        ("migrate", ConnectionLost("reset"), 0, 0),
        ("migrate", Refused(503), 0, 0),
        ("migrate", ConnectionLost("reset"), 1, 1),
        ("migrate", Refused(502), 1, 1),
        ("migrate", Refused(503, is_resource_busy=True), 0, 0),
        ("migrate", Refused(503, is_resource_busy=True), 1, 1 + int(RESERVED_CREDIT)),
    ],
)
def test_credit_that_a_retry_needs(step: NextStep, error: UpstreamError, migrations: int, needs: int) -> None:
    rich = retry_state(credit=needs)
    assert rich.take_credit(step, error, migrations=migrations, now=0.0)
    if needs:
        poor = retry_state(credit=needs - 1)
        assert not poor.take_credit(step, error, migrations=migrations, now=0.0)
