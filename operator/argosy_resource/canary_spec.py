"""`spec.rollout.canary`: how a change is tried on a canary before it reaches every replica, and what the status says.

Owns what a user may write about canaries of a service's own revisions. Must not know how the figures are measured, nor
how a step is decided (`argosy_operator.desired.canary`).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from msgspec import Meta, Struct

from argosy_resource.schema_types import Rule

MAX_STEPS: Final = 16

RevisionName = Annotated[
    str, Meta(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
]


class CanaryStep(Struct, frozen=True, kw_only=True, rename="camel"):
    """One step of a canary rollout."""

    weight: Annotated[int, Meta(ge=0, le=100)]
    """The canary's share of the requests, in percent, at most: below 100 a canary replica gets no more requests than an
    old one, so that their figures can be compared, and beside as many old replicas the canary answers half. All
    requests of a session are answered by the same side, and one that the canary answers stays with it while the weight
    grows."""
    pause_seconds: Annotated[int, Meta(ge=0, le=604_800)] = 0
    """How long the step lasts at least."""
    hold: bool = False
    """Whether the step lasts until action Continue names it."""
    replicas: Annotated[int, Meta(ge=1, le=1000)] | None = None
    """Replicas of the canary. If left out, as many as answer `weight` percent of the requests with the load of the old
    ones, rounded down, at least one and at most the service's replicas. With fewer the canary's share is smaller. No
    step has fewer than the one before."""


class CanaryAnalysis(Struct, frozen=True, kw_only=True, rename="camel"):
    """Bounds of the canary's figures, as the routers measure them. What proves that a figure is out of bounds ends the
    canary: of those that are within all bounds, 1 in 100 at most. A step passes only while all are within."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule=(
                "has(self.maxErrorRate) || has(self.maxErrorRateRatio) || has(self.maxClientErrorRateRatio) || "
                "has(self.maxTtftP90Ratio) || has(self.maxItlP90Ratio) || has(self.minCachedShareRatio) || "
                "has(self.minHitRatio)"
            ),
            message="set at least one bound, such as maxErrorRate: 0.01",
        ),
    )
    max_error_rate: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Largest share of the attempts at canary replicas that may fail: errors of the engine (5xx) and of connections,
    and answers that do not come in time, also those that a retry hides from clients. A full replica's refusal is no
    attempt."""
    max_error_rate_ratio: Annotated[float, Meta(ge=0.1, le=100)] | None = None
    """Largest ratio of the canary's share of failed attempts to the stable side's."""
    max_client_error_rate_ratio: Annotated[float, Meta(ge=0.1, le=100)] | None = None
    """Largest ratio of the canary's share of attempts that are answered with 4xx to the stable side's."""
    max_ttft_p90_ratio: Annotated[float, Meta(ge=0.1, le=100)] | None = None
    """Largest ratio of the canary's time to first token to the stable side's, at the 90th percentile of streamed
    attempts. One without a first token counts with the time that it was waited for."""
    max_itl_p90_ratio: Annotated[float, Meta(ge=0.1, le=100)] | None = None
    """Largest ratio of the canary's inter-token latency to the stable side's, at the 90th percentile of streamed
    answers. Each counts with the mean time between its tokens."""
    min_cached_share_ratio: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    """Smallest ratio of the canary's share of cached prompt tokens to the stable side's. A canary with fewer replicas,
    and caches that are new, has a smaller share at first."""
    min_hit_ratio: Annotated[float, Meta(ge=0.01, le=1)] | None = None
    """Smallest ratio of the canary's cached prompt tokens to those that the routers expected to be cached."""
    min_requests: Annotated[int, Meta(ge=1, le=1_000_000)] = 100
    """Attempts within the window without which no step passes, and streamed answers where latencies are compared."""
    window_seconds: Annotated[int, Meta(ge=10, le=3600)] = 300
    """Length of the window that the figures are of. A step lasts at least as long. By figures of cached tokens a canary
    fails after two windows at the earliest, since its caches are empty at first."""


