"""The verdict on a canary: bounds, missing data, and the merging of routers' reports."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy_operator.desired.canary_analysis import Baseline, Look, baseline_of, judge, missing_baseline
from argosy_operator.observation import Figures, FleetLoad, SplitFigures, quantile, split_figures
from argosy_protocol.reports import (
    SIDE_BOUNDS_S,
    TTFT_BOUNDS_S,
    LoadReport,
    RolloutReport,
    ServiceLoadReport,
    SideReport,
)
from argosy_resource.rollout import CanaryAnalysis

ALL = CanaryAnalysis(
    max_error_rate=0.01,
    max_error_rate_ratio=2.0,
    max_client_error_rate_ratio=2.0,
    max_ttft_p90_ratio=1.5,
    max_itl_p90_ratio=1.5,
    min_cached_share_ratio=0.5,
    min_hit_ratio=0.8,
    min_requests=100,
    window_seconds=60,
)
LOOK = Look(weight=50, steps=2, elapsed_s=300.0)
RATIOS = (0.5, 0.8, 1.2)
"""Latencies of each three answers, as multiples of a side's."""


def side(
    *,
    attempts: int = 1000,
    failures: int = 2,
    client_errors: int = 2,
    streams: int = 600,
    ttft_s: float = 0.4,
    answers: int = 600,
    itl_s: float = 0.02,
    prompt_tokens: int = 10_000,
    expected: float = 0.5,
    cached: float = 0.49,
    sampled: int = 1000,
) -> Figures:
    """A side's figures; `expected` and `cached` are shares of the prompt tokens."""
    ttft = times(ttft_s, streams)
    hits = min(1.0, cached / expected) if expected else 1.0
    return Figures(
        attempts=attempts,
        failures=failures,
        client_errors=client_errors,
        streams=streams,
        ttft_p90_s=quantile(ttft, 0.9, SIDE_BOUNDS_S),
        ttft=ttft,
        itl=times(itl_s, answers),
        prompt_tokens=prompt_tokens,
        predicted_tokens=round(prompt_tokens * expected),
        cached_tokens=round(prompt_tokens * cached),
        sampled=sampled,
        sampled_cached=round(sampled * cached),
        expected=sampled if expected else 0,
        expected_cached=round(sampled * hits) if expected else 0,
    )


def times(seconds: float, count: int) -> tuple[int, ...]:
    counts = [0] * (len(SIDE_BOUNDS_S) + 1)
    for ratio in RATIOS:
        counts[bisect_left(SIDE_BOUNDS_S, ratio * seconds)] += count // len(RATIOS)
    counts[bisect_left(SIDE_BOUNDS_S, seconds)] += count - sum(counts)
    return tuple(counts) if count else ()


def figures(canary: dict[str, Any], stable: dict[str, Any] | None = None, **fields: Any) -> SplitFigures:
    ours, theirs = side(**canary), side(**(stable or {}))
    given = {"is_complete": True, "canary_total": ours, "stable_total": theirs, **fields}
    return SplitFigures(canary=ours, stable=theirs, **given)


@pytest.mark.parametrize(
    ("canary", "stable", "kind", "message"),
    [
        ({}, {}, "passed", ""),
        ({"failures": 5}, {}, "passed", ""),
        ({"failures": 13}, {"failures": 12}, "waiting", "13 of 1000 requests failed; that may"),
        ({"failures": 50}, {"failures": 50}, "failed", "error rate 5 %, at most 1 %: 50 of 1000 requests failed"),
        ({"failures": 6}, {}, "waiting", "error rate 0.6 %, the stable side's 0.2 %: at most 2 times as much"),
        ({"attempts": 10_000, "failures": 99}, {"attempts": 10_000}, "failed", "rate 0.99 %, the stable side's 0.02 %"),
        ({"failures": 1}, {"failures": 0}, "passed", ""),
        ({"client_errors": 6}, {}, "waiting", "client error rate (4xx) 0.6 %, the stable side's 0.2 %"),
        ({"client_errors": 60}, {}, "failed", "client error rate (4xx) 6 %, the stable side's 0.2 %"),
        ({"ttft_s": 0.5}, {}, "passed", ""),
        ({"ttft_s": 0.62}, {}, "waiting", "TTFT p90"),
        ({"ttft_s": 1.2}, {}, "failed", "TTFT p90 1.4"),
        ({"itl_s": 0.06}, {}, "failed", "ITL p90 0.07"),
        ({"cached": 0.1, "expected": 0.1}, {}, "failed", "cached share 10 %, the stable side's 49 %"),
        ({"cached": 0.4, "expected": 0.8}, {}, "failed", "4000 of 8000 tokens expected to be cached were"),
        ({"attempts": 99}, {}, "waiting", "99 of 100 requests"),
        ({"attempts": 99, "failures": 99}, {}, "failed", "99 of 99 requests failed"),
        ({"streams": 99}, {}, "waiting", "99 of 100 streamed answers"),
        ({"answers": 99}, {}, "waiting", "99 of 100 streamed answers with their usage"),
        ({"streams": 99, "failures": 500}, {}, "failed", "error rate 50 %"),
        ({}, {"streams": 99}, "waiting", "too few streamed answers of the stable side"),
        ({}, {"answers": 99}, "waiting", "too few streamed answers of the stable side"),
        ({}, {"attempts": 99}, "waiting", "too few requests of the stable side"),
        ({}, {"cached": 0.0, "expected": 0.0}, "passed", ""),
        ({"prompt_tokens": 0, "sampled": 0}, {}, "waiting", "usage"),
    ],
    ids=str,
)  # fmt: skip
def test_verdicts(canary: dict[str, Any], stable: dict[str, Any], kind: str, message: str) -> None:
    verdict = judge(ALL, figures(canary, stable), Baseline(), LOOK)
    assert (verdict.kind, message in verdict.message) == (kind, True), verdict


