"""How a change reaches a service's replicas: the Deployment's strategy, and whether its rollout is paused.

A pure function of the resource, of the revision that it asks for and of what is observed. Must not talk to an API
server, look at a clock or remember anything; what has to outlive a reconcile is an annotation of the Deployment.

Invariant: the operator takes the last routable replica only if `spec.rollout` says so (`maxUnavailable` of at least
`replicas`, or `maxSurge: 0`).

    no GPU for a surge     replicas are replaced in place, one at a time, if another one keeps serving; otherwise the
                           rollout waits
    a new replica fails    the Deployment is paused until that replica is ready or the spec changes
    the first new replica  is created alone, whatever maxSurge and maxUnavailable allow, to show that the change works
    the operator's change  (a new default image, say) is rolled out to one service at a time: the Deployments of the
                           others are paused with the new template, and their pods keep serving with the old one
                           until it is their turn
"""

from __future__ import annotations

import functools
from typing import Any, Final, Literal

import msgspec
import xxhash
from msgspec import Struct

from argosy_operator.names import (
    HELD_ANNOTATION,
    INPUT_ANNOTATION,
    KEY_ANNOTATION,
    REVISION_LABEL,
    TURN_ANNOTATION,
)
from argosy_operator.observed.observation import Object, Observation
from argosy_operator.observed.pod import Pod
from argosy_resource.rollout_policy import (
    RolloutReplica,
    halting_replica,
    may_replace_in_place,
    rollout_bounds,
)
from argosy_resource.types import InferenceService

MIN_READY_SECONDS: Final = 10
"""How long a new replica must be ready before the next one is replaced. A replica that crashes at its first requests
does so within this time; loading a model takes longer, so rollouts are hardly slowed."""

Phase = Literal["normal", "in-place", "waiting-for-capacity", "halted", "waiting-for-turn"]


class Rollout(Struct, frozen=True, kw_only=True):
    """The rollout settings of the Deployment, and the reason for them."""

    phase: Phase = "normal"
    surge: int = 1
    unavailable: int = 0
    is_paused: bool = False
    held_revision: str = ""
    """While the service waits for its turn: the revision that keeps serving."""
    waits_for: str = ""
    """While the service waits for its turn: the service (`namespace/name`) that has it."""
    halted_by: Pod | None = None
    """The new replica that does not come up, while that halts the rollout."""
    has_turn: bool = False
    """The operator's own change is being rolled out to this service; no other one starts meanwhile."""
    input_digest: str = ""
    """Hash of those parts of the spec that shape the pods. While it stays the same, a new revision comes from a change
    of the operator's."""

    @property
    def annotations(self) -> dict[str, str]:
        """Annotations of the Deployment."""
        found = {INPUT_ANNOTATION: self.input_digest}
        if self.held_revision:
            found[HELD_ANNOTATION] = self.held_revision
        if self.has_turn:
            found[TURN_ANNOTATION] = "true"
        return found


def plan_rollout(
    service: InferenceService, observed: Observation, revision: str, *, key_digest: str
) -> Rollout:
    """How pods of `revision` are to replace the others now."""
    live = observed.deployment
    digest = input_digest(service)
    held = _held_revision(service, observed, revision, digest=digest, key_digest=key_digest)
    if held and observed.rolling_elsewhere:
        return Rollout(
            phase="waiting-for-turn",
            surge=service.spec.rollout.surge,
            unavailable=service.spec.rollout.unavailable,
            is_paused=True,
            held_revision=held,
            waits_for=observed.rolling_elsewhere,
            input_digest=digest,
        )
    has_turn = bool(held) or (has_the_turn(live) and not _is_healthy(service, observed, revision))
    phase: Phase = "normal"
    if no_gpu_for_surge(service, observed, revision):
        phase = "in-place" if may_replace_in_place(service) else "waiting-for-capacity"
    replicas = _replicas(observed, revision)
    surge, unavailable = rollout_bounds(service.spec.rollout, replicas, is_in_place=phase == "in-place")
    halting = halting_replica(replicas)
    if halting is not None:
        phase = "halted"
        if live is not None and _template_revision(live) == revision:
            # Kubernetes scales a paused Deployment to its size plus maxSurge: a smaller surge would remove replicas.
            surge, unavailable = _live_strategy(live, surge, unavailable)
    return Rollout(
        phase=phase,
        surge=surge,
        unavailable=unavailable,
        is_paused=halting is not None,
        halted_by=next((pod for pod in observed.pods if halting and pod.name == halting.name), None),
        has_turn=has_turn,
        input_digest=digest,
    )


def serving_revision(deployment: Object) -> str:
    """The revision that a Deployment's pods should have now: its template's, unless that waits for its turn."""
    annotations = deployment["metadata"].get("annotations", {})
    return annotations.get(HELD_ANNOTATION) or _template_revision(deployment)


def has_the_turn(deployment: Object | None) -> bool:
    """Whether the operator's own change is being rolled out to this Deployment's service."""
    return deployment is not None and TURN_ANNOTATION in deployment["metadata"].get("annotations", {})


def waits_for_its_turn(deployment: Object) -> bool:
    """Whether the operator's own change waits to be rolled out to this Deployment's service."""
    return HELD_ANNOTATION in deployment["metadata"].get("annotations", {})


