"""Canary rollouts: the step that a change has reached, as a function of the last one, of figures and of time.

Owns when a canary begins, which step follows, and what is remembered of it: one annotation of the Deployment. Must not
know how figures are judged (`canary_analysis`), nor how pods look (`children`).

    Starting    the step's replicas are created; the weight is still that of the step before
    Analyzing   they are routable, and the step has its weight; Held if a person or the step says so
    Promoting   the Deployment rolls the revision out; the canary's replicas serve until it is done
    Failed      the canary's replicas are gone, and the Deployment stays paused with its old replicas

Invariants: a weight grows, and a canary is promoted by its figures, only while all of its replicas are routable; the
Deployment stays paused, so that its own replicas keep the old revision, until the last step has passed;
nothing but time, figures and `action` moves a canary, and without figures it stays; a failed one stays failed until the
revision changes or a person promotes it; equal inputs give an equal state, so that waiting writes nothing.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from argosy_operator.desired.canary_analysis import (
    Baseline,
    Look,
    Verdict,
    baseline_of,
    judge,
    missing_baseline,
)
from argosy_operator.desired.spec_digest import input_digest
from argosy_operator.desired.staged_rollout import held_revision, is_healthy
from argosy_operator.kinds import DEPLOYMENTS
from argosy_operator.names import CANARY_ANNOTATION, KEY_ANNOTATION, canary_name
from argosy_operator.observed.canary_figures import SplitFigures, split_figures
from argosy_operator.observed.deployment import deployment_condition, has_the_turn, serving_revision
from argosy_operator.observed.elapsed import min_time, seconds_between
from argosy_operator.observed.observation import Object, Observation
from argosy_operator.observed.pod import Pod
from argosy_resource.canary_spec import MAX_STEPS, CanaryRollout, CanaryStep
from argosy_resource.types import InferenceService

MAX_MESSAGE: Final = 512
"""Characters of a failure that are remembered."""
ABORTED: Final = "aborted by spec.rollout.canary.action"
PROMOTED: Final = "promoted by spec.rollout.canary.action"
"""What is remembered of a canary that a person has ended."""


class CanaryState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is remembered of a canary. Whoever may edit Deployments can write the annotation, so it has bounds."""

    revision: Annotated[str, Meta(max_length=63)]
    phase: Literal["stepping", "promoting", "failed"] = "stepping"
    step: Annotated[int, Meta(ge=0, lt=MAX_STEPS)] = 0
    """Index of the step."""
    weight: Annotated[int, Meta(ge=0, le=100)] = 0
    """The canary's share of the requests now, in per cent."""
    weight_since: str = ""
    """When it got this weight, perhaps in a step before."""
    size: Annotated[int, Meta(ge=0, le=1000)] = 1
    """Replicas that the canary should have."""
    missing_since: str = ""
    """Since when its replicas are not all routable (RFC 3339); empty while they are."""
    since: str = ""
    """When the step got its weight; empty before that."""
    message: Annotated[str, Meta(max_length=MAX_MESSAGE)] = ""
    """Why it failed, or that a person promoted it."""
    baseline: Baseline = Baseline()
    needs_turn: bool = False
    """Whether the change is the operator's own, which is promoted in one service at a time."""


class CanaryPlan(Struct, frozen=True, kw_only=True):
    """A canary rollout as it is to be now, and what it waits for."""

    state: CanaryState
    held: str = ""
    """Revision that the Deployment's own replicas keep; empty while it rolls out the canary's."""
    is_uniform: bool = True
    """Whether all of them have it."""
    waits_for: str = ""
    is_held: bool = False
    """Whether only a person can let it go on."""
    figures: SplitFigures = SplitFigures()

    @property
    def is_starting(self) -> bool:
        """Whether its step has not begun: its replicas are created, and may not all come up."""
        return self.state.phase == "stepping" and not self.state.since and not self.is_held


def read_canary(deployment: Object | None) -> CanaryState | None:
    """What the Deployment remembers; None if that is nothing, or cannot be read."""
    text = "" if deployment is None else deployment["metadata"].get("annotations", {}).get(CANARY_ANNOTATION)
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=CanaryState)
    except msgspec.MsgspecError:
        return None