def test_a_silent_router_delays_success_but_not_failure() -> None:
    assert judge(ALL, figures({}, is_complete=False), Baseline(), LOOK).kind == "waiting"
    assert judge(ALL, figures({"failures": 500}, is_complete=False), Baseline(), LOOK).kind == "failed"


def test_what_a_router_of_an_earlier_release_does_not_report_is_no_data() -> None:
    old = {"is_detailed": False, "canary_total": Figures(), "stable_total": Figures()}
    client = CanaryAnalysis(max_client_error_rate_ratio=2.0)
    verdict = judge(client, figures({"client_errors": 0}, **old), Baseline(), LOOK)
    assert (verdict.kind, "earlier release" in verdict.message) == ("waiting", True)
    errors = CanaryAnalysis(max_error_rate=0.01)
    assert judge(errors, figures({}, **old), Baseline(), LOOK).kind == "passed"
    assert judge(errors, figures({"failures": 500}, **old), Baseline(), LOOK).kind == "waiting"
    counts = SideReport(attempts=100, failures=1)
    mixed = split_figures(
        load_of(
            RolloutReport(canary_revision="new", weight=20, canary=counts),
            RolloutReport(
                canary_revision="new", weight=20, canary=counts, canary_total=counts, stable_total=counts
            ),
        ),
        "new",
        20,
    )
    assert (mixed.is_detailed, mixed.canary.attempts, mixed.canary_total.attempts) == (False, 200, 100)


def test_a_canary_that_turns_bad_late_is_found_by_its_last_window() -> None:
    errors = CanaryAnalysis(max_error_rate=0.01)
    late = figures({"failures": 60}, canary_total=side(attempts=100_000, failures=60))
    assert judge(errors, late, Baseline(), Look(weight=50, steps=2, elapsed_s=86_400.0)).kind == "failed"
    some = figures({"failures": 40}, canary_total=side(attempts=100_000, failures=40))
    assert judge(errors, some, Baseline(), Look(weight=50, steps=2, elapsed_s=60.0)).kind == "failed"
    assert judge(errors, some, Baseline(), Look(weight=50, steps=2, elapsed_s=86_400.0)).kind == "waiting", (
        "the more windows there were, the more one of them must say"
    )


def test_caches_that_are_empty_at_first_are_no_failure() -> None:
    cold = figures({"cached": 0.1, "expected": 0.1})
    for elapsed_s, kind in ((60.0, "waiting"), (119.0, "waiting"), (120.0, "failed")):
        assert judge(ALL, cold, Baseline(), Look(weight=50, elapsed_s=elapsed_s)).kind == kind


def test_an_earlier_steps_figures_stand_in_for_a_stable_side_without_requests() -> None:
    """As in a blue-green rollout, whose stable side gets none."""
    before = baseline_of(ALL, side(), Baseline())
    assert missing_baseline(ALL, before) == ""
    idle = {
        "attempts": 0,
        "failures": 0,
        "client_errors": 0,
        "streams": 0,
        "answers": 0,
        "prompt_tokens": 0,
        "sampled": 0,
    }
    look = Look(weight=100, elapsed_s=300.0)
    assert judge(ALL, figures({}, idle), before, look).kind == "passed"
    for bad in ({"ttft_s": 1.2}, {"itl_s": 0.06}, {"client_errors": 60}, {"cached": 0.05, "expected": 0.05}):
        assert judge(ALL, figures(bad, idle), before, look).kind == "failed", bad
    assert judge(ALL, figures({}, idle), Baseline(), look).kind == "waiting"
    unlucky = msgspec.structs.replace(before, attempts=200, failures=0)
    assert judge(ALL, figures({"failures": 3}, idle), unlucky, look).kind == "passed", (
        "it never gets a better one"
    )


