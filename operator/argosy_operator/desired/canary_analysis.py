"""Judges a canary by its figures: a pure function of `spec.rollout.canary.analysis` and of what routers measured.

Must not know steps, weights or clocks.

    error rate          failed attempts / attempts, of the canary
    TTFT p90 ratio      canary's / stable side's
    cached share ratio  canary's cached / prompt tokens, divided by the stable side's
    hit ratio           canary's cached tokens / those that the routers expected to be cached

Invariants: no data is no success: with fewer attempts or streamed answers than minRequests, or without a router's
report, the verdict is to wait; a figure out of bounds fails although another one still has no data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from argosy_operator.observed.canary_figures import Figures, SplitFigures
from argosy_resource.canary_spec import CanaryAnalysis


class Baseline(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Figures of the stable side at an earlier step, for one that leaves it too few requests."""

    ttft_p90_s: float | None = None
    cached_share: float | None = None


class Verdict(Struct, frozen=True):
    """What the figures say."""

    kind: Literal["passed", "waiting", "failed"]
    message: str = ""
    """The figure that failed, or what the analysis waits for."""


def baseline_of(analysis: CanaryAnalysis, stable: Figures, before: Baseline) -> Baseline:
    """The stable side's figures as far as there are enough of them; those of `before` where there are not."""
    return Baseline(
        ttft_p90_s=stable.ttft_p90_s if stable.streams >= analysis.min_requests else before.ttft_p90_s,
        cached_share=(
            stable.cached_share
            if stable.attempts >= analysis.min_requests and stable.cached_share is not None
            else before.cached_share
        ),
    )


def missing_baseline(analysis: CanaryAnalysis, baseline: Baseline) -> str:
    """Which of the stable side's figures the bounds need and `baseline` lacks; empty if none."""
    if analysis.max_ttft_p90_ratio is not None and baseline.ttft_p90_s is None:
        return "too few streamed answers of the stable side to compare with"
    if analysis.min_cached_share_ratio is not None and baseline.cached_share is None:
        return "too few requests of the stable side to compare cached tokens with"
    return ""


def judge(analysis: CanaryAnalysis, figures: SplitFigures, before: Baseline) -> Verdict:
    """Judge the canary; `before` replaces figures of a stable side that has too few requests now."""
    least, canary = analysis.min_requests, figures.canary
    if canary.attempts < least:
        return Verdict("waiting", f"{canary.attempts} of {least} requests within {analysis.window_seconds} s")
    verdicts = list(_by_bound(analysis, canary, baseline_of(analysis, figures.stable, before)))
    for kind in ("failed", "waiting"):
        for verdict in verdicts:
            if verdict.kind == kind:
                return verdict
    if not figures.is_complete:
        return Verdict("waiting", "a router has not reported the figures of this step yet")
    return Verdict("passed")


def _by_bound(analysis: CanaryAnalysis, canary: Figures, stable: Baseline) -> Iterator[Verdict]:
    least = analysis.min_requests
    most_errors, most_ttft = analysis.max_error_rate, analysis.max_ttft_p90_ratio
    least_share, least_hits = analysis.min_cached_share_ratio, analysis.min_hit_ratio
    rate = canary.error_rate
    if most_errors is not None and rate is not None and rate > most_errors:
        counts = f"{canary.failures} of {canary.attempts} requests failed"
        yield Verdict("failed", f"error rate {_percent(rate)}, at most {_percent(most_errors)}: {counts}")
    if most_ttft is not None:
        if canary.streams < least or canary.ttft_p90_s is None:
            yield Verdict("waiting", f"{canary.streams} of {least} streamed answers")
        elif stable.ttft_p90_s is None:
            yield Verdict("waiting", "too few streamed answers of the stable side to compare with")
        elif canary.ttft_p90_s > most_ttft * stable.ttft_p90_s:
            times = f"TTFT p90 {canary.ttft_p90_s:.3g} s, the stable side's {stable.ttft_p90_s:.3g} s"
            yield Verdict("failed", f"{times}: at most {most_ttft:g} times as long")
    if least_share is not None:
        share = canary.cached_share
        if share is None:
            yield Verdict("waiting", "no answer of the canary reported its usage")
        elif stable.cached_share is None:
            yield Verdict("waiting", "too few requests of the stable side to compare cached tokens with")
        elif share < least_share * stable.cached_share:
            shares = f"cached share {_percent(share)}, the stable side's {_percent(stable.cached_share)}"
            yield Verdict("failed", f"{shares}: at least {least_share:g} times as much")
    if least_hits is not None:
        if not canary.prompt_tokens:
            yield Verdict("waiting", "no answer of the canary reported its usage")
        elif canary.cached_tokens < least_hits * canary.predicted_tokens:
            found = f"{canary.cached_tokens} of {canary.predicted_tokens} tokens expected to be cached were"
            yield Verdict("failed", f"{found}: at least {_percent(least_hits)}")


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
