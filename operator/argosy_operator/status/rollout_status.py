"""What the status says of a canary rollout.

Must not decide a step (`desired.canary`). Invariant: while a step lasts, message and figures are brought up to date
twice a minute at most, and not at all if they are the same, so that a service at rest causes no write.
"""

from __future__ import annotations

from typing import Final

import msgspec

from argosy_operator.desired.canary import CanaryPlan
from argosy_operator.observed.canary_figures import Figures
from argosy_operator.observed.elapsed import seconds_between
from argosy_resource.canary_spec import CanaryRollout, RolloutPhase, RolloutStatus, SideFigures
from argosy_resource.types import InferenceService

UPDATE_SECONDS: Final = 30
_UPDATED: Final = ("message", "canary", "stable", "time")
_DIGITS: Final = 4


def rollout_status(service: InferenceService, plan: CanaryPlan | None, now: str) -> RolloutStatus | None:
    """The status at `now` (RFC 3339); None without a canary rollout."""
    canary, before = service.spec.rollout.canary, service.status.rollout
    if plan is None or canary is None:
        return None
    state = plan.state
    phase = rollout_phase(plan)
    new = RolloutStatus(
        phase=phase,
        revision=state.revision,
        stable_revision=plan.held if plan.is_uniform else "",
        step=state.step + 1,
        steps=len(canary.steps),
        weight=state.weight,
        window_seconds=_window(canary),
        since=state.since,
        message=plan.waits_for or state.message,
        canary=_figures(plan.figures.canary),
        stable=_figures(plan.figures.stable),
        time=now,
    )
    if before is None or before.revision != new.revision:
        return new
    if phase in ("Promoting", "Failed") and before.phase == phase:
        return msgspec.structs.replace(new, canary=before.canary, stable=before.stable, time=before.time)
    kept = msgspec.structs.replace(new, **{name: getattr(before, name) for name in _UPDATED})
    is_due = seconds_between(before.time, now) >= UPDATE_SECONDS
    is_news = msgspec.structs.replace(new, time=before.time) != before
    return new if kept != before or (is_due and is_news) else before


def rollout_phase(plan: CanaryPlan) -> RolloutPhase:
    """The phase as the status names it."""
    if plan.state.phase == "failed":
        return "Failed"
    if plan.state.phase == "promoting":
        return "Promoting"
    if plan.is_held:
        return "Held"
    return "Starting" if plan.is_starting else "Analyzing"


def _window(canary: CanaryRollout) -> int:
    return 300 if canary.analysis is None else canary.analysis.window_seconds


def _figures(figures: Figures) -> SideFigures:
    return SideFigures(
        requests=figures.attempts,
        error_rate=_rounded(figures.error_rate),
        client_error_rate=_rounded(figures.client_error_rate),
        ttft_p90_seconds=_rounded(figures.ttft_p90_s),
        itl_p90_seconds=_rounded(figures.itl_p90_s),
        cached_share=_rounded(figures.cached_share),
        hit_ratio=_rounded(figures.hit_ratio),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)
