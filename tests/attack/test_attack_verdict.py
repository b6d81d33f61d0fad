"""Tests of the findings of an attack: failures, stalls, ejections, memory growth."""

from __future__ import annotations

import pytest

from .canary import Record
from .noise import LoopLag
from .rotation import FAMILIES, rotation
from .verdict import (
    MEMORY_GROWTH_BYTES,
    Phase,
    canary_findings,
    gauge_findings,
    leftover_findings,
    memory_findings,
    memory_growth,
    phase_findings,
)

QUIET = Phase("quiet", began=0.0, ended=10.0)
FROZEN = Phase("a core frozen", began=10.0, ended=30.0, stall_s=8.0, kills=True)
MIB = float(1 << 20)


def record(*waits: tuple[float, float], failure: str = "") -> Record:
    return Record("stream", waits[0][0], waits[-1][1], waits, failure)


def no_lag(start: float, end: float) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("waits", "lag", "phases", "expected"),
    [
        (((1.0, 2.0), (2.0, 3.9)), 0.0, [QUIET], []),
        (((1.0, 3.5),), 0.0, [QUIET], ["stream: 2.5 s for the first event"]),
        (((1.0, 2.0), (2.0, 5.0)), 0.0, [QUIET], ["stream: 3.0 s for the next event"]),
        (((1.0, 2.0), (2.0, 5.0)), 1.5, [QUIET], []),
        (((11.0, 18.0),), 0.0, [QUIET, FROZEN], []),
        (((11.0, 20.0),), 0.0, [QUIET, FROZEN], ["stream: 9.0 s for the first event"]),
        (((31.0, 34.0),), 0.0, [QUIET, FROZEN], ["stream: 3.0 s for the first event"]),
    ],
)
def test_a_wait_is_judged_by_the_attack_it_fell_into_and_without_our_own_lag(
    waits: tuple[tuple[float, float], ...], lag: float, phases: list[Phase], expected: list[str]
) -> None:
    found = canary_findings([record(*waits)], phases, lambda start, end: lag)
    assert [finding.text for finding in found] == expected


@pytest.mark.parametrize(("tokens", "is_found"), [(0, True), (10, True), (20, False)])
def test_an_answer_in_one_piece_may_take_longer_by_the_pace_of_its_tokens(
    tokens: int, is_found: bool
) -> None:
    answer = Record("unary", 1.0, 3.9, ((1.0, 3.9),), tokens=tokens)
    assert bool(canary_findings([answer], [QUIET], no_lag)) is is_found


def test_retry_hints_may_be_longer_on_a_busy_machine() -> None:
    waited = [record((1.0, 4.0)), record((1.0, 8.0))]
    found = canary_findings(waited, [QUIET], no_lag, patience_s=3.0)
    assert [finding.text for finding in found] == ["stream: 7.0 s for the first event"]


def test_a_failed_request_is_found_wherever_it_happened() -> None:
    found = canary_findings([record((40.0, 40.1), failure="status 500: oh")], [QUIET], no_lag)
    assert [(each.kind, each.phase, each.text) for each in found] == [
        ("canary failed", "between phases", "stream: status 500: oh")
    ]


def test_ejections_are_found_unless_the_attack_kills() -> None:
    phases = [
        Phase("deep bodies", 0.0, 1.0, ejections=2.0),
        Phase("kill", 1.0, 2.0, kills=True, ejections=1.0),
    ]
    assert [finding.text for finding in phase_findings(phases)] == ["2 replicas ejected"]


def test_server_errors_for_bad_input_are_found() -> None:
    phase = Phase("deep bodies", 0.0, 1.0, unexpected={"500 recursion": 3})
    assert [finding.text for finding in phase_findings([phase])] == ["3 x 500 recursion"]


def test_gauges_must_be_zero() -> None:
    found = gauge_findings({"router: queued_requests": 0.0, "r0: num_requests_waiting": 1.0})
    assert [finding.text for finding in found] == ["r0: num_requests_waiting is 1"]


def test_processes_that_outlive_their_parent_are_found() -> None:
    assert [finding.text for finding in leftover_findings(["python -m grammar_server"])] == [
        "python -m grammar_server"
    ]


def points(growth_bytes: float, count: int = 40) -> list[tuple[float, float]]:
    """Return samples that first rise steeply, as in every process's warm-up, and then by `growth_bytes` in total."""
    cold = [(float(at), at * 50 * MIB) for at in range(count // 4)]
    base = cold[-1][1]
    return cold + [(float(at), base + growth_bytes * at / count) for at in range(count // 4, count)]


def test_steady_growth_is_found_and_a_warm_up_is_not() -> None:
    assert memory_findings({"router": points(0.0)}, 10) == []
    (found,) = memory_findings({"router": points(4.0 * MEMORY_GROWTH_BYTES)}, 10)
    assert found.text.startswith("router grew by ")


def test_a_single_step_is_no_growth() -> None:
    steady = points(0.0)
    stepped = steady[:-5] + [(at, size + 100 * MIB) for at, size in steady[-5:]]
    assert memory_findings({"router": stepped}, 10) == []


def test_a_short_life_is_not_judged() -> None:
    assert memory_growth(points(1e12, count=40), attacks=14) is None


async def test_event_loop_lag_is_reported_for_its_span() -> None:
    lag = LoopLag()
    lag.note(5.0, 2.0)
    lag.note(9.0, 1.0)
    assert lag.between(0.0, 10.0) == 3.0
    assert lag.between(4.0, 8.5) == 1.5
    assert lag.between(5.0, 8.0) == 0.0


def test_a_rotation_has_every_attack_once_and_no_two_share_a_name() -> None:
    of_directory, of_bucket = (
        [attack.name for attack in rotation(list(FAMILIES), has_bucket=has_bucket)]
        for has_bucket in (False, True)
    )
    every = {attack.name for family in FAMILIES.values() for attack in family}
    assert len(every) == sum(len(family) for family in FAMILIES.values())
    assert set(of_directory) | set(of_bucket) == every
    assert len(of_directory) == len(set(of_directory))
    assert len(of_bucket) == len(set(of_bucket))
    assert "a bucket that stalls" not in of_directory