@pytest.mark.parametrize(
    ("bound", "few"),
    [
        ("max_ttft_p90_ratio", {"streams": 99}),
        ("max_itl_p90_ratio", {"answers": 99}),
        ("min_cached_share_ratio", {"attempts": 99}),
        ("max_error_rate_ratio", {"attempts": 99}),
        ("max_client_error_rate_ratio", {"attempts": 99}),
    ],
)
def test_bounds_that_compare_need_a_stable_side(bound: str, few: dict[str, int]) -> None:
    analysis = CanaryAnalysis(**{bound: 1.0})
    assert missing_baseline(analysis, baseline_of(analysis, side(**few), Baseline()))
    assert not missing_baseline(analysis, baseline_of(analysis, side(), Baseline()))


counts = st.integers(0, 300)


@given(
    attempts=counts,
    failures=counts,
    client_errors=counts,
    streams=counts,
    ttft=st.floats(0.001, 200),
    tokens=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    is_complete=st.booleans(),
    elapsed_s=st.none() | st.floats(0, 1e6),
    weight=st.sampled_from([1, 50, 100]),
)
def test_only_figures_within_every_bound_pass(
    attempts: int,
    failures: int,
    client_errors: int,
    streams: int,
    ttft: float,
    tokens: tuple[float, float],
    is_complete: bool,
    elapsed_s: float | None,
    weight: int,
) -> None:
    """Whatever is reported, even more failures than attempts."""
    expected, cached = tokens
    canary = side(
        attempts=attempts,
        failures=failures,
        client_errors=client_errors,
        streams=streams,
        ttft_s=ttft,
        expected=expected,
        cached=cached,
    )
    found = msgspec.structs.replace(figures({}, is_complete=is_complete), canary=canary, canary_total=canary)
    verdict = judge(ALL, found, Baseline(), Look(weight=weight, elapsed_s=elapsed_s))
    if verdict.kind != "passed":
        assert verdict.message
        return
    assert is_complete
    assert attempts >= 100
    assert streams >= 100
    assert failures <= 0.01 * attempts
    assert client_errors <= 1 + 2 * 0.002 * attempts
    assert canary.ttft_p90_s is not None
    assert canary.ttft_p90_s <= 1.5 * (side().ttft_p90_s or 0)
    assert cached >= 0.5 * 0.489
    assert canary.cached_tokens >= 0.8 * canary.predicted_tokens


def rollout(revision: str, weight: int, attempts: int, **side: Any) -> RolloutReport:
    canary = SideReport(attempts=attempts, **side)
    return RolloutReport(
        canary_revision=revision, weight=weight, canary=canary, stable=SideReport(attempts=7)
    )


def load_of(*rollouts: RolloutReport | None) -> Any:
    reports = [
        LoadReport(router=str(number), services=(ServiceLoadReport(service="team/tiny", rollout=each),))
        for number, each in enumerate(rollouts)
    ]
    return FleetLoad(reports, is_complete=True)["team/tiny"]


def test_figures_of_all_routers_are_added_up() -> None:
    ttft = [0] * (len(TTFT_BOUNDS_S) + 1)
    ttft[4] = 10
    merged = split_figures(
        load_of(
            rollout("new", 20, 10, failures=1, ttft_counts=tuple(ttft)),
            rollout("new", 20, 30, failures=2, ttft_counts=tuple(ttft)),
        ),
        "new",
        20,
    )
    assert merged.is_complete
    assert (merged.canary.attempts, merged.canary.failures, merged.canary.streams) == (40, 3, 20)
    assert merged.canary.ttft_p90_s == pytest.approx(
        TTFT_BOUNDS_S[3] + 0.9 * (TTFT_BOUNDS_S[4] - TTFT_BOUNDS_S[3])
    )
    assert merged.stable.attempts == 14


def test_whatever_routers_count_is_judged() -> None:
    for count in (2**63, 10**400):
        ttft = (count,) * (len(SIDE_BOUNDS_S) + 1)
        side = SideReport(
            attempts=count, failures=count, client_errors=2 * count, ttft=ttft, itl=ttft, sampled=count
        )
        report = RolloutReport(
            canary_revision="new", weight=20, canary=side, stable=side, canary_total=side, stable_total=side
        )
        found = split_figures(load_of(report), "new", 20)
        assert judge(ALL, found, Baseline(), LOOK).kind == "failed"
        baseline = baseline_of(ALL, found.stable, Baseline())
        assert msgspec.json.decode(msgspec.json.encode(baseline), type=Baseline) == baseline


@pytest.mark.parametrize("other", [None, rollout("old", 20, 50), rollout("new", 10, 50)], ids=str)
def test_routers_that_divide_otherwise_do_not_count(other: RolloutReport | None) -> None:
    merged = split_figures(load_of(rollout("new", 20, 10), other), "new", 20)
    assert (merged.is_complete, merged.canary.attempts) == (False, 10)


def test_without_a_report_there_are_no_figures() -> None:
    assert split_figures(None, "new", 0) == SplitFigures()