def key_of_trial(service: InferenceService, deployment: Object | None) -> str:
    """Digest of the key that the template keeps while a canary is tried, or has failed; empty if there is none.

    A key that lapses replaces every replica, and would roll out what nobody has found good.
    """
    state = read_canary(deployment)
    if (
        deployment is None
        or state is None
        or state.phase == "promoting"
        or service.spec.rollout.canary is None
        or service.spec.replicas == 0
    ):
        return ""
    digest: str = deployment["spec"]["template"]["metadata"].get("annotations", {}).get(KEY_ANNOTATION, "")
    return digest


def encode_canary(state: CanaryState) -> str:
    """The value of the annotation."""
    return msgspec.json.encode(state).decode()


def plan_canary(
    service: InferenceService, observed: Observation, revision: str, *, key_digest: str
) -> CanaryPlan | None:
    """The canary rollout of `revision`; None if the Deployment rolls it out by itself, or is done with it.

    A service that has no routable replica has nothing to compare with, and engines whose key is no longer valid cannot
    wait: a router that starts now does not reach them.
    """
    canary, live = service.spec.rollout.canary, observed.deployment
    if canary is None or live is None or service.spec.replicas == 0:
        return None
    live_digest = live["spec"]["template"]["metadata"].get("annotations", {}).get(KEY_ANNOTATION)
    if key_digest and live_digest != key_digest:
        return None
    own = observed.without_canary
    serving = serving_revision(live)
    before = read_canary(live)
    alive = [pod for pod in own.pods if pod.is_alive]
    is_uniform = all(pod.revision == serving for pod in alive)
    if before is None or before.revision != revision:
        is_complete = is_uniform or (before is not None and before.phase == "promoting")
        if serving == revision or not is_complete or not any(pod.is_routable for pod in alive):
            return None
        if any(pod.is_routable and pod.revision == revision for pod in alive):
            return None  # an edit back during the promotion, to what still serves
        digest = input_digest(service)
        held = held_revision(service, own, revision, digest=digest, key_digest=key_digest)
        needs_turn = bool(held) or has_the_turn(live)
        before = CanaryState(
            revision=revision, weight_since=observed.time, missing_since=observed.time, needs_turn=needs_turn
        )
    if before.phase == "promoting":
        is_done = is_healthy(service, own, revision)
        return None if is_done else CanaryPlan(state=before, waits_for=_late_abort(canary, revision))
    replicas = [pod for pod in observed.pods if pod.is_canary and pod.is_alive and pod.revision == revision]
    routable = sum(pod.is_routable for pod in replicas)
    figures = split_figures(observed.load, revision, before.weight)
    state, waits_for, is_held = advance(
        canary,
        before,
        replicas=service.spec.replicas,
        routable=routable,
        trouble=_trouble(replicas) or _refusal(service, observed, revision),
        figures=figures,
        now=observed.time,
        began=observed.began,
        deadline_s=service.spec.rollout.progress_deadline_seconds,
    )
    if state.phase == "promoting":
        if not (state.needs_turn and observed.rolling_elsewhere):
            return CanaryPlan(state=state, figures=figures)
        state, waits_for = before, f"{observed.rolling_elsewhere} is rolled out first"
    return CanaryPlan(
        state=state,
        held=serving,
        is_uniform=is_uniform,
        waits_for=waits_for,
        is_held=is_held,
        figures=figures,
    )


