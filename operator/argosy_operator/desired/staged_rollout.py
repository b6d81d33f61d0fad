"""Staged rollout of the operator's own changes (a new default image, say): decides whether a service has to wait.

Few services at a time roll out such a change. Owns the decisions whether a service has to wait for its turn, whether it
has come through it, and what became of a turn that takes too long. Must not know which services have one:
`reconcile.rollout_lock` does.
"""

from __future__ import annotations

import msgspec

from argosy_operator.names import INPUT_ANNOTATION, KEY_ANNOTATION, SERVED_ANNOTATION
from argosy_operator.observed.deployment import (
    Turn,
    TurnState,
    deployment_condition,
    has_the_turn,
    read_turn,
    serving_revision,
    template_revision,
)
from argosy_operator.observed.elapsed import min_time, seconds_between
from argosy_operator.observed.observation import Observation
from argosy_resource.types import InferenceService


def held_revision(
    service: InferenceService, observed: Observation, revision: str, *, digest: str, key_digest: str
) -> str:
    """The revision that keeps serving if this service may have to wait for its turn; empty if it need not wait.

    It waits only if the change is the operator's own, the last rollout is complete, and a replica is routable, or may
    be again: its revision has served, and not every replica keeps failing. Otherwise there is nothing to protect.
    Engines that read their key when they start do not wait once the last key that they have is no longer valid, because
    a router that starts now cannot reach them.
    """
    live = observed.deployment
    if live is None or has_the_turn(live) or service.spec.replicas == 0:
        return ""
    serving = serving_revision(live)
    annotations = live["metadata"].get("annotations", {})
    template = live["spec"]["template"]["metadata"].get("annotations", {})
    is_own = annotations.get(INPUT_ANNOTATION, digest) == digest and (
        not key_digest or template.get(KEY_ANNOTATION) == key_digest
    )
    alive = [pod for pod in observed.pods if pod.is_alive]
    is_complete = all(pod.revision == serving for pod in alive)
    has_served = annotations.get(SERVED_ANNOTATION) == serving
    may_recover = has_served and not (alive and all(pod.is_backing_off for pod in alive))
    is_serving = may_recover or any(pod.is_routable for pod in alive)
    return serving if serving != revision and is_own and is_complete and is_serving else ""


def unhealthy_replicas(observed: Observation) -> str:
    """Why the operator's own change leaves the service alone for now; empty if its replicas are all routable. Those
    that no node can take are ignored beside others, as in `is_healthy`."""
    alive = [pod for pod in observed.pods if pod.is_alive]
    if not any(pod.is_routable for pod in alive):
        return f"none of {len(alive)} replicas is routable"
    failing = [pod for pod in alive if not (pod.is_routable or pod.unschedulable or pod.gate_words)]
    return f"{len(failing)} of {len(alive)} replicas are not routable" if failing else ""


def turn_of(
    service: InferenceService, observed: Observation, revision: str, *, has_failed: bool, lacks_room: bool
) -> tuple[Turn, float]:
    """The turn of a service that has it, and the seconds until it may have taken too long; 0 if that time is over. It
    has taken too long if nothing moves any more: a new replica has failed or found no room, Kubernetes sees no
    progress, or all replicas are new and some are not healthy."""
    before = read_turn(observed.deployment)
    now, deadline = observed.time, service.spec.rollout.progress_deadline_seconds
    since = min_time(
        (before.since if before is not None else "") or now, now
    )  # another clock may have been ahead
    left = deadline - seconds_between(since, now)
    if left > 0:
        return Turn(since), left
    is_late = (
        deployment_condition(observed.deployment, "Progressing").get("reason") == "ProgressDeadlineExceeded"
    )
    is_new = all(pod.revision == revision for pod in observed.pods if pod.is_alive)
    state: TurnState = "blocked" if lacks_room else "failed" if has_failed or is_late or is_new else ""
    return Turn(since, state), 0.0


def has_ended_while_paused(service: InferenceService, observed: Observation) -> bool:
    """Whether a service that has the turn, and is paused since, has rolled out what its Deployment has."""
    live = observed.deployment
    if live is None:
        return False
    spec = msgspec.structs.replace(service.spec, replicas=live["spec"].get("replicas", 1))
    kept = msgspec.structs.replace(service, spec=spec)
    return is_healthy(kept, observed.without_canary, template_revision(live))


def is_healthy(service: InferenceService, observed: Observation, revision: str) -> bool:
    """Whether the next service may have its turn: every replica is new and routable. A replica that no node can take is
    ignored, because the change is not the cause."""
    live = observed.deployment
    alive = [pod for pod in observed.pods if pod.is_alive]
    return (
        live is not None
        and template_revision(live) == revision
        and live.get("status", {}).get("observedGeneration", 0) >= live["metadata"].get("generation", 0)
        and len(alive) == service.spec.replicas
        and all(
            pod.revision == revision and (pod.is_routable or pod.unschedulable or pod.gate_words)
            for pod in alive
        )
        and (service.spec.replicas == 0 or any(pod.is_routable for pod in alive))
    )
