"""What the routers measured of the two sides of a canary rollout, merged.

Owns which reports count, and how counts become figures. Must not judge them. Invariant: only counts of the asked
revision at the asked weight count, so that a figure never mixes two steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from argosy_operator.observed.service_load import ServiceLoad, quantile
from argosy_protocol.load_report import TTFT_BOUNDS_S, SideReport

_QUANTILE: Final = 0.9


class Figures(Struct, frozen=True, kw_only=True):
    """One side's figures."""

    attempts: int = 0
    failures: int = 0
    streams: int = 0
    """Streamed answers whose time to first token counts."""
    ttft_p90_s: float | None = None
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0

    @property
    def error_rate(self) -> float | None:
        return self.failures / self.attempts if self.attempts else None

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
    stable: Figures = Figures()
    canary: Figures = Figures()


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
        stable=_merged(each.stable for each in counted),
        canary=_merged(each.canary for each in counted),
    )


def _merged(reports: Iterable[SideReport]) -> Figures:
    reports = list(reports)
    counts = [each.ttft_counts for each in reports if len(each.ttft_counts) == len(TTFT_BOUNDS_S) + 1]
    ttft = [sum(column) for column in zip(*counts, strict=True)]
    return Figures(
        attempts=sum(each.attempts for each in reports),
        failures=sum(each.failures for each in reports),
        streams=sum(ttft),
        ttft_p90_s=quantile(ttft, _QUANTILE),
        prompt_tokens=sum(each.prompt_tokens for each in reports),
        predicted_tokens=sum(each.predicted_tokens for each in reports),
        cached_tokens=sum(each.cached_tokens for each in reports),
    )
