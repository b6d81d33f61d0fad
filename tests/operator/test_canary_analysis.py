"""The verdict on a canary: bounds, missing data, and the merging of routers' reports."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy_operator.desired.canary_analysis import Baseline, baseline_of, judge
from argosy_operator.observed.canary_figures import Figures, SplitFigures, split_figures
from argosy_operator.observed.service_load import FleetLoad
from argosy_protocol.load_report import (
    TTFT_BOUNDS_S,
    LoadReport,
    RolloutReport,
    ServiceLoadReport,
    SideReport,
)
from argosy_resource.canary_spec import CanaryAnalysis

ALL = CanaryAnalysis(
    max_error_rate=0.01,
    max_ttft_p90_ratio=1.5,
    min_cached_share_ratio=0.5,
    min_hit_ratio=0.8,
    min_requests=100,
)
GOOD: dict[str, Any] = {
    "attempts": 1000,
    "failures": 2,
    "streams": 500,
    "ttft_p90_s": 0.4,
    "prompt_tokens": 10_000,
    "predicted_tokens": 5_000,
    "cached_tokens": 4_900,
}


def figures(
    canary: dict[str, Any], stable: dict[str, Any] | None = None, *, is_complete: bool = True
) -> SplitFigures:
    return SplitFigures(
        is_complete=is_complete,
        canary=Figures(**{**GOOD, **canary}),
        stable=Figures(**{**GOOD, **(stable or {})}),
    )


@pytest.mark.parametrize(
    ("canary", "stable", "kind", "message"),
    [
        ({}, {}, "passed", ""),
        ({"failures": 10}, {}, "passed", ""),
        ({"failures": 11}, {}, "failed", "error rate 1.1 %, at most 1 %: 11 of 1000 requests failed"),
        ({"ttft_p90_s": 0.6}, {}, "passed", ""),
        ({"ttft_p90_s": 0.61}, {}, "failed", "TTFT p90 0.61 s, the stable side's 0.4 s: at most 1.5 times"),
        ({"cached_tokens": 2_000, "predicted_tokens": 2_000}, {}, "failed", "cached share 20 %, the stable"),
        ({"predicted_tokens": 7_000}, {}, "failed", "4900 of 7000 tokens expected to be cached were"),
        ({"attempts": 99}, {}, "waiting", "99 of 100 requests"),
        ({"attempts": 99, "failures": 99}, {}, "waiting", "99 of 100 requests"),
        ({"streams": 99}, {}, "waiting", "99 of 100 streamed answers"),
        ({"streams": 99, "failures": 500}, {}, "failed", "error rate 50 %"),
        ({}, {"streams": 99}, "waiting", "too few streamed answers of the stable side"),
        ({}, {"attempts": 99}, "waiting", "too few requests of the stable side"),
        ({}, {"cached_tokens": 0}, "passed", ""),
        ({"prompt_tokens": 0, "cached_tokens": 0, "predicted_tokens": 0}, {}, "waiting", "usage"),
    ],
    ids=str,
)
def test_verdicts(canary: dict[str, Any], stable: dict[str, Any], kind: str, message: str) -> None:
    verdict = judge(ALL, figures(canary, stable), Baseline())
    assert verdict.kind == kind
    assert message in verdict.message


def test_a_silent_router_delays_success_but_not_failure() -> None:
    assert judge(ALL, figures({}, is_complete=False), Baseline()).kind == "waiting"
    assert judge(ALL, figures({"failures": 500}, is_complete=False), Baseline()).kind == "failed"


def test_an_earlier_steps_figures_stand_in_for_a_stable_side_without_requests() -> None:
    """As in a blue-green rollout, whose stable side gets none."""
    before = baseline_of(ALL, Figures(**GOOD), Baseline())
    idle = {"attempts": 0, "streams": 0, "ttft_p90_s": None, "prompt_tokens": 0, "cached_tokens": 0}
    assert judge(ALL, figures({}, idle), before).kind == "passed"
    assert judge(ALL, figures({"ttft_p90_s": 0.61}, idle), before).kind == "failed"
    assert judge(ALL, figures({}, idle), Baseline()).kind == "waiting"


counts = st.integers(0, 300)


@given(
    attempts=counts,
    failures=counts,
    streams=counts,
    ttft=st.none() | st.floats(0, 2),
    tokens=st.tuples(counts, counts, counts),
    is_complete=st.booleans(),
)
def test_only_figures_within_every_bound_pass(
    attempts: int,
    failures: int,
    streams: int,
    ttft: float | None,
    tokens: tuple[int, int, int],
    is_complete: bool,
) -> None:
    prompt, predicted, cached = tokens
    made = {
        "attempts": attempts,
        "failures": failures,
        "streams": streams,
        "ttft_p90_s": ttft,
        "prompt_tokens": prompt,
        "predicted_tokens": predicted,
        "cached_tokens": cached,
    }
    if judge(ALL, figures(made, is_complete=is_complete), Baseline()).kind != "passed":
        return
    assert is_complete
    assert attempts >= 100
    assert streams >= 100
    assert failures <= 0.01 * attempts
    assert ttft is not None
    assert ttft <= 0.4 * 1.5
    assert cached / prompt >= 0.5 * 0.49
    assert cached >= 0.8 * predicted


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


@pytest.mark.parametrize("other", [None, rollout("old", 20, 50), rollout("new", 10, 50)], ids=str)
def test_routers_that_divide_otherwise_do_not_count(other: RolloutReport | None) -> None:
    merged = split_figures(load_of(rollout("new", 20, 10), other), "new", 20)
    assert (merged.is_complete, merged.canary.attempts) == (False, 10)


def test_without_a_report_there_are_no_figures() -> None:
    assert split_figures(None, "new", 0) == SplitFigures()