def _replicas(observed: Observation, revision: str) -> list[RolloutReplica]:
    """The living pods as the rollout policy sees them. A pod with a problem (no image, crash loop, out of memory) has
    failed."""
    return [
        RolloutReplica(
            pod.name,
            is_new=pod.revision == revision,
            is_serving=pod.is_routable,
            has_failed=pod.problem is not None,
        )
        for pod in observed.pods
        if pod.is_alive
    ]


def no_gpu_for_surge(service: InferenceService, observed: Observation, revision: str) -> bool:
    """Whether this rollout must free a GPU before it can take one.

    It must from when a pod of the new revision cannot be scheduled for lack of GPUs while pods of an old revision hold
    some, until no old pod is left. The live Deployment (this revision, no surge) keeps that state: the pending pod is
    scheduled as soon as the first old one is gone, and a decision on that pod alone would flap.
    """
    gpu, rollout = service.spec.resources.gpu, service.spec.rollout
    if gpu is None or rollout.surge == 0:
        return False
    holders = [pod for pod in observed.pods if pod.is_alive and pod.node and pod.revision != revision]
    if not holders:
        return False
    lacking = f"Insufficient {gpu.resource_name}"
    pending = sum(
        pod.is_alive and pod.revision == revision and lacking in pod.unschedulable for pod in observed.pods
    )
    leaving = sum(pod.is_terminating and bool(pod.node) for pod in observed.pods)
    return pending > leaving or _is_without_surge(observed, revision)


def input_digest(service: InferenceService) -> str:
    """Hash of those parts of the spec that shape the pods. Defaults are left out, so that a field which a later version
    adds does not change it."""
    spec = service.spec
    parts = (spec.engine, spec.resources, spec.placement, spec.pod_template)
    said = [spec.model.source, spec.rollout.drain_seconds, *map(_non_defaults, parts)]
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(said, order="deterministic"))[:10]


def _non_defaults(value: Any) -> Any:
    if isinstance(value, Struct):
        given = ((name, getattr(value, name), default) for name, default in _defaults(type(value)))
        return {name: _non_defaults(field) for name, field, default in given if field != default}
    if isinstance(value, tuple):
        return [_non_defaults(item) for item in value]
    return value


@functools.cache
def _defaults(struct: type[Struct]) -> tuple[tuple[str, Any], ...]:
    """Fields and their defaults. Cached, because msgspec takes longer to look them up than the rest of a reconcile."""
    fields = msgspec.structs.fields(struct)
    return tuple(
        (each.name, each.default if each.default_factory is msgspec.NODEFAULT else each.default_factory())
        for each in fields
    )


def _held_revision(
    service: InferenceService, observed: Observation, revision: str, *, digest: str, key_digest: str
) -> str:
    """The revision that keeps serving if this service may have to wait for its turn; empty if it need not wait.

    It waits only if the change is the operator's own and the service is at rest with at least one routable replica:
    otherwise there is nothing to protect. A new internal key does not wait, because routers that have it cannot reach
    engines with the old one.
    """
    live = observed.deployment
    if live is None or has_the_turn(live) or service.spec.replicas == 0:
        return ""
    serving = serving_revision(live)
    annotations = live["metadata"].get("annotations", {})
    template = live["spec"]["template"]["metadata"].get("annotations", {})
    is_own = (
        annotations.get(INPUT_ANNOTATION, digest) == digest and template.get(KEY_ANNOTATION) == key_digest
    )
    alive = [pod for pod in observed.pods if pod.is_alive]
    is_at_rest = all(pod.revision == serving for pod in alive)
    is_serving = any(pod.is_routable for pod in alive)
    return serving if serving != revision and is_own and is_at_rest and is_serving else ""


def _is_healthy(service: InferenceService, observed: Observation, revision: str) -> bool:
    """Whether the next service may have its turn: every replica is new and routable. A replica that no node can take is
    ignored, because the change is not the cause."""
    live = observed.deployment
    alive = [pod for pod in observed.pods if pod.is_alive]
    return (
        live is not None
        and _template_revision(live) == revision
        and live.get("status", {}).get("observedGeneration", 0) >= live["metadata"].get("generation", 0)
        and len(alive) == service.spec.replicas
        and all(pod.revision == revision and (pod.is_routable or pod.unschedulable) for pod in alive)
        and (service.spec.replicas == 0 or any(pod.is_routable for pod in alive))
    )


def _live_strategy(deployment: Object, surge: int, unavailable: int) -> tuple[int, int]:
    found = deployment["spec"].get("strategy", {}).get("rollingUpdate", {})
    return found.get("maxSurge", surge), found.get("maxUnavailable", unavailable)


def _is_without_surge(observed: Observation, revision: str) -> bool:
    live = observed.deployment
    if live is None:
        return False
    surge = live["spec"].get("strategy", {}).get("rollingUpdate", {}).get("maxSurge")
    return _template_revision(live) == revision and surge == 0


def _template_revision(deployment: Object) -> str:
    revision: str = deployment["spec"]["template"]["metadata"].get("labels", {}).get(REVISION_LABEL, "")
    return revision
