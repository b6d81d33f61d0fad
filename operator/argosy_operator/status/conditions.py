"""The conditions of a service: what each of them means, and when it is true.

Owns every condition's status, reason and message, and what the status says of a fetch and of a canary rollout. Must not
talk to an API server, look at a clock or decide a canary's step.

    Ready          the summary: clients can use this generation of the service now
    Progressing    a change is being rolled out
    WorkloadReady  every replica wanted is updated and its containers are ready
    ModelCached    the model is where the replicas can load it
    Routable       routers send requests to enough replicas
    Degraded       something needs a person
    Reconciling    as Progressing, in the terms of kstatus
    Stalled        nothing more happens until a person acts, in the terms of kstatus

Of ModelCached the reasons are:

    True     LocalSource     nothing has to be fetched; whether the model is there, the engine finds out
    False    ClaimNotFound   the claim that is to be mounted does not exist
    False    SourceNotFound  an engine has not found the model where it is to be mounted, or in the image
    True     Cached          every replica that began to fetch has its model
    False    Fetching        the least advanced of the fetches under way
    False    StoreLocked     a replica waits for a process that has the store's lock and makes no progress
    False    FetchFailed     the last attempt of a replica failed
    Unknown  Pending         no replica has begun to fetch

Invariants: Ready means that the status is of this generation, every replica is updated, enough of them are routable and
no old one is; with spec.scaling its lower bound says how many are enough, so that a step of it is no outage; a service
of which the spec wants no replica is Ready with a reason of its own, as nothing is left to be done; whether one that
was scaled to zero can serve is not known until a replica of its revision has; a fetch counts as progress of a rollout
for as long as a rollout may go without, counted from its last report that differed; a message names the pod and what it
waits for; equal inputs give equal conditions; while a canary's step lasts, its message and figures are brought up to
date twice a minute at most, and not at all if they are the same, so that a service at rest causes no write.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final

import msgspec
from msgspec import Struct

from argosy_operator.desired.rollout import ABORTED, BlockedSurge, CanaryPlan, Missing, patience
from argosy_operator.names import SERVED_ANNOTATION, annotations_of
from argosy_operator.observation import Figures
from argosy_operator.pod import ModelFetch, Pod, Problem, seconds_between
from argosy_operator.status.problems import (
    Counts,
    ServiceView,
    container_problem,
    failed_create,
    failed_pod,
    listed,
    lost_node,
    missing_claim,
    problem_message,
    router_problem,
    scaling_problem,
    unmounted,
    unready_too_long,
    unschedulable,
    unschedulable_too_long,
    without_workers,
)
from argosy_protocol.reports import WAITING, percent
from argosy_resource.engine_command import claim_name, model_path
from argosy_resource.rollout import CanaryAction, CanaryRollout, RolloutPhase, RolloutStatus, SideFigures
from argosy_resource.types import ConditionStatus, ConditionType, InferenceService

_UNTIL_SOMEBODY_ACTS: Final = (
    *("RolloutHalted", "ProgressDeadlineExceeded", "CanaryFailed", "WaitingForCapacity", "ChildContested"),
)
"""Reasons of Progressing, if it is false, for which nothing more happens by itself."""
_UNTRIED: Final = "no replica has served with the last change, and the next request shows whether it works"
NO_ROUTER: Final = "no router answers; routers run in the operator's namespace"
_MISSING: Final[Mapping[Missing, str]] = {
    "gpu": "no GPU is free for an additional replica",
    "room": "no node has room for an additional replica",
    "quota": "the namespace's quota has no room for an additional replica",
}
_FREED: Final[Mapping[Missing, str]] = {
    "gpu": "free a GPU",
    "room": "make room, or add a node",
    "quota": "raise the quota",
}
_MAX_COLUMN: Final = 48
"""Characters of a fetch's progress in the column; more than any has."""
_RETRYING: Final = "retrying"
"""What the column says of a note, which the condition has: a column stays narrow."""
_NOT_THERE: Final = ("is no directory", "has no config.json")
"""The engine's words for a path without a model (`checkpoint.model_folder`)."""
_LOCK_REMEDY: Final = (
    "; look at the pods that use the volume: whoever can write to it can choose that name; another pod continues the "
    "fetch of one that ends; if none of them fetches, the file system keeps the lock: restart what serves the volume, "
    "or set spec.model.cache to another one"
)
UPDATE_SECONDS: Final = 30
_UPDATED: Final = ("message", "canary", "stable", "time")
_DIGITS: Final = 4


