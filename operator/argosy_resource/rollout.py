"""`spec.rollout`: how a change reaches the replicas, in a cluster or on a laptop, and what the status says of it.

Owns what a user may write about rollouts and canaries, and the rollout policy, a pure function of it and of what is
known about each replica:

    no capacity for a surge  replicas are replaced in place, one at a time, if another one keeps serving; otherwise the
                             rollout waits
    the first new replica    is created alone, whatever maxSurge and maxUnavailable allow, to show that the change works
    a new replica fails      the rollout halts until that replica serves or the spec changes

Must not know pods, Deployments or processes, how a canary's figures are measured, nor how its steps are decided
(`argosy_operator.desired.rollout`). Invariant: a change that does not work costs at most one replica.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, ClassVar, Final, Literal, NamedTuple

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


class Rollout(Struct, frozen=True, kw_only=True, rename="camel"):
    """How a change is rolled out to the replicas."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule=(
                "!has(self.maxSurge) || !has(self.maxUnavailable) || self.maxSurge + self.maxUnavailable > 0"
            ),
            message="maxSurge and maxUnavailable must not both be 0: no replica could ever be replaced",
            field_path=".maxSurge",
        ),
    )
    max_surge: Annotated[int, Meta(ge=0, le=1000)] | None = None
    """Replicas that may exist beyond `replicas` while a change rolls out. 1 if left out, 0 if only maxUnavailable is
    set. Where the cluster has no GPU left for a surge, replicas are replaced in place, one at a time, as long as
    another one keeps serving; with a single replica, or with maxUnavailable 0, the rollout waits (reason
    WaitingForCapacity). The first new replica is created alone; if it fails, no other one is replaced (reason
    RolloutHalted)."""
    max_unavailable: Annotated[int, Meta(ge=0, le=1000)] | None = None
    """Replicas that may be missing while a change rolls out. 0 if left out, 1 if maxSurge is 0. The last routable
    replica is removed only if this allows all of them to be missing."""
    in_place_after_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 0
    """How long a rollout that finds no GPU or quota for its surge waits for one before it replaces replicas in place:
    the time that a cluster autoscaler takes to add a node (reason NoGPUForSurge). 0, the default, does not wait. For
    memory or a node it waits for 300 s at least (NoRoomForSurge). Where replicas are never replaced in place, it has no
    effect."""
    canary: CanaryRollout | None = None
    """Tries a change on a few replicas and a share of the requests first, and takes it back if it makes figures worse.
    If left out, a change is rolled out as soon as its first replica works."""
    drain_seconds: Annotated[int, Meta(ge=0, le=600)] = 5
    """How long a terminating replica keeps serving before it is told to stop, so that every router stops sending it
    requests first."""
    progress_deadline_seconds: Annotated[int, Meta(ge=30, le=86_400)] = 1800
    """How long a rollout may go without progress before Progressing turns False."""

    @property
    def surge(self) -> int:
        """maxSurge in effect."""
        if self.max_surge is not None:
            return self.max_surge
        return 0 if self.max_unavailable else 1

    @property
    def unavailable(self) -> int:
        """maxUnavailable in effect."""
        if self.max_unavailable is not None:
            return self.max_unavailable
        return 0 if self.surge else 1


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


class RolloutReplica(NamedTuple):
    """A replica that is not being removed, as far as the policy needs to know it."""

    name: str
    is_new: bool
    """Whether it is of the revision that the spec asks for."""
    is_serving: bool
    """Whether routers send it requests."""
    has_failed: bool
    """Whether its process or its pod's container ended, or could not start."""


class RolloutBounds(NamedTuple):
    """The numbers of replicas by which a rollout may exceed or miss the desired number now."""

    surge: int
    """Replicas that may exist beyond the desired number."""
    unavailable: int
    """Replicas that may be missing from the desired number."""


def may_replace_in_place(rollout: Rollout, replicas: int) -> bool:
    """Whether a replica may be removed before its successor exists, although the rollout was to surge. With an
    unavailability of 1 and two or more replicas, the last available one is never removed."""
    explicit = rollout.max_unavailable
    return replicas > 1 if explicit is None else explicit > 0


def rollout_bounds(
    rollout: Rollout, replicas: Collection[RolloutReplica], *, is_in_place: bool, free: int | None = None
) -> RolloutBounds:
    """Compute the surge and the unavailability that the rollout may use now.

    Args:
        is_in_place: replace replicas without a surge, for lack of capacity.
        free: further replicas that the hardware can hold; None if that is not known.
    """
    surge = rollout.surge if free is None else min(rollout.surge, free)
    unavailable = rollout.unavailable
    if is_in_place:
        surge, unavailable = 0, max(1, unavailable)
    if not _is_first(replicas):
        return RolloutBounds(surge, unavailable)
    return RolloutBounds(1, 0) if surge else RolloutBounds(0, min(unavailable, 1))


def halting_replica(replicas: Collection[RolloutReplica]) -> RolloutReplica | None:
    """The new replica whose failure halts the rollout; None if the rollout may go on.

    Without an old replica that serves there is nothing to protect, and a rollout never halts.
    """
    if not any(replica.is_serving for replica in replicas if not replica.is_new):
        return None
    failed = [
        replica for replica in replicas if replica.is_new and replica.has_failed and not replica.is_serving
    ]
    return min(failed, key=lambda replica: replica.name, default=None)


def _is_first(replicas: Collection[RolloutReplica]) -> bool:
    """Whether the first new replica still has to show that the change works. The second one is created once the first
    has been ready for a while (Kubernetes: minReadySeconds)."""
    new = [replica for replica in replicas if replica.is_new]
    return len(new) < len(replicas) and (len(new) < 2 or not any(replica.is_serving for replica in new))
