"""The status of a service, and which of its changes become Kubernetes Events: pure functions.

Owns the counts and the times of conditions; `conditions` says what these mean. Must not talk to an API server or look
at a clock, nor know how events are posted. Invariants: equal inputs give an equal status, and a condition's transition
time changes only when its status does, so that an unchanged service causes no write; a change of a message alone is no
event, since messages count replicas; a service that becomes ready, stops being ready, or recovers has one, and so has a
replica that finds no node or whose volumes are not mounted, each number that spec.scaling decides, and each step of a
canary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from argosy_operator.config import OperatorConfig
from argosy_operator.desired.children import Plan
from argosy_operator.desired.upgrades import default_images
from argosy_operator.observation import Observation
from argosy_operator.pod import Problem
from argosy_operator.status.conditions import (
    ConditionState,
    condition_states,
    model_cache_column,
    rollout_status,
)
from argosy_operator.status.problems import Counts, ServiceView
from argosy_resource.engine_command import selector
from argosy_resource.scaling import ScalingStatus
from argosy_resource.types import Condition, ConditionType, InferenceService, InferenceServiceStatus

_MAX_REASON: Final = 1024
_MAX_MESSAGE: Final = 32768
_NO_WORD: Final = re.compile("[^A-Za-z0-9_,:]")

EventType = Literal["Normal", "Warning"]
_PROGRESS: Final[Mapping[str, EventType]] = {
    "RolloutHalted": "Warning",
    "WaitingForCapacity": "Warning",
    "NoGPUForSurge": "Normal",
    "NoRoomForSurge": "Normal",
    "CanaryStarting": "Normal",
    "CanaryAnalyzing": "Normal",
    "CanaryHeld": "Normal",
    "CanaryPromoting": "Normal",
    "WaitingForTurn": "Normal",
    "Paused": "Normal",
}
"""Reasons of Progressing that become an event, and its type."""
_PLANNED: Final = frozenset(
    {"RollingOut", "Untried", "Paused", "WaitingForTurn"}
    | {"CanaryStarting", "CanaryAnalyzing", "CanaryHeld", "CanaryPromoting"}
)
"""Reasons for which a service that was ready is not any more because somebody has changed it."""
_WORKLOAD: Final[Mapping[str, EventType]] = {
    "Unschedulable": "Normal",
    "SchedulingGated": "Normal",
    "VolumesNotMounted": "Warning",
}
"""Reasons of WorkloadReady that become an event, and its type. An autoscaler takes minutes to add a node; if none
comes, Degraded has a Warning."""
_WAITS_FOR_GPU: Final = frozenset({"WaitingForCapacity", "NoGPUForSurge", "NoRoomForSurge"})
"""Reasons of Progressing that have an event themselves, and say that a replica finds no node."""
_RECOVERED: Final = "Recovered"
_FETCH: Final[Mapping[str, tuple[EventType, str]]] = {
    "Fetching": ("Normal", "ModelFetching"),
    "Cached": ("Normal", "ModelCached"),
    "FetchFailed": ("Warning", "ModelFetchFailed"),
    "StoreLocked": ("Warning", "ModelStoreLocked"),
}
"""Reasons of ModelCached that become an event, with its type and reason."""
_TOLD_BY_FETCH: Final = frozenset(reason for _, reason in _FETCH.values())
"""Reasons of Degraded whose end has an event of its own: the fetch goes on, or is done."""
_CRASHES: Final = frozenset({"CrashLoopBackOff", "ContainerExited"})
"""Reasons of Degraded between which an engine that exits again and again alternates with each attempt."""


def status(
    service: InferenceService,
    observed: Observation,
    plan: Plan,
    *,
    config: OperatorConfig,
    now: str,
    failure: Problem | None = None,
    scaling: ScalingStatus | None = None,
    contested: tuple[str, ...] = (),
) -> InferenceServiceStatus:
    """The status to report. `failure` says why the plan was not, or not wholly, carried out; `now` is RFC 3339;
    `scaling` is what spec.scaling has decided; `contested` are the children that are left as others change them."""
    counts = Counts.of(observed.pods, desired=service.spec.replicas, revision=plan.revision)
    view = ServiceView(
        service=service,
        observed=observed,
        plan=plan,
        config=config,
        counts=counts,
        failure=failure,
        now=now,
        contested=contested,
    )
    labels = selector(service)
    routable = 0 if view.gets_no_requests else counts.routable
    return InferenceServiceStatus(
        observed_generation=service.metadata.generation,
        url=f"{config.router_url}/v1" if config.router_url else "",
        model=service.key if view.is_main_name_lost else service.served_name,
        selector=",".join(f"{key}={value}" for key, value in sorted(labels.items())),
        revision=plan.revision,
        replicas=counts.alive,
        updated_replicas=counts.updated,
        ready_replicas=sum(pod.is_up for pod in observed.pods),
        routable_replicas=routable,
        draining_replicas=counts.draining,
        routable=f"{routable}/{counts.desired}",
        image=service.spec.engine.image or plan.images.engine,
        available_image=_available_image(service, plan, config),
        model_cache=model_cache_column(view),
        gpus=service.spec.gpus,
        scaling=scaling,
        rollout=(
            service.status.rollout  # the Deployment remembers no further step
            if service.spec.paused or failure is not None
            else rollout_status(service, plan.rollout.canary, now)
        ),
        conditions=conditions(
            condition_states(view), service.status.conditions, generation=service.metadata.generation, now=now
        ),
    )


def _available_image(service: InferenceService, plan: Plan, config: OperatorConfig) -> str:
    default = default_images(service, config).engine
    return "" if service.spec.engine.image or plan.images.engine == default else default


def conditions(
    states: Mapping[ConditionType, ConditionState],
    previous: Iterable[Condition],
    *,
    generation: int,
    now: str,
) -> tuple[Condition, ...]:
    """Add times to conditions: a transition time is kept while the status stays the same. Reasons and messages may be
    those of kubelets and runtimes, so they are brought into the form that the API server takes."""
    before = {condition.type: condition for condition in previous}
    result = []
    for kind, state in states.items():
        old = before.get(kind)
        since = old.last_transition_time if old is not None and old.status == state.status else now
        result.append(
            Condition(
                type=kind,
                status=state.status,
                reason=_as_reason(state.reason),
                message=state.message[:_MAX_MESSAGE],
                last_transition_time=since,
                observed_generation=generation,
            )
        )
    return tuple(result)


def _as_reason(text: str) -> str:
    """The text as a condition's reason: a kubelet that has too few GPUs fails a pod as `OutOfnvidia.com/gpu`."""
    word = _NO_WORD.sub("_", text)[:_MAX_REASON].rstrip(",:")
    return word if word[:1].isalpha() else f"Reason_{word}".rstrip("_")