class CanaryAction(Struct, frozen=True, kw_only=True, rename="camel"):
    """What a person decides about one revision. It means nothing for any other one, so that it may stay in Git."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="(self.type == 'Continue') == has(self.step)",
            message="step belongs to type Continue: set both, or neither",
            field_path=".step",
        ),
    )
    type: Literal["Continue", "Promote", "Abort"]
    """`Continue`: do not hold at the steps up to this one. `Promote`: roll the revision out to every replica without
    further steps, also after it has failed. `Abort`: take its requests and replicas away."""
    revision: RevisionName
    """The revision, as status.rollout has it."""
    step: Annotated[int, Meta(ge=1, le=MAX_STEPS)] | None = None
    """Number of the last step to continue from, as status.rollout counts them."""


class CanaryRollout(Struct, frozen=True, kw_only=True, rename="camel"):
    """Tries a change on a canary: replicas of the new revision besides all of the old ones, which get a share of the
    requests that grows step by step. After the last step the change is rolled out to every replica. A canary that fails
    gets no more requests and is removed, and the old replicas serve as before."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="!has(self.analysis) || self.steps.exists(step, step.weight > 0)",
            message="the canary gets no requests to analyse; set a weight above 0 in some step, or remove analysis",
            field_path=".steps",
        ),
        Rule(
            rule=(
                "has(self.analysis) || self.steps.exists(step, (has(step.hold) && step.hold) || "
                "(has(step.pauseSeconds) && step.pauseSeconds > 0))"
            ),
            message="nothing would stop a bad canary; set analysis, or pauseSeconds or hold in some step",
            field_path=".steps",
        ),
    )
    steps: Annotated[tuple[CanaryStep, ...], Meta(min_length=1, max_length=MAX_STEPS)]
    """Steps, in their order. A single one with weight 100 is a blue-green rollout."""
    analysis: CanaryAnalysis | None = None
    """What the canary is judged by in each step with a weight above 0; only time and people decide if left out."""
    hold: bool = False
    """Keeps the canary at the step that it has reached. It may still fail."""
    action: CanaryAction | None = None
    """What a person has decided about a revision."""


RolloutPhase = Literal["Starting", "Analyzing", "Held", "Promoting", "Failed"]


class SideFigures(Struct, frozen=True, kw_only=True, rename="camel"):
    """What the routers measured of one side within the window."""

    requests: Annotated[int, Meta(ge=0)] = 0
    """Attempts at its replicas that ended."""
    error_rate: Annotated[float, Meta(ge=0)] | None = None
    """Share of these that failed."""
    client_error_rate: Annotated[float, Meta(ge=0)] | None = None
    """Share of these that were answered with 4xx."""
    ttft_p90_seconds: Annotated[float, Meta(ge=0)] | None = None
    """Time to first token that nine of ten streamed attempts stayed below."""
    itl_p90_seconds: Annotated[float, Meta(ge=0)] | None = None
    """Mean time between tokens that nine of ten streamed answers stayed below."""
    cached_share: Annotated[float, Meta(ge=0)] | None = None
    """Share of the prompt tokens that were cached."""
    hit_ratio: Annotated[float, Meta(ge=0)] | None = None
    """Cached prompt tokens, divided by those that the routers expected to be cached."""


class RolloutStatus(Struct, frozen=True, kw_only=True, rename="camel"):
    """How far spec.rollout.canary is with the last change."""

    phase: RolloutPhase
    """`Starting`: the step's replicas are not all routable yet. `Analyzing`: the step has its weight. `Held`: it waits
    for a person. `Promoting`: the change is rolled out to every replica. `Failed`: the canary is gone."""
    revision: Annotated[str, Meta(max_length=63)]
    """Revision that is tried."""
    stable_revision: Annotated[str, Meta(max_length=63)] = ""
    """Revision of the replicas that serve meanwhile; empty if they have several."""
    step: Annotated[int, Meta(ge=1, le=MAX_STEPS)] = 1
    """Number of the step, from 1."""
    steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)] = 1
    """Number of steps."""
    weight: Annotated[int, Meta(ge=0, le=100)] = 0
    """The canary's share of the requests now, in percent, at most; `requests` of the two sides show what it is."""
    window_seconds: Annotated[int, Meta(ge=10, le=3600)] = 300
    """Length of the window that the figures are of."""
    since: Annotated[str, Meta(max_length=64)] = ""
    """When the step got its weight; empty before that."""
    message: Annotated[str, Meta(max_length=1024)] = ""
    """What the step waits for, or why the canary failed."""
    canary: SideFigures = SideFigures()
    """Figures of the canary, at `time`."""
    stable: SideFigures = SideFigures()
    """Figures of the other replicas, at `time`."""
    time: Annotated[str, Meta(max_length=64)] = ""
    """When message and figures were last brought up to date: twice a minute at most."""