class ConditionState(Struct, frozen=True):
    """A condition without its times."""

    status: ConditionStatus
    reason: str
    message: str = ""


def _because(status: ConditionStatus, cause: Problem | ConditionState) -> ConditionState:
    return ConditionState(status, cause.reason, cause.message)


def condition_states(view: ServiceView) -> dict[ConditionType, ConditionState]:
    """Every condition of the service, in the order in which they are shown."""
    return {
        "Ready": ready(view),
        "Progressing": progressing(view),
        "WorkloadReady": workload_ready(view),
        "ModelCached": model_cached(view),
        "Routable": routable(view),
        "Degraded": degraded(view),
        "Reconciling": reconciling(view),
        "Stalled": stalled(view),
    }


def ready(view: ServiceView) -> ConditionState:
    counts = view.counts
    if view.failure is not None:
        return _because("False", view.failure)
    if view.is_main_name_lost:
        return ConditionState("False", view.lost_names[0].reason, _lost_names_message(view))
    if view.service.spec.paused and not view.is_current:
        return ConditionState(
            "False", "Paused", "spec.paused holds this generation back; unset it to apply it"
        )
    if view.plan.rollout.phase in ("canary", "canary-failed", "halted", "waiting-for-capacity"):
        return _because("False", progressing(view))
    if not view.is_complete and not view.is_scaling:
        cause = workload_ready(view)
        if cause.reason not in ("Starting", "Reconciling"):
            return _because("False", cause)
        if progressing(view).reason == "ChildContested":
            return ConditionState("False", "ChildContested", _contested_message(view))
        is_unchanged = view.is_current and counts.updated == counts.alive < counts.desired
        return ConditionState("False", "WaitingForReplicas" if is_unchanged else "RollingOut", cause.message)
    if counts.desired == 0:
        if _cannot_wake(view):
            return ConditionState("False", "Paused", _zero_message(view))
        if _is_untried(view):
            return ConditionState("Unknown", "Untried", f"{_UNTRIED}; {_zero_message(view)}")
        return ConditionState("True", _zero_reason(view), _zero_message(view))
    if counts.old_routable:
        return ConditionState("False", "RollingOut", f"{counts.old_routable} old replicas still serve")
    if counts.ready < view.wanted_routable:
        return _because("False", workload_ready(view))
    if view.may_get_requests:
        return routable(view)
    if view.has_no_router or view.gets_no_requests or counts.routable < view.wanted_routable:
        return _because("False", routable(view))
    return ConditionState("True", "ReplicasRoutable", f"{counts.routable}/{counts.desired} replicas routable")


def progressing(view: ServiceView) -> ConditionState:
    counts = view.counts
    if view.service.spec.paused:
        return ConditionState("False", "Paused", "reconciling is paused; running replicas keep serving")
    if view.failure is not None:
        return _because("False", view.failure)
    so_far = f"{counts.updated}/{counts.desired} replicas updated, {counts.ready} ready, {counts.routable} routable"
    phase = view.plan.rollout.phase
    if phase == "halted":
        return ConditionState(
            "False", "RolloutHalted", f"{_halt_message(view)}: {so_far}{_stray_of_halted(view)}"
        )
    if phase == "waiting-for-turn":
        share, other = view.config.max_concurrent_rollouts, view.plan.rollout.waits_for
        message = f"new defaults of the operator are rolled out to {share} of the services at once"
        if other:
            message = f"{message}; waiting for {other} to become healthy"
        else:
            message = f"{message}, and to healthy ones only: {view.plan.rollout.unhealthy}"
        return ConditionState("False", "WaitingForTurn", message)
    if phase in ("canary", "canary-failed"):
        return _canary(view)
    deadline = view.deployment_condition("Progressing")
    # A fetch that goes on is no excuse if it ends with an eviction, and begins anew in the next pod.
    is_excused = _has_fetch_progress(view) and failed_pod(view) is None
    if deadline.get("reason") == "ProgressDeadlineExceeded" and not is_excused:
        seconds = view.service.spec.rollout.progress_deadline_seconds
        return ConditionState("False", "ProgressDeadlineExceeded", f"no progress for {seconds} s: {so_far}")
    blocked = view.plan.rollout.blocked
    if blocked is not None and phase == "waiting-for-capacity":
        # Nothing but a person, or the end of other pods, makes room in a quota.
        is_waiting: ConditionStatus = "False" if blocked.missing == "quota" else "True"
        return ConditionState(
            is_waiting, "WaitingForCapacity", f"{_capacity_message(view, blocked)}: {so_far}"
        )
    if blocked is not None and phase in ("in-place", "waiting-for-node"):
        reason = "NoGPUForSurge" if blocked.missing == "gpu" else "NoRoomForSurge"
        what = "replacing one at a time without surge"
        if phase == "waiting-for-node":
            seconds = patience(view.service, blocked)
            what = f"replicas are replaced in place if that does not change within {seconds} s"
        return ConditionState("True", reason, f"{_missing_message(blocked)}; {what}: {so_far}")
    refused = failed_create(view)
    if refused is not None and view.is_current:
        return ConditionState("False", refused.reason, f"{refused.message}: {so_far}")
    if view.is_kept_from_plan:
        return ConditionState("False", "ChildContested", f"{_contested_message(view)}: {so_far}")
    if not view.is_current:
        return ConditionState("True", "Reconciling", so_far)
    under_way = fetching(view)
    if under_way:
        return ConditionState("True", "FetchingModel", f"fetching the model: {under_way}; {so_far}")
    if view.plan.rollout.canary is not None:
        return _promotion(view)
    if counts.updated < counts.alive:
        return ConditionState("True", "RollingOut", so_far)
    if counts.alive != counts.desired:
        return ConditionState("True", "Scaling", so_far)
    if counts.routable < counts.desired:
        if (late := unready_too_long(view)) and not is_excused:
            return ConditionState("False", "ProgressDeadlineExceeded", f"{late}: {so_far}")
        return ConditionState("True", "WaitingForReplicas", so_far)
    return ConditionState("False", "Complete", so_far)


