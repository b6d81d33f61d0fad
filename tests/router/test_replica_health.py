"""A replica's health: ejection, its back-off, and how many replicas may be ejected."""

from __future__ import annotations

import pytest

from argosy_router.fleet.health.ejection_limits import may_eject
from argosy_router.fleet.health.replica_health import (
    BASE_EJECTION_S,
    CONSECUTIVE_FAILURES,
    MAX_EJECTION_S,
    ReplicaHealth,
)


def test_ejection_backs_off_and_a_probe_decides() -> None:
    health = ReplicaHealth()
    for _ in range(CONSECUTIVE_FAILURES - 1):
        assert not health.failed(0.0, may_eject=True)
    assert health.failed(0.0, may_eject=True)
    assert not health.admits(0.5)
    now, pauses = 0.0, []
    for _ in range(7):
        pause = 0.0
        while not health.admits(now + pause):
            pause += 0.5
        now += pause
        pauses.append(pause)
        health.dispatched(now)
        assert not health.admits(now), "one probe at a time"
        assert health.failed(now, may_eject=True)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert pauses[0] == BASE_EJECTION_S
    assert pauses[-1] == MAX_EJECTION_S
    now += 30
    health.dispatched(now)
    health.abandoned()
    assert health.admits(now), "a probe that tells nothing is released"
    assert health.succeeded()
    assert not health.is_ejected


def test_one_refused_connection_ejects() -> None:
    health = ReplicaHealth()
    assert health.failed(0.0, may_eject=True, refused=True)
    assert health.is_ejected


@pytest.mark.parametrize(
    ("replicas", "ejected", "allowed"),
    [(1, 0, False), (2, 0, True), (2, 1, False), (3, 1, False), (4, 1, True)],
)
def test_at_most_half_and_never_the_last(replicas: int, ejected: int, allowed: bool) -> None:
    fleet = [ReplicaHealth() for _ in range(replicas)]
    for health in fleet[:ejected]:
        health.failed(0.0, may_eject=True, refused=True)
    assert may_eject(fleet) is allowed
    assert fleet[-1].failed(0.0, refused=True, may_eject=may_eject(fleet)) is allowed