def advance(
    canary: CanaryRollout,
    state: CanaryState,
    *,
    replicas: int,
    routable: int,
    trouble: str = "",
    figures: SplitFigures,
    now: str,
    began: str = "",
    deadline_s: float,
) -> tuple[CanaryState, str, bool]:
    """The next state of a canary that is not being promoted, what it waits for, and whether for a person.

    Args:
        replicas: of the service.
        routable: replicas of the canary to which routers send requests.
        trouble: why one of the others does not run; empty if none has a problem.
        figures: of the state's weight.
        now: RFC 3339.
        began: when this operator began to lead, by the same clock; empty if not known. An earlier time may be of
            another operator's clock, which differs.
        deadline_s: seconds after which replicas that are not routable fail the canary.
    """
    if began and state.missing_since and seconds_between(state.missing_since, began) > 0:
        state = msgspec.structs.replace(state, missing_since=began)
    # What is still to come was written by a clock that is set back since, or another operator's.
    state = msgspec.structs.replace(
        state,
        since=min_time(state.since, now),
        weight_since=min_time(state.weight_since, now),
        missing_since=min_time(state.missing_since, now),
    )
    action = canary.action if canary.action is not None and canary.action.revision == state.revision else None
    if action is not None and action.type == "Promote":
        return _promoted(state, PROMOTED), "", False
    if state.phase == "failed":
        return state, "", False
    if action is not None and action.type == "Abort":
        return _failed(state, ABORTED), "", False
    state = _sized(_within(state, canary.steps), canary.steps, replicas)
    step = canary.steps[state.step]
    if state.weight != step.weight:  # the last step's still, or the step was edited
        state = msgspec.structs.replace(state, since="")
    verdict, least_s = Verdict("passed"), step.pause_seconds
    if canary.analysis is not None and state.weight:
        divided_since = state.weight_since or state.since
        look = Look(
            weight=state.weight,
            steps=len(canary.steps),
            elapsed_s=seconds_between(divided_since, now) if divided_since else None,
        )
        verdict = judge(canary.analysis, figures, state.baseline, look)
        least_s = max(least_s, canary.analysis.window_seconds)
    if verdict.kind == "failed":
        return _failed(state, verdict.message), "", False
    if state.since:
        state, missing = _missing(state, routable=routable, trouble=trouble, now=now, deadline_s=deadline_s)
        if state.phase == "failed":
            return state, "", False
        if verdict.kind == "waiting":
            return state, verdict.message, False
        if seconds_between(state.since, now) < least_s:
            return state, f"the step lasts {least_s} s", False
        if missing:
            return state, missing, False
        if canary.hold:
            return state, "spec.rollout.canary.hold is set", True
        continued = action.step or 0 if action is not None else 0
        if step.hold and continued <= state.step:
            return state, f"spec.rollout.canary.steps[{state.step}].hold is set", True
        if state.step + 1 == len(canary.steps):
            return _promoted(state), "", False
        state = msgspec.structs.replace(state, step=state.step + 1, since="")
        state = _sized(state, canary.steps, replicas)
    return _start(
        canary, state, routable=routable, trouble=trouble, figures=figures, now=now, deadline_s=deadline_s
    )


def _trouble(replicas: list[Pod]) -> str:
    """The problem of the canary's first replica that has one; empty if none has."""
    for pod in sorted(replicas, key=lambda pod: pod.name):
        if pod.problem is not None:
            return f"pod {pod.name}: {pod.problem.reason}: {pod.problem.message}".rstrip(": ")
        if pod.unschedulable or pod.gate_words:
            return f"pod {pod.name}: {pod.unschedulable or pod.gate_words}"
    return ""


def _refusal(service: InferenceService, observed: Observation, revision: str) -> str:
    """Why the API server refuses the canary's replicas; empty if it does not."""
    name = (service.metadata.namespace, canary_name(service, revision))
    condition = deployment_condition(observed.children.get((DEPLOYMENTS, name)), "ReplicaFailure")
    return condition.get("message", "") if condition.get("status") == "True" else ""


def _late_abort(canary: CanaryRollout, revision: str) -> str:
    """What is told of an `Abort` that comes after the last step; empty without one. Old replicas may be gone by then,
    and new ones have the Deployment's template, which is the resource's: only an edit leads back."""
    if canary.action is None or canary.action.type != "Abort" or canary.action.revision != revision:
        return ""
    return "action Abort comes too late, after the last step: apply the previous manifest to go back"