def _promotion(view: ServiceView) -> ConditionState:
    """How far the rollout of a canary's revision is, in the service's own replicas: the canary's go when it is done."""
    canary = view.plan.rollout.canary
    assert canary is not None
    own = Counts.of(
        view.observed.without_canary.pods, desired=view.counts.desired, revision=view.plan.revision
    )
    why = canary.state.message or "the canary has passed its steps"
    message = (
        f"{why}: {own.updated}/{own.desired} replicas updated, {own.ready} ready, {own.routable} routable"
    )
    if canary.waits_for:
        message = f"{message}; {canary.waits_for}"
    return ConditionState("True", "CanaryPromoting", message)


def _canary(view: ServiceView) -> ConditionState:
    """How far the canary is. Figures are in the status, since conditions change with the phase only."""
    plan, canary = view.plan.rollout.canary, view.service.spec.rollout.canary
    assert plan is not None
    assert canary is not None
    state, phase = plan.state, _rollout_phase(plan)
    stray = _stray_action(canary.action, state.revision)
    if phase == "Failed":
        ended = "was taken back" if state.message == ABORTED else "failed as a canary"
        message = (
            f"revision {state.revision} {ended}: {state.message}; the old replicas serve every request "
            f"until the spec changes, or spec.rollout.canary.action promotes the revision{stray}"
        )
        return ConditionState("False", "CanaryFailed", message)
    message = (
        f"step {state.step + 1} of {len(canary.steps)}: revision {state.revision} answers {state.weight} %"
    )
    if phase == "Held":
        message = f"{message}; {plan.waits_for}"
    return ConditionState("True", f"Canary{phase}", message + stray)


def _stray_of_halted(view: ServiceView) -> str:
    plan, canary = view.plan.rollout.canary, view.service.spec.rollout.canary
    return "" if plan is None or canary is None else _stray_action(canary.action, plan.state.revision)


def _stray_action(action: CanaryAction | None, revision: str) -> str:
    """What is told of an action that names another revision than the canary's; empty if there is none."""
    if action is None or action.revision == revision:
        return ""
    return (
        f"; spec.rollout.canary.action has no effect: {action.type} is for revision {action.revision}, and this one is "
        f"{revision}"
    )


