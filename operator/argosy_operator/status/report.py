"""The status of a service: a pure function of the resource, of the plan and of what is observed.

Owns the meaning of every condition and reason. Must not talk to an API server or look at a clock.
Invariants: Ready means what DESIGN says it means (this generation, every replica updated, enough of them
routable, no old one routable); a message names the pod and what it waits for; equal inputs give an equal
status, and a condition's transition time changes only when its status does, so that nothing is written at
rest.

    Ready          the summary: clients can use this generation of the service now
    Progressing    a change is under way
    WorkloadReady  every replica wanted is updated and its containers are ready
    Routable       routers send requests to enough replicas
    Degraded       something needs a person
    Reconciling    as Progressing, in kstatus' words
    Stalled        nothing more happens until a person acts, in kstatus' words
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

import msgspec
from msgspec import Struct

from argosy_operator.config import OperatorConfig
from argosy_operator.desired.plan import Plan
from argosy_operator.desired.rollout import failed_replacements, serving_revision
from argosy_operator.names import selector
from argosy_operator.observed.observation import Observed
from argosy_operator.observed.pod import Pod, Problem
from argosy_operator.resource.types import (
    Condition,
    ConditionStatus,
    ConditionType,
    InferenceService,
    InferenceServiceStatus,
)

UNSCHEDULABLE_SECONDS: Final = 300
"""How long a replica may wait for a node until the service is degraded. An autoscaler takes minutes to add one."""
NO_ROUTER: Final = "no router answers; routers run in the operator's namespace"


class Verdict(Struct, frozen=True):
    """A condition without its times."""

    status: ConditionStatus
    reason: str
    message: str = ""


class Counts(Struct, frozen=True, kw_only=True):
    """Replicas by state."""

    desired: int
    alive: int
    updated: int
    ready: int
    """Updated, containers ready."""
    routable: int
    """Updated or not."""
    old_routable: int
    draining: int

    @classmethod
    def of(cls, pods: Iterable[Pod], *, desired: int, revision: str) -> Counts:
        pods = tuple(pods)
        alive = [pod for pod in pods if pod.is_alive]
        updated = [pod for pod in alive if pod.revision == revision]
        return cls(
            desired=desired,
            alive=len(alive),
            updated=len(updated),
            ready=sum(pod.is_up for pod in updated),
            routable=sum(pod.is_routable for pod in alive),
            old_routable=sum(pod.is_routable for pod in alive if pod.revision != revision),
            draining=sum(pod.is_terminating for pod in pods),
        )


def status(
    service: InferenceService,
    observed: Observed,
    plan: Plan,
    *,
    config: OperatorConfig,
    now: str,
    failure: Problem | None = None,
) -> InferenceServiceStatus:
    """The status to report. `failure` says why the plan could not be applied; `now` is RFC 3339."""
    counts = Counts.of(observed.pods, desired=service.spec.replicas, revision=plan.revision)
    view = _View(
        service=service, observed=observed, plan=plan, config=config, counts=counts, failure=failure, now=now
    )
    verdicts: dict[ConditionType, Verdict] = {
        "Ready": ready(view),
        "Progressing": progressing(view),
        "WorkloadReady": workload_ready(view),
        "Routable": routable(view),
        "Degraded": degraded(view),
        "Reconciling": reconciling(view),
        "Stalled": stalled(view),
    }
    labels = selector(service)
    return InferenceServiceStatus(
        observed_generation=service.metadata.generation,
        url=f"{config.router_url}/v1" if config.router_url else "",
        model=service.served_name,
        selector=",".join(f"{key}={value}" for key, value in sorted(labels.items())),
        revision=plan.revision,
        replicas=counts.alive,
        updated_replicas=counts.updated,
        ready_replicas=sum(pod.is_up for pod in observed.pods),
        routable_replicas=counts.routable,
        draining_replicas=counts.draining,
        routable=f"{counts.routable}/{counts.desired}",
        conditions=conditions(
            verdicts, service.status.conditions, generation=service.metadata.generation, now=now
        ),
    )


def conditions(
    verdicts: Mapping[ConditionType, Verdict],
    previous: Iterable[Condition],
    *,
    generation: int,
    now: str,
) -> tuple[Condition, ...]:
    """Conditions of the verdicts; a transition time is kept while the status stays."""
    before = {condition.type: condition for condition in previous}
    result = []
    for kind, verdict in verdicts.items():
        old = before.get(kind)
        since = old.last_transition_time if old is not None and old.status == verdict.status else now
        result.append(
            Condition(
                type=kind,
                status=verdict.status,
                reason=verdict.reason,
                message=verdict.message,
                last_transition_time=since,
                observed_generation=generation,
            )
        )
    return tuple(result)


def invalid_status(obj: Mapping[str, Any], message: str, *, now: str) -> dict[str, Any]:
    """Status of a resource this operator cannot read: the CRD is newer, or older, than the operator."""
    previous = msgspec.convert(obj.get("status", {}).get("conditions", ()), tuple[Condition, ...])
    verdicts: dict[ConditionType, Verdict] = {
        "Ready": Verdict("False", "InvalidSpec", message),
        "Degraded": Verdict("True", "InvalidSpec", message),
        "Reconciling": Verdict("False", "InvalidSpec"),
        "Stalled": Verdict("True", "InvalidSpec", message),
    }
    generation = obj["metadata"].get("generation", 0)
    merged = conditions(verdicts, previous, generation=generation, now=now)
    return {"observedGeneration": generation, "conditions": msgspec.to_builtins(merged)}


class _View(Struct, frozen=True, kw_only=True):
    """What every verdict may look at."""

    service: InferenceService
    observed: Observed
    plan: Plan
    config: OperatorConfig
    counts: Counts
    failure: Problem | None
    now: str

    @property
    def is_current(self) -> bool:
        """Whether the Deployment controller has taken up this plan."""
        deployment = self.observed.deployment
        if deployment is None:
            return False
        seen = deployment.get("status", {}).get("observedGeneration", 0)
        return (
            serving_revision(deployment) == self.plan.revision
            and deployment["spec"].get("replicas") == self.counts.desired
            and seen >= deployment["metadata"].get("generation", 0)
        )

    @property
    def is_complete(self) -> bool:
        """Whether exactly the wanted pods exist, however far each of them is."""
        return self.is_current and self.counts.updated == self.counts.alive == self.counts.desired

    @property
    def wanted_routable(self) -> int:
        """Routable replicas that Ready asks for: never none, unless none is desired."""
        desired = self.counts.desired
        return min(desired, max(1, desired - self.service.spec.rollout.unavailable))

    @property
    def has_no_router(self) -> bool:
        routers = self.observed.routers
        return bool(self.config.router_url) and routers.known and routers.alive == 0

    @property
    def lost_names(self) -> tuple[str, ...]:
        return tuple(conflict.name for conflict in self.observed.conflicts)

    def deployment_condition(self, kind: str) -> Mapping[str, Any]:
        deployment = self.observed.deployment or {}
        found = deployment.get("status", {}).get("conditions", ())
        return next((each for each in found if each["type"] == kind), {})


def ready(view: _View) -> Verdict:
    counts = view.counts
    if view.failure is not None:
        return Verdict("False", view.failure.reason, view.failure.message)
    if view.service.served_name in view.lost_names:
        return Verdict("False", "NameConflict", _conflict_message(view))
    if view.service.spec.paused and not view.is_current:
        return Verdict("False", "Paused", "the spec was changed while paused; unpause to apply it")
    if not view.is_complete:
        cause = workload_ready(view)
        specific = cause.reason not in ("Starting", "Reconciling")
        return Verdict("False", cause.reason if specific else "RollingOut", cause.message)
    if counts.desired == 0:
        return Verdict("True", "ScaledToZero", "no replicas are wanted")
    if counts.old_routable:
        return Verdict("False", "RollingOut", f"{counts.old_routable} old replicas still serve")
    if counts.ready < view.wanted_routable:
        cause = workload_ready(view)
        return Verdict("False", cause.reason, cause.message)
    if view.has_no_router or counts.routable < view.wanted_routable:
        cause = routable(view)
        return Verdict("False", cause.reason, cause.message)
    return Verdict("True", "ReplicasRoutable", f"{counts.routable}/{counts.desired} replicas routable")


def progressing(view: _View) -> Verdict:
    counts = view.counts
    if view.service.spec.paused:
        return Verdict("False", "Paused", "reconciling is paused; what runs goes on serving")
    so_far = f"{counts.updated}/{counts.desired} replicas updated, {counts.ready} ready, {counts.routable} routable"
    phase = view.plan.rollout.phase
    if phase == "halted":
        return Verdict("False", "RolloutHalted", f"{_halt_message(view)}: {so_far}")
    if phase == "waiting-for-turn":
        other = view.observed.rolling_elsewhere
        message = (
            f"the operator's new defaults reach one service at a time; waiting for {other} to be healthy"
        )
        return Verdict("False", "WaitingForTurn", message)
    deadline = view.deployment_condition("Progressing")
    if deadline.get("reason") == "ProgressDeadlineExceeded":
        seconds = view.service.spec.rollout.progress_deadline_seconds
        return Verdict("False", "ProgressDeadlineExceeded", f"no progress for {seconds} s: {so_far}")
    if phase == "waiting-for-capacity":
        return Verdict("True", "WaitingForCapacity", f"{_capacity_message(view)}: {so_far}")
    if phase == "in-place":
        return Verdict(
            "True",
            "NoGPUForSurge",
            f"no GPU is free for an additional replica; replacing one at a time without surge: {so_far}",
        )
    if not view.is_current:
        return Verdict("True", "Reconciling", so_far)
    if counts.updated < counts.alive:
        return Verdict("True", "RollingOut", so_far)
    if counts.alive != counts.desired:
        return Verdict("True", "Scaling", so_far)
    if counts.routable < counts.desired:
        return Verdict("True", "WaitingForReplicas", so_far)
    return Verdict("False", "Complete", so_far)


def workload_ready(view: _View) -> Verdict:
    counts = view.counts
    if view.is_complete and counts.ready == counts.desired:
        return Verdict("True", "ReplicasReady", f"{counts.ready}/{counts.desired} replicas ready")
    so_far = f"{counts.ready}/{counts.desired} updated replicas ready"
    cause = _failed_create(view) or _replica_problem(view) or _lost(view) or _unschedulable(view)
    if cause is not None:
        return Verdict("False", cause.reason, f"{so_far}; {cause.message}")
    if not view.is_current:
        return Verdict("False", "Reconciling", so_far)
    waiting = [pod.name for pod in view.observed.pods if pod.is_alive and not pod.is_up]
    return Verdict("False", "Starting", f"{so_far}; waiting for {_names(waiting)}" if waiting else so_far)


def routable(view: _View) -> Verdict:
    counts = view.counts
    so_far = f"{counts.routable}/{counts.desired} replicas routable"
    if counts.desired == 0:
        return Verdict("False", "ScaledToZero", "no replicas are wanted")
    if view.has_no_router:
        return Verdict("Unknown", "NoRouter", NO_ROUTER)
    if counts.routable >= view.wanted_routable:
        return Verdict("True", "ReplicasRoutable", so_far)
    lost = _lost(view)
    if lost is not None:
        return Verdict("False", lost.reason, f"{so_far}; {lost.message}")
    unrouted = [pod.name for pod in view.observed.pods if pod.is_up and not pod.is_routable]
    if unrouted:
        return Verdict("False", "WaitingForRouter", f"{so_far}; no router is synced with {_names(unrouted)}")
    return Verdict("False", "WaitingForReplicas", so_far)


def degraded(view: _View) -> Verdict:
    if view.failure is not None:
        return Verdict("True", view.failure.reason, view.failure.message)
    if view.lost_names:
        return Verdict("True", "NameConflict", _conflict_message(view))
    progress = progressing(view)
    if progress.reason == "ProgressDeadlineExceeded":
        return Verdict("True", progress.reason, progress.message)
    cause = _failed_create(view) or _replica_problem(view) or _lost(view) or _placed_nowhere(view)
    if cause is not None:
        return Verdict("True", cause.reason, cause.message)
    canary = view.service.spec.router.canary
    if canary is not None and view.observed.lacks_canary:
        message = f"there is no InferenceService {canary.service!r} in this namespace; all requests stay here"
        return Verdict("True", "CanaryNotFound", message)
    return Verdict("False", "AsExpected")


def reconciling(view: _View) -> Verdict:
    progress = progressing(view)
    under_way = progress.status == "True" and stalled(view).status == "False"
    return Verdict("True" if under_way else "False", progress.reason, progress.message if under_way else "")


def stalled(view: _View) -> Verdict:
    if view.failure is not None:
        return Verdict("True", view.failure.reason, view.failure.message)
    if view.service.served_name in view.lost_names:
        return Verdict("True", "NameConflict", _conflict_message(view))
    progress = progressing(view)
    if progress.reason in ("RolloutHalted", "ProgressDeadlineExceeded"):
        return Verdict("True", progress.reason, progress.message)
    return Verdict("False", "AsExpected")


def _halt_message(view: _View) -> str:
    pod = failed_replacements(view.observed, view.plan.revision)[0]
    assert pod.problem is not None
    cause = pod.problem.message or pod.problem.reason
    return (
        f"pod {pod.name} does not come up ({cause}); no further replica is replaced "
        "until it is ready or the spec changes"
    )


def _capacity_message(view: _View) -> str:
    if view.service.spec.rollout.max_unavailable == 0:
        why, remedy = "maxUnavailable is 0", "raise maxUnavailable"
    else:
        why, remedy = "it is the only one", "set rollout.maxUnavailable to 1"
    return (
        f"no GPU is free for an additional replica, and none is taken from a serving one because {why}; "
        f"free a GPU, or {remedy}"
    )


def _conflict_message(view: _View) -> str:
    lost = "; ".join(f"{each.name!r} belongs to the older {each.winner}" for each in view.observed.conflicts)
    return f"{lost}; clients reach this service as {view.service.key!r}"


def _failed_create(view: _View) -> Problem | None:
    condition = view.deployment_condition("ReplicaFailure")
    if condition.get("status") != "True":
        return None
    return Problem(condition.get("reason") or "FailedCreate", condition.get("message", ""))


def _replica_problem(view: _View) -> Problem | None:
    """The problem of the newest revision's pods first: that is the change being made."""
    alive = [pod for pod in view.observed.pods if pod.is_alive and pod.problem is not None]
    alive.sort(key=lambda pod: (pod.revision != view.plan.revision, pod.name))
    for pod in alive:
        assert pod.problem is not None
        return Problem(pod.problem.reason, f"pod {pod.name}: {pod.problem.message or pod.problem.reason}")
    return None


