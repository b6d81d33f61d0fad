"""How often canaries fail that should not, and how soon those that should. docs/rollouts.md tells the rates."""

from __future__ import annotations

from math import comb, exp
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from canary_simulation import Build, verdicts

from argosy_operator.desired.canary_analysis import Share, evidence_above, evidence_of_ratio_above
from argosy_resource.rollout import CanaryRollout

EXAMPLE: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parents[2] / "examples/canary-rollout.yaml").read_text()
)["spec"]["rollout"]["canary"]
RATIOS: dict[str, Any] = {
    "steps": [{"weight": 50, "pauseSeconds": 1800}],
    "analysis": {"maxErrorRateRatio": 2, "maxClientErrorRateRatio": 1.5},
}
HELD: dict[str, Any] = {"steps": [{"weight": 50, "hold": True}], "analysis": {"maxErrorRate": 0.01}}
"""At one weight for as long as a test looks."""
BLUE_GREEN: dict[str, Any] = {
    "steps": [{"weight": 100, "pauseSeconds": 1800}],
    "analysis": EXAMPLE["analysis"] | RATIOS["analysis"],
}
SEED = 20261129


def rollout(spec: dict[str, Any]) -> CanaryRollout:
    return msgspec.convert(spec, CanaryRollout)


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.full)])
def test_a_canary_with_a_third_of_the_errors_that_it_may_have_fails_once_in_a_hundred_at_most(
    count: int,
) -> None:
    """Over 35 minutes, with a look every 5 seconds."""
    phases, _ = verdicts(count, 2100, SEED, canary=rollout(HELD), build=Build(errors=0.003))
    assert phases.get("failed", 0) <= count / 100


@pytest.mark.parametrize(
    "spec", [EXAMPLE, RATIOS, BLUE_GREEN], ids=["the example's bounds", "ratios of errors", "blue-green"]
)
@pytest.mark.parametrize("count", [6, pytest.param(500, marks=pytest.mark.full)])
def test_of_identical_builds_ninety_nine_in_a_hundred_pass(spec: dict[str, Any], count: int) -> None:
    phases, _ = verdicts(count, 3600, SEED, canary=rollout(spec), build=Build())
    assert phases.get("promoting", 0) >= 0.99 * count, phases


@pytest.mark.parametrize(
    ("spec", "bad", "requests"),
    [
        (HELD, {"errors": 0.05}, 1000),
        (EXAMPLE, {"errors": 0.05}, 1500),
        (EXAMPLE, {"slowness": 2.0}, 1500),
        (RATIOS, {"errors": 0.05}, 3000),
        (RATIOS, {"client_errors": 0.05}, 5000),
        (BLUE_GREEN, {"errors": 0.05}, 1500),
        (BLUE_GREEN, {"slowness": 2.0}, 4000),
        (BLUE_GREEN, {"client_errors": 0.05}, 5000),
        (EXAMPLE, {"cached": 0.1}, 2000),
    ],
    ids=[
        "errors",
        "errors, example",
        "latency",
        "errors against the stable side",
        "4xx",
        "blue-green, errors",
        "blue-green, latency",
        "blue-green, 4xx",
        "no cache",
    ],
)
def test_a_bad_canary_fails_within_so_many_of_its_requests(
    spec: dict[str, Any], bad: dict[str, float], requests: int
) -> None:
    phases, needed = verdicts(20, 3600, SEED, canary=rollout(spec), build=Build(**bad))
    assert phases == {"failed": 20}
    assert needed[-1] <= requests


def test_a_canary_at_its_bound_is_no_proof() -> None:
    phases, _ = verdicts(5, 2100, SEED, canary=rollout(HELD), build=Build(errors=0.01))
    assert phases == {"stepping": 5}


def probability(share: Share, rate: float) -> float:
    return comb(share.total, share.count) * rate**share.count * (1 - rate) ** (share.total - share.count)


def outcomes(total: int) -> list[Share]:
    return [Share(count, total) for count in range(total + 1)]


@pytest.mark.parametrize("bound", [0.0, 0.01, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("total", [1, 10, 300])
def test_while_a_share_is_within_its_bound_the_evidence_is_worth_no_more_than_one(
    bound: float, total: int
) -> None:
    """On average over what can happen: what Ville's inequality asks for."""
    for rate in (0.0, bound / 2, bound):
        found = [(probability(each, rate), evidence_above(bound, each)) for each in outcomes(total)]
        assert sum(chance * exp(evidence) for chance, evidence in found if chance) <= 1 + 1e-9


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0, 2.0, 50.0])
@pytest.mark.parametrize(("total", "others"), [(1, 1), (20, 5), (15, 30)])
def test_while_a_ratio_is_within_its_bound_the_evidence_is_worth_no_more_than_one(
    ratio: float, total: int, others: int
) -> None:
    for rate in (0.001, 0.02, 0.3, 0.95):
        own = min(1.0, ratio * rate)
        worth = sum(
            probability(share, own)
            * probability(other, rate)
            * exp(evidence_of_ratio_above(ratio, share, other))
            for share in outcomes(total)
            for other in outcomes(others)
        )
        assert worth <= 1 + 1e-9