def workload_ready(view: ServiceView) -> ConditionState:
    counts = view.counts
    if view.is_complete and counts.ready == counts.desired:
        return ConditionState("True", "ReplicasReady", f"{counts.ready}/{counts.desired} replicas ready")
    so_far = f"{counts.ready}/{counts.desired} updated replicas ready"
    cause = _problem(view) or unschedulable(view)
    if cause is not None:
        return ConditionState("False", cause.reason, f"{so_far}; {cause.message}")
    if not view.is_current:
        return ConditionState("False", "Reconciling", so_far)
    under_way = fetching(view)
    if under_way:
        return ConditionState("False", "FetchingModel", f"{so_far}; fetching the model: {under_way}")
    if not_mounted := unmounted(view):
        return ConditionState("False", "VolumesNotMounted", f"{so_far}; {not_mounted}")
    if lacking := without_workers(view):
        return ConditionState("False", "Starting", f"{so_far}; {lacking}")
    waiting = [pod.name for pod in view.judged_pods if not pod.is_up]
    return ConditionState(
        "False", "Starting", f"{so_far}; waiting for {listed(sorted(waiting))}" if waiting else so_far
    )


def routable(view: ServiceView) -> ConditionState:
    counts = view.counts
    so_far = f"{counts.routable}/{counts.desired} replicas routable"
    if counts.desired == 0:
        return ConditionState("False", _zero_reason(view), _zero_message(view))
    if view.has_no_router:
        return ConditionState("Unknown", "NoRouter", NO_ROUTER)
    if view.may_get_requests:
        return ConditionState("Unknown", "RouterUnreachable", _unheard_message(view))
    if view.gets_no_requests:
        return ConditionState("False", "WaitingForRouter", _unsent_message(view))
    if counts.routable >= view.wanted_routable:
        return ConditionState("True", "ReplicasRoutable", so_far)
    lost = lost_node(view)
    if lost is not None:
        return ConditionState("False", lost.reason, f"{so_far}; {lost.message}")
    unrouted = [pod.name for pod in view.observed.pods if pod.is_up and not pod.is_routable]
    if unrouted:
        return ConditionState(
            "False", "WaitingForRouter", f"{so_far}; no router is synced with {listed(sorted(unrouted))}"
        )
    return ConditionState("False", "WaitingForReplicas", so_far)


def _unsent_message(view: ServiceView) -> str:
    return (
        f"routers know {_routable_pods(view)} and have sent requests to none for a minute: they cannot connect, or "
        "requests fail; look at the routers' logs"
    )


def _unheard_message(view: ServiceView) -> str:
    silent = listed(view.observed.routers.unreachable)
    return (
        f"routers that answer have sent requests to none of {_routable_pods(view)} for a minute; router {silent} runs "
        "and has not answered the operator for a minute, so it may: look whether a NetworkPolicy keeps the operator "
        "from port 8081 of its pod, and at the routers' logs"
    )


def degraded(view: ServiceView) -> ConditionState:
    if view.failure is not None:
        return _because("True", view.failure)
    if view.lost_names:
        return ConditionState("True", view.lost_names[0].reason, _lost_names_message(view))
    progress = progressing(view)
    if progress.reason in ("ProgressDeadlineExceeded", "CanaryFailed", "ChildContested"):
        return _because("True", progress)
    cause = (
        _problem(view)
        or unschedulable_too_long(view)
        or scaling_problem(view.service, view.observed.scalers, view.now)
    )
    is_trying = view.plan.rollout.canary is not None
    if cause is None and (view.service.spec.scaling or is_trying):
        cause = router_problem(view.observed.routers)
    if cause is not None:
        return _because("True", cause)
    canary = view.service.spec.router.canary
    if canary is not None and view.observed.lacks_canary:
        missing = f"there is no InferenceService {canary.service!r} in this namespace"
        return ConditionState("True", "CanaryNotFound", f"{missing}; no request goes to it")
    return ConditionState("False", "AsExpected")


def reconciling(view: ServiceView) -> ConditionState:
    progress = progressing(view)
    if progress.status == "True" and stalled(view).status == "False":
        return _because("True", progress)
    return ConditionState("False", progress.reason)


def stalled(view: ServiceView) -> ConditionState:
    if view.failure is not None:
        return _because("True", view.failure)
    if view.is_main_name_lost:
        return ConditionState("True", view.lost_names[0].reason, _lost_names_message(view))
    progress = progressing(view)
    is_refused = progress.status == "False" and progress.reason in _UNTIL_SOMEBODY_ACTS
    if is_refused or (progress.status == "False" and failed_create(view) is not None):
        return _because("True", progress)
    if (locked := _locked(view)) is not None:
        return _because("True", locked)
    return ConditionState("False", "AsExpected")


def _problem(view: ServiceView) -> Problem | None:
    causes = (failed_create, container_problem, failed_pod, lost_node, _locked)
    return next((found for cause in causes if (found := cause(view)) is not None), None)


