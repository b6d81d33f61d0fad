"""The status of a service: a pure function of the resource, of the plan and of what is observed.

Owns the counts and the times of conditions; `conditions` says what these mean. Must not talk to an API server or look
at a clock. Invariant: equal inputs give an equal status, and a condition's transition time changes only when its
status does, so that an unchanged service causes no write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from argosy_operator.config import OperatorConfig
from argosy_operator.desired.children import Plan
from argosy_operator.desired.pinned_images import default_images
from argosy_operator.observed.observation import Observation
from argosy_operator.observed.pod import Problem
from argosy_operator.status.condition_state import ConditionState
from argosy_operator.status.conditions import condition_states
from argosy_operator.status.model_cached import model_cache_column
from argosy_operator.status.rollout_status import rollout_status
from argosy_operator.status.service_view import Counts, ServiceView
from argosy_resource.engine_address import selector
from argosy_resource.scaling_spec import ScalingStatus
from argosy_resource.types import (
    Condition,
    ConditionType,
    InferenceService,
    InferenceServiceStatus,
)

_MAX_REASON: Final = 1024
_MAX_MESSAGE: Final = 32768
_NO_WORD: Final = re.compile("[^A-Za-z0-9_,:]")


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
