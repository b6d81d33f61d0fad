"""What the routers measured of the two sides of a canary rollout, merged.

Owns which reports count, and how counts become figures. Must not judge them. Invariants: only counts of the asked
revision at the asked weight count, so that a figure never mixes two steps; what a router does not report is no data.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

from msgspec import Struct

from argosy_operator.observed.service_load import ServiceLoad, quantile
from argosy_protocol.load_report import SIDE_BOUNDS_S, TTFT_BOUNDS_S, SideReport

QUANTILE: Final = 0.9
_MOST: Final = 2**45
"""Of a count, whatever routers report: a float has the sum of all buckets exactly."""


class Figures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One side's figures. Counts of latencies are by the buckets of SIDE_BOUNDS_S; empty without any."""

    attempts: int = 0
    failures: int = 0
    client_errors: int = 0
    streams: int = 0
    """Streamed attempts whose time to first token counts."""
    ttft_p90_s: float | None = None
    ttft: tuple[int, ...] = ()
    itl: tuple[int, ...] = ()
    """Streamed answers by the mean time between their tokens."""
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    sampled: int = 0
    """Answers of whose prompts one token was drawn."""
    sampled_cached: int = 0
    """Those whose token was cached."""
    expected: int = 0
    """Answers of which one token was drawn that was expected to be cached."""
    expected_cached: int = 0

    @property
    def error_rate(self) -> float | None:
        return self.failures / self.attempts if self.attempts else None

    @property
    def client_error_rate(self) -> float | None:
        return self.client_errors / self.attempts if self.attempts else None

    @property
    def itl_p90_s(self) -> float | None:
        return quantile(self.itl, QUANTILE, SIDE_BOUNDS_S)

    @property
    def cached_share(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def hit_ratio(self) -> float | None:
        """Cached tokens, divided by those that were expected; None if none were."""
        return self.cached_tokens / self.predicted_tokens if self.predicted_tokens else None


class SplitFigures(Struct, frozen=True, kw_only=True):
    """Both sides' figures."""

    is_complete: bool = False
    """Whether every router has reported of late, and divides the service as asked."""
    is_detailed: bool = True
    """Whether every router counts all that SideReport has. Those of the previous release do not, and what they leave
    out is not zero."""
    routers: int = 1
    """Number of routers whose counts are in the figures."""
    stable: Figures = Figures()
    """Of the last window."""
    canary: Figures = Figures()
    stable_total: Figures = Figures()
    """Since the service is divided by this weight, as far as routers have counted that."""
    canary_total: Figures = Figures()


def split_figures(load: ServiceLoad | None, revision: str, weight: int) -> SplitFigures:
    """The figures of the canary `revision` at this weight."""
    if load is None:
        return SplitFigures()
    counted = [
        each
        for each in load.rollouts
        if each is not None and each.canary_revision == revision and each.weight == weight
    ]
    return SplitFigures(
        is_complete=load.is_complete and len(counted) == len(load.rollouts) > 0,
        is_detailed=all(each.canary_total is not None for each in counted),
        routers=max(1, len(counted)),
        stable=_merged(each.stable for each in counted),
        canary=_merged(each.canary for each in counted),
        stable_total=_merged(each.stable_total for each in counted if each.stable_total is not None),
        canary_total=_merged(each.canary_total for each in counted if each.canary_total is not None),
    )


def bucket_of(counts: Sequence[int], share: float) -> int:
    """Index of the bucket that has the quantile `share`; there is a count."""
    below = list(accumulate(counts))
    return bisect_left(below, share * below[-1])


def bucket_at(seconds: float) -> int:
    """Index of the first bucket of SIDE_BOUNDS_S whose upper bound is at least so large."""
    return bisect_left(SIDE_BOUNDS_S, seconds)


def _merged(reports: Iterable[SideReport]) -> Figures:
    reports = list(reports)
    coarse = _sum_of_columns([each.ttft_counts for each in reports], len(TTFT_BOUNDS_S) + 1)
    ttft = _sum_of_columns([each.ttft for each in reports], len(SIDE_BOUNDS_S) + 1)
    is_fine = sum(ttft) >= sum(coarse)  # otherwise some router knows the other bounds only
    return Figures(
        attempts=_sum(each.attempts for each in reports),
        failures=_sum(each.failures for each in reports),
        client_errors=_sum(each.client_errors for each in reports),
        streams=max(sum(coarse), sum(ttft)),
        ttft_p90_s=quantile(ttft, QUANTILE, SIDE_BOUNDS_S) if is_fine else quantile(coarse, QUANTILE),
        ttft=ttft,
        itl=_sum_of_columns([each.itl for each in reports], len(SIDE_BOUNDS_S) + 1),
        prompt_tokens=_sum(each.prompt_tokens for each in reports),
        predicted_tokens=_sum(each.predicted_tokens for each in reports),
        cached_tokens=_sum(each.cached_tokens for each in reports),
        sampled=_sum(each.sampled for each in reports),
        sampled_cached=_sum(each.sampled_cached for each in reports),
        expected=_sum(each.expected for each in reports),
        expected_cached=_sum(each.expected_cached for each in reports),
    )


def _sum_of_columns(counts: list[tuple[int, ...]], length: int) -> tuple[int, ...]:
    """The sums by bucket of those that have so many; empty if none has."""
    return tuple(
        _sum(column) for column in zip(*(each for each in counts if len(each) == length), strict=True)
    )


def _sum(counts: Iterable[int]) -> int:
    return min(_MOST, sum(counts))