def _locked(view: ServiceView) -> Problem | None:
    message = _store_locked(view)
    return Problem("ModelStoreLocked", message) if message else None


def _halt_message(view: ServiceView) -> str:
    pod = view.plan.rollout.halted_by
    assert pod is not None
    assert pod.problem is not None
    return (
        f"pod {pod.name} does not come up ({problem_message(view, pod.problem)}); no further replica is replaced "
        "until it is ready or the spec changes"
    )


def _cannot_wake(view: ServiceView) -> bool:
    """Whether clients count on a replica that the next request starts, and none is started while paused."""
    is_woken = view.service.spec.scaling is not None and not view.observed.scalers.decide
    return view.service.spec.paused and is_woken


def _is_untried(view: ServiceView) -> bool:
    """Whether the next request starts a replica of a revision of which none has served yet."""
    deployment = view.observed.deployment
    if deployment is None or view.service.spec.scaling is None:
        return False
    return annotations_of(deployment).get(SERVED_ANNOTATION) != view.plan.revision


def _zero_reason(view: ServiceView) -> str:
    """Whether the spec has stopped the service, or spec.scaling has: that starts a replica for the next request."""
    return "Stopped" if view.service.spec.scaling is None else "ScaledToZero"


def _zero_message(view: ServiceView) -> str:
    if view.service.spec.scaling is None:
        held = view.service.spec.router.limits.hold_timeout_seconds
        outcome = f"held for {held} s, then refused" if held else "refused"
        return (
            f"spec.replicas is 0: requests are {outcome} with 503 until it is raised, which no request does without "
            f"spec.scaling or an autoscaler: kubectl scale isvc {view.service.metadata.name} --replicas=1"
        )
    if view.observed.scalers.decide:
        return "spec.replicas is 0"
    if _cannot_wake(view):
        return "reconciling is paused at zero replicas, and no request starts one; unpause to serve"
    return "no request for some time; the next one is held until a replica has started"


def _missing_message(blocked: BlockedSurge) -> str:
    message = _MISSING[blocked.missing]
    return f"{message} ({blocked.words})" if blocked.words and blocked.missing != "gpu" else message


def _capacity_message(view: ServiceView, blocked: BlockedSurge) -> str:
    if view.service.spec.rollout.max_unavailable == 0:
        why, remedy = "maxUnavailable is 0", "raise maxUnavailable"
    else:
        why, remedy = "it is the only one", "set rollout.maxUnavailable to 1"
    state = "serving" if view.counts.old_routable else "starting"
    return (
        f"{_missing_message(blocked)}, and no {state} replica is stopped for one because {why}; "
        f"{_FREED[blocked.missing]}, or {remedy}"
    )


def _contested_message(view: ServiceView) -> str:
    return (
        f"another writer (a webhook or a controller) changes {' and '.join(view.contested)} as soon as the operator "
        "has applied it, and it is left as it is until that, or the spec, changes: exempt it from that writer"
    )


def _lost_names_message(view: ServiceView) -> str:
    lost = "; ".join(f"{each.name!r} {each.why}" for each in view.lost_names)
    return f"{lost}; clients reach this service as {view.service.key!r}"


def _routable_pods(view: ServiceView) -> str:
    return listed(sorted(pod.name for pod in view.observed.pods if pod.is_routable))


def model_cached(view: ServiceView) -> ConditionState:
    if not view.fetches_model:
        return _local_source(view)
    fetches = _fetches(view)
    for name, fetch in fetches:
        if fetch.has_failed:
            return ConditionState("False", "FetchFailed", f"pod {name}: {fetch.failure}")
    locked = _store_locked(view)
    if locked:
        return ConditionState("False", "StoreLocked", locked)
    under_way = fetching(view)
    if under_way:
        return ConditionState("False", "Fetching", under_way)
    for _, fetch in fetches:
        if fetch.state == "succeeded":
            return ConditionState("True", "Cached", fetch.exit_message)
    return ConditionState("Unknown", "Pending", "no pod has begun to fetch the model")