def _start(
    canary: CanaryRollout,
    state: CanaryState,
    *,
    routable: int,
    trouble: str,
    figures: SplitFigures,
    now: str,
    deadline_s: float,
) -> tuple[CanaryState, str, bool]:
    """Give the step its weight: a smaller one at once, a larger one when its replicas are routable and the stable
    side's figures, if they are compared with, are known."""
    step = canary.steps[state.step]
    state, missing = _missing(state, routable=routable, trouble=trouble, now=now, deadline_s=deadline_s)
    if state.phase == "failed":
        return state, "", False
    if step.weight < state.weight:
        return _weighted(canary, state, step, figures, now), missing, False
    if missing:
        return state, missing, False
    weighted = _weighted(canary, state, step, figures, now)
    if step.weight > state.weight:
        if canary.hold:
            return state, "spec.rollout.canary.hold is set", True
        # With its weight the canary may leave the stable side too few requests to be measured by.
        if canary.analysis is not None and (lacks := missing_baseline(canary.analysis, weighted.baseline)):
            return state, lacks, False
        if canary.analysis is not None and step.weight == 100 and state.weight_since:
            window_s = canary.analysis.window_seconds
            if seconds_between(state.weight_since, now) < window_s:
                return (
                    state,
                    f"the stable side is measured for {window_s} s before it gets no requests",
                    False,
                )
    return weighted, "", False


def _missing(
    state: CanaryState, *, routable: int, trouble: str, now: str, deadline_s: float
) -> tuple[CanaryState, str]:
    """The state, failed if its replicas have not all been routable for too long, and how many are; empty if all. The
    replicas go with the canary, so their trouble is kept in its message."""
    if routable >= state.size:
        return msgspec.structs.replace(state, missing_since=""), ""
    so_far = f"{routable} of {state.size} canary replicas routable"
    why = f"; {trouble}" if trouble else ""
    since = state.missing_since or now
    if seconds_between(since, now) > deadline_s:
        return _failed(state, f"{so_far} after {deadline_s:g} s{why}"), so_far
    return msgspec.structs.replace(state, missing_since=since), f"{so_far}{why}"[:MAX_MESSAGE]


def _weighted(
    canary: CanaryRollout, state: CanaryState, step: CanaryStep, figures: SplitFigures, now: str
) -> CanaryState:
    """With the step's weight from now on. The stable side's figures so far are kept, since it may get too few requests
    from now on."""
    baseline = state.baseline
    if canary.analysis is not None:
        baseline = baseline_of(canary.analysis, figures.stable, baseline)
    weight_since = state.weight_since if step.weight == state.weight else now
    return msgspec.structs.replace(
        state, weight=step.weight, weight_since=weight_since, since=now, baseline=baseline
    )


def _promoted(state: CanaryState, message: str = "") -> CanaryState:
    """Replicas of both revisions serve while the Deployment rolls out, unless the old ones get no requests already."""
    weight = state.weight if state.weight == 100 and state.phase == "stepping" else 0
    size = 0 if state.phase == "failed" else state.size
    return CanaryState(
        revision=state.revision,
        phase="promoting",
        step=state.step,
        weight=weight,
        size=size,
        message=message,
        needs_turn=state.needs_turn,
    )


def _failed(state: CanaryState, message: str) -> CanaryState:
    return CanaryState(
        revision=state.revision,
        phase="failed",
        step=state.step,
        size=0,
        message=message[:MAX_MESSAGE],
        needs_turn=state.needs_turn,
    )


def _within(state: CanaryState, steps: tuple[CanaryStep, ...]) -> CanaryState:
    """The state at the last step if its own one was removed."""
    return msgspec.structs.replace(state, step=min(state.step, len(steps) - 1))


def _sized(state: CanaryState, steps: tuple[CanaryStep, ...], replicas: int) -> CanaryState:
    """With the replicas of its step, and no fewer than any step before had."""
    return msgspec.structs.replace(state, size=max(_size(each, replicas) for each in steps[: state.step + 1]))


def _size(step: CanaryStep, replicas: int) -> int:
    """Beside all of the old replicas, so many get the weight's share of the requests without more load each."""
    if step.replicas is not None:
        return step.replicas
    if step.weight >= 50:
        return replicas
    return max(1, replicas * step.weight // (100 - step.weight))