def invalid_status(obj: Mapping[str, Any], message: str, *, now: str) -> dict[str, Any]:
    """Status of a resource that this operator cannot read, because the CRD is newer, or older, than the operator."""
    previous = msgspec.convert(obj.get("status", {}).get("conditions", ()), tuple[Condition, ...])
    states: dict[ConditionType, ConditionState] = {
        "Ready": ConditionState("False", "InvalidSpec", message),
        "Degraded": ConditionState("True", "InvalidSpec", message),
        "Reconciling": ConditionState("False", "InvalidSpec"),
        "Stalled": ConditionState("True", "InvalidSpec", message),
    }
    generation = obj["metadata"].get("generation", 0)
    merged = conditions(states, previous, generation=generation, now=now)
    return {"observedGeneration": generation, "conditions": msgspec.to_builtins(list(merged))}


class Event(Struct, frozen=True):
    """An Event before it is posted."""

    type: EventType
    reason: str
    message: str


def events_of_change(before: InferenceServiceStatus, after: InferenceServiceStatus) -> list[Event]:
    """Events for what changed between two statuses of a service."""
    found = events_between(before.conditions, after.conditions)
    scaled, scaling = before.scaling, after.scaling
    if scaled is not None and scaling is not None and scaled.time and scaled.wanted != scaling.wanted:
        message = f"from {scaled.wanted} to {scaling.wanted} replicas: {scaling.message or scaling.reason}"
        found.append(Event("Normal", "Scaled", message))
    was, rollout = before.rollout, after.rollout
    if (
        was is not None
        and rollout is not None
        and was.revision == rollout.revision
        and was.step != rollout.step
    ):
        message = f"revision {rollout.revision}: step {rollout.step} of {rollout.steps}"
        found.append(Event("Normal", "CanaryStep", message))
    return found


def events_between(before: Iterable[Condition], after: Iterable[Condition]) -> list[Event]:
    """Events for the conditions whose status or reason changed between two statuses."""
    old, after = {each.type: each for each in before}, tuple(after)
    is_surging = any(each.type == "Progressing" and each.reason in _WAITS_FOR_GPU for each in after)
    found: dict[str, Event] = {}
    for each in after:
        previous = old.get(each.type)
        was = (previous.status, previous.reason) if previous is not None else ("Unknown", "")
        if was == (each.status, each.reason):
            continue
        kind: EventType | None = None
        reason = each.reason
        if each.type == "Degraded" and each.status == "True":
            kind = None if was[0] == "True" and {was[1], each.reason} <= _CRASHES else "Warning"
        elif each.type == "Degraded" and was[0] == "True" and was[1] not in _TOLD_BY_FETCH:
            kind, reason = "Normal", _RECOVERED
        elif each.type == "Ready" and each.status == "True":
            kind = "Normal"
        elif each.type == "Ready" and was[0] == "True":
            kind = "Normal" if each.reason in _PLANNED else "Warning"
        elif each.type == "Progressing" and each.reason in _PROGRESS:
            kind = _PROGRESS[each.reason]
        elif each.type == "WorkloadReady" and each.reason in _WORKLOAD and not is_surging:
            kind = _WORKLOAD[each.reason]
        elif each.type == "ModelCached" and each.reason in _FETCH:
            kind, reason = _FETCH[each.reason]
        if kind is not None:
            message = each.message or f"{was[1]} is over"
            # One event for two conditions with the same reason.
            if reason not in found or (kind == "Warning" and found[reason].type == "Normal"):
                found[reason] = Event(kind, reason, message)
    return list(found.values())
