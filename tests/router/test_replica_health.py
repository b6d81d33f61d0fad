"""A replica's health by the events that links and attempts report."""

from __future__ import annotations

import pytest

from argosy_router.fleet.health import (
    CONSECUTIVE_FAILURES,
    MIN_STALL_S,
    PROBE_S,
    STALL_STEPS,
    SUSPECT_STEP_AGE_S,
    ReplicaHealth,
)


def test_the_first_silence_makes_suspect_and_the_next_ones_are_failures() -> None:
    health = ReplicaHealth()
    assert health.silent(0.0, may_eject=True)
    assert health.is_suspect
    assert not health.is_healthy
    assert health.condition(0.0) == "suspect"
    for _ in range(CONSECUTIVE_FAILURES - 1):
        assert not health.silent(0.0, may_eject=True)
    assert health.silent(0.0, may_eject=True)
    assert health.condition(0.0) == "ejected"


def test_silence_ejects_only_what_may_be_ejected() -> None:
    health = ReplicaHealth()
    assert [health.silent(0.0, may_eject=False) for _ in range(10)] == [True] + 9 * [False]
    assert not health.is_ejected


def test_a_sign_of_life_ends_a_suspicion_but_no_ejection() -> None:
    health = ReplicaHealth()
    assert not health.reachable(), "it was not suspect"
    health.silent(0.0, may_eject=True)
    health.failed(0.0, may_eject=True, refused=True)
    assert health.reachable()
    assert not health.is_suspect
    assert health.is_ejected


def test_a_complete_snapshot_ends_both() -> None:
    health = ReplicaHealth()
    assert not health.synced()
    health.silent(0.0, may_eject=True)
    assert health.synced()
    health.failed(0.0, may_eject=True, refused=True)
    assert health.synced()
    assert health.is_healthy


@pytest.mark.parametrize(
    ("age_s", "longest_step_s", "has_work", "is_suspect"),
    [
        (0.0, 0.01, True, False),
        (MIN_STALL_S, 0.01, True, False),
        (MIN_STALL_S + 0.1, 0.01, True, True),
        (MIN_STALL_S + 0.1, 0.01, False, False),
        (MIN_STALL_S + 0.1, 2 * MIN_STALL_S / STALL_STEPS, True, False),
        (SUSPECT_STEP_AGE_S, 0.0, True, False),
        (SUSPECT_STEP_AGE_S + 0.1, 0.0, False, True),
    ],
)
def test_a_silent_core_makes_suspect(
    age_s: float, longest_step_s: float, has_work: bool, is_suspect: bool
) -> None:
    health = ReplicaHealth()
    assert health.heartbeat(age_s, longest_step_s, has_work=has_work) is is_suspect
    assert health.is_suspect is is_suspect
    assert not health.heartbeat(age_s, longest_step_s, has_work=has_work), "nothing has changed"
    assert health.heartbeat(0.0, longest_step_s, has_work=has_work) is is_suspect, "the core has stepped"
    assert not health.is_suspect


def test_a_lost_stream_tells_nothing_about_the_core() -> None:
    health = ReplicaHealth()
    health.heartbeat(100.0, 0.01, has_work=True)
    assert health.is_core_overdue
    health.telemetry_lost()
    assert not health.is_core_overdue
    assert health.is_suspect, "until the replica shows a sign of life"


def test_polls_decide_whether_a_foreign_replica_answers() -> None:
    health = ReplicaHealth()
    assert not health.polled(is_answering=False)
    health.failed(0.0, may_eject=True, refused=True)
    assert health.polled(is_answering=True)
    assert health.is_answering
    assert not health.is_ejected
    assert not health.polled(is_answering=True)
    assert health.polled(is_answering=False)
    assert not health.is_answering


def test_a_probe_that_takes_long_is_followed_by_another() -> None:
    health = ReplicaHealth()
    health.failed(0.0, may_eject=True, refused=True)
    assert health.dispatched(10.0)
    assert not health.admits(10.0)
    assert health.next_change(10.0) == 10.0 + PROBE_S, "when cached candidates are out of date"
    assert not health.admits(9.9 + PROBE_S)
    assert health.admits(10.0 + PROBE_S)
    assert health.dispatched(10.0 + PROBE_S)
    assert not health.admits(20.0 + PROBE_S), "one more, not all"
    assert health.succeeded()
    assert health.admits(20.0 + PROBE_S)