def _local_source(view: ServiceView) -> ConditionState:
    """The condition where nothing is fetched: False as soon as a replica has shown that the model is not there."""
    source = view.service.spec.model.source
    claim = claim_name(source)
    planned = [pod for pod in view.judged_pods if pod.revision == view.plan.revision]
    for pod in planned or view.judged_pods:
        if claim is not None and missing_claim(claim) in pod.unschedulable:
            return ConditionState("False", "ClaimNotFound", f"pod {pod.name}: {pod.unschedulable}")
        if pod.problem is not None and _is_source_missing(pod.problem.message, model_path(source)):
            told = problem_message(view, pod.problem)
            return ConditionState("False", "SourceNotFound", f"pod {pod.name}: {told}")
    return ConditionState(
        "True",
        "LocalSource",
        "nothing has to be fetched: the model is part of the engine"
        if source.startswith("builtin://")
        else "nothing has to be fetched: replicas read the model from a volume, or from their image",
    )


def _is_source_missing(message: str, path: str) -> bool:
    """Whether our engine's last line says that its model is not at this path; other engines have other words."""
    return any(f": {path.rstrip('/')} {what}" in message for what in _NOT_THERE)


def model_cache_column(view: ServiceView) -> str:
    """The condition in a few words: `cached`, `failed`, or how far the fetch is; empty if there is none."""
    reason = model_cached(view).reason
    if reason == "Fetching":
        text, has_note, _ = _slowest(view)[1].partition("; ")
        return f"{text[:_MAX_COLUMN]}; {_RETRYING}" if has_note else text[:_MAX_COLUMN]
    return {"Cached": "cached", "FetchFailed": "failed", "StoreLocked": "locked"}.get(reason, "")


def _store_locked(view: ServiceView) -> str:
    """The pod that waits for a store's lock whose holder makes no progress, who that is, and the remedy; empty if no
    pod does."""
    for name, fetch in _fetches(view):
        if fetch.is_blocked:
            return f"pod {name}: {fetch.summary}{_LOCK_REMEDY}"
    return ""


def fetching(view: ServiceView) -> str:
    """The pod that is furthest from the end of its fetch, and how far it is; empty if no fetch is under way."""
    name, text = _slowest(view)
    return f"pod {name}: {text}" if name else ""


def _has_fetch_progress(view: ServiceView) -> bool:
    """Whether a replica that is not up yet fetches, or has fetched, its model, and that has moved on lately; or was not
    asked yet by this operator, which may have been down for longer than a fetch may stand still."""
    deadline = view.service.spec.rollout.progress_deadline_seconds
    return any(
        seconds_until_stuck(pod, view.now, deadline) > 0 or pod.uid in view.observed.unpolled_fetches
        for pod in view.observed.pods
        if pod.is_alive and not pod.is_up
    )


def seconds_until_stuck(pod: Pod, now: str, deadline: int) -> float:
    """Seconds until the fetch of a pod has gone without progress for `deadline` seconds; 0 or less if it has, or if
    there is none. A fetch that waits for another pod's has none as soon as that one is known to make none."""
    fetch = pod.fetch
    if fetch is None or fetch.has_failed or fetch.is_blocked:
        return 0.0
    if fetch.is_under_way and fetch.summary == WAITING:
        return float(deadline)
    try:
        since = datetime.fromisoformat(now) - datetime.fromisoformat(fetch.last_probe_time)
    except (ValueError, TypeError):  # it has not reported
        return 0.0
    return deadline - since.total_seconds()


def _slowest(view: ServiceView) -> tuple[str, str]:
    """Name and progress of the fetching pod with the smallest share; one without a share only if none has one."""
    texts = [(name, fetch.summary or "fetching") for name, fetch in _fetches(view) if fetch.is_under_way]
    shares = [(share, name, text) for name, text in texts if (share := percent(text)) is not None]
    if shares:
        _, name, text = min(shares)
        return name, text
    return min(texts, default=("", ""))


def _fetches(view: ServiceView) -> list[tuple[str, ModelFetch]]:
    """Fetches of living pods by name: of the wanted revision, or of others while it has none."""
    alive = [pod for pod in view.observed.pods if pod.is_alive and pod.fetch is not None]
    wanted = [pod for pod in alive if pod.revision == view.plan.revision]
    pods = sorted(wanted or alive, key=lambda pod: pod.name)
    return [(pod.name, pod.fetch) for pod in pods if pod.fetch is not None]


def rollout_status(service: InferenceService, plan: CanaryPlan | None, now: str) -> RolloutStatus | None:
    """The status at `now` (RFC 3339); None without a canary rollout."""
    canary, before = service.spec.rollout.canary, service.status.rollout
    if plan is None or canary is None:
        return None
    state = plan.state
    phase = _rollout_phase(plan)
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


def _rollout_phase(plan: CanaryPlan) -> RolloutPhase:
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
