"""How a change reaches a service's replicas: the Deployment's strategy, and whether its rollout is paused.

A pure function of the resource, of the revision that it asks for and of what is observed. Must not talk to an API
server, look at a clock or remember anything; what has to outlive a reconcile is an annotation of the Deployment.

Invariant: the operator takes the last routable replica only if `spec.rollout` says so (`maxUnavailable` of at least
`replicas`, or `maxSurge: 0`).

    rollout_policy         bounds the surge and the unavailability; a new replica that fails halts the rollout: the
                           Deployment is paused until that replica is ready or the spec changes
    blocked_surge          no GPU, node or quota for a surge: replicas are replaced in place, at once or after a time in
                           which a cluster autoscaler may bring a node, or the rollout waits
    failed_replicas        old replicas that never served and cannot start are removed at once, whatever
                           `spec.rollout` says, so that they take no place from the correction
    canary                 a change is tried on replicas of a Deployment of its own first: this one is paused with the
                           new template, and its pods keep serving with the old one until the last step has passed;
                           a replica of it that fails before its step has begun halts it until that one is ready
    staged_rollout         the operator's own change is rolled out to few services at a time, and to healthy ones only:
                           the Deployments of the others are paused with the new template, and their pods keep
                           serving with the old one until it is their turn; a canary needs none before it is promoted
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from argosy_operator.desired.blocked_surge import BlockedSurge, blocked_surge, seconds_until_in_place
from argosy_operator.desired.canary import CanaryPlan, encode_canary, plan_canary
from argosy_operator.desired.failed_replicas import failed_replicas, unavailable_without
from argosy_operator.desired.spec_digest import input_digest
from argosy_operator.desired.staged_rollout import held_revision, is_healthy, turn_of, unhealthy_replicas
from argosy_operator.names import CANARY_ANNOTATION, HELD_ANNOTATION, INPUT_ANNOTATION, TURN_ANNOTATION
from argosy_operator.observed.deployment import Turn, has_the_turn, rolling_update, template_revision
from argosy_operator.observed.observation import Observation
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

Phase = Literal[
    "normal",
    "in-place",
    "waiting-for-node",
    "waiting-for-capacity",
    "halted",
    "waiting-for-turn",
    "canary",
    "canary-failed",
]


class RolloutPlan(Struct, frozen=True, kw_only=True):
    """The rollout settings of the Deployment, and the reason for them."""

    phase: Phase = "normal"
    surge: int = 1
    unavailable: int = 0
    is_paused: bool = False
    held_revision: str = ""
    """While the service waits for its turn, or for a canary: the revision that keeps serving."""
    waits_for: str = ""
    """While the service waits for its turn: a service (`namespace/name`) that has one, or is about to. Empty if it
    waits for its own replicas only."""
    unhealthy: str = ""
    """While the operator's own change leaves the service alone, because its replicas are not all routable: how many."""
    canary: CanaryPlan | None = None
    """The canary rollout of the revision, until it is complete."""
    halted_by: Pod | None = None
    """The new replica that does not come up, while that halts the rollout."""
    blocked: BlockedSurge | None = None
    """What the rollout lacks for its surge."""
    node_wait_s: float = 0.0
    """While the rollout waits for what it lacks: seconds until replicas are replaced in place."""
    turn: Turn | None = None
    """While the operator's own change is being rolled out to this service."""
    turn_left_s: float = 0.0
    """Seconds until that may have taken too long."""
    input_digest: str = ""
    """Hash of those parts of the spec that shape the pods. While it stays the same, a new revision comes from a change
    of the operator's."""

    @property
    def annotations(self) -> dict[str, str]:
        """Annotations of the Deployment."""
        found = {INPUT_ANNOTATION: self.input_digest}
        if self.held_revision:
            found[HELD_ANNOTATION] = self.held_revision
        if self.canary is not None:
            found[CANARY_ANNOTATION] = encode_canary(self.canary.state)
        if self.turn is not None:
            found[TURN_ANNOTATION] = self.turn.text
        return found


def plan_rollout(
    service: InferenceService, observed: Observation, revision: str, *, key_digest: str
) -> RolloutPlan:
    """Decide how pods of `revision` replace the others now."""
    live = observed.deployment
    digest = input_digest(service)
    phase: Phase
    canary = plan_canary(service, observed, revision, key_digest=key_digest)
    with_canary, observed = observed, observed.without_canary
    held = ""
    if canary is None:
        held = held_revision(service, observed, revision, digest=digest, key_digest=key_digest)
    unhealthy = unhealthy_replicas(observed) if held else ""
    if held and (observed.rolling_elsewhere or unhealthy):
        return RolloutPlan(
            phase="waiting-for-turn",
            surge=service.spec.rollout.surge,
            unavailable=service.spec.rollout.unavailable,
            is_paused=True,
            held_revision=held,
            waits_for="" if unhealthy else observed.rolling_elsewhere,
            unhealthy=unhealthy,
            input_digest=digest,
        )
    if canary is not None and canary.held:
        halted_by = _halting_pod(with_canary, revision) if canary.is_starting else None
        phase = "canary-failed" if canary.state.phase == "failed" else "halted" if halted_by else "canary"
        return RolloutPlan(
            phase=phase,
            surge=service.spec.rollout.surge,
            unavailable=service.spec.rollout.unavailable,
            is_paused=True,
            held_revision=canary.held,
            canary=canary,
            halted_by=halted_by,
            input_digest=digest,
        )
    has_turn = bool(held) or (has_the_turn(live) and not is_healthy(service, observed, revision))
    if canary is not None and canary.state.needs_turn and not observed.rolling_elsewhere:
        has_turn = True
    phase = "normal"
    node_wait_s = 0.0
    failed = failed_replicas(observed, revision)
    blocked = blocked_surge(service, observed, revision, failed)
    if blocked is not None:
        phase = "in-place" if may_replace_in_place(service) else "waiting-for-capacity"
        if phase == "in-place" and (node_wait_s := seconds_until_in_place(service, observed, blocked)):
            phase = "waiting-for-node"
    replicas = _replicas(observed, revision)
    surge, unavailable = rollout_bounds(service.spec.rollout, replicas, is_in_place=phase == "in-place")
    unavailable = max(
        unavailable, unavailable_without(failed, observed, revision, desired=service.spec.replicas)
    )
    halted_by = _halting_pod(observed, revision)
    if halted_by is not None:
        phase = "halted"
        if live is not None and template_revision(live) == revision:
            # Kubernetes scales a paused Deployment to its size plus maxSurge: a smaller surge would remove replicas.
            present = rolling_update(live)
            surge, unavailable = present.get("maxSurge", surge), present.get("maxUnavailable", unavailable)
    turn, turn_left_s = None, 0.0
    if has_turn:
        turn, turn_left_s = turn_of(
            service,
            observed,
            revision,
            has_failed=halted_by is not None,
            lacks_room=halted_by is None and blocked is not None,
        )
    return RolloutPlan(
        phase=phase,
        surge=surge,
        unavailable=unavailable,
        is_paused=halted_by is not None,
        canary=canary,
        halted_by=halted_by,
        turn=turn,
        turn_left_s=turn_left_s,
        blocked=blocked,
        node_wait_s=node_wait_s,
        input_digest=digest,
    )


def _halting_pod(observed: Observation, revision: str) -> Pod | None:
    """The new replica whose failure halts the rollout; None if the rollout may go on."""
    halting = halting_replica(_replicas(observed, revision))
    return next((pod for pod in observed.pods if halting and pod.name == halting.name), None)


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