def _lost(view: _View) -> Problem | None:
    for pod in sorted(view.observed.pods, key=lambda pod: pod.name):
        if pod.is_alive and pod.is_lost:
            return Problem("NodeLost", f"pod {pod.name}: node {pod.node} does not answer")
    return None


def _unschedulable(view: _View) -> Problem | None:
    for pod in sorted(view.observed.pods, key=lambda pod: pod.name):
        if pod.is_alive and pod.unschedulable:
            reason = "ClaimNotFound" if _lacks_claim(pod) else "Unschedulable"
            return Problem(reason, f"pod {pod.name}: {pod.unschedulable}")
    return None


def _lacks_claim(pod: Pod) -> bool:
    """Whether the scheduler misses a PersistentVolumeClaim: that does not heal by itself."""
    return "persistentvolumeclaim" in pod.unschedulable and "not found" in pod.unschedulable


def _placed_nowhere(view: _View) -> Problem | None:
    """A replica that no node has taken for long, or ever can. A rollout that waits for a GPU is no defect; it has a
    deadline of its own."""
    if view.plan.rollout.phase in ("in-place", "waiting-for-capacity"):
        return None
    left = [
        seconds_until_degraded(pod, view.now)
        for pod in view.observed.pods
        if pod.is_alive and pod.unschedulable
    ]
    return _unschedulable(view) if left and min(left) <= 0 else None


def seconds_until_degraded(pod: Pod, now: str) -> float:
    """How much longer a pod that cannot be scheduled counts as merely waiting."""
    if _lacks_claim(pod):
        return 0.0
    try:
        waited = datetime.fromisoformat(now) - datetime.fromisoformat(pod.unschedulable_since)
    except (ValueError, TypeError):  # the condition has no time, or one without a zone
        return float(UNSCHEDULABLE_SECONDS)
    return UNSCHEDULABLE_SECONDS - waited.total_seconds()


def _names(names: list[str], limit: int = 3) -> str:
    shown = ", ".join(sorted(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
