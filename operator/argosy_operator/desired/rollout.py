"""How a change reaches a service's replicas: the states of a rollout.

A pure function of the resource, of the revision that it asks for and of what is observed. Must not talk to an API
server, look at a clock or remember anything; what has to outlive a reconcile is an annotation of the Deployment.

    another revision is asked for, by an edit or by the operator's own change (`upgrades`)
      │
      ├─ spec.rollout.canary ──────────► canary ── figures, time or Abort ──► canary-failed
      │                                    │ last step passed, or Promote       │ Promote, or an edit
      ├─ own change ─► waiting-for-turn    │ ◄──────────────────────────────────┘
      │                  │ a turn is free, │
      │                  │ all routable    │
      ▼                  ▼                 ▼
    normal ◄─────────────┴─────────────────┘
      ├─ a new replica fails ──────────► halted                until it serves, or the spec changes
      └─ no room for a surge ─┬────────► waiting-for-node      until there is room, or patience is over ─► in-place
                              └────────► waiting-for-capacity  where no replica may be missing

    phase                 pods of the service's Deployment                      its annotations, besides `input`
    normal                replaced within spec.rollout (`rollout_bounds`)       has-turn, for the operator's own change
    waiting-for-node      the same; the one that is pending asks for a node     has-turn
    waiting-for-capacity  the same                                              has-turn
    in-place              replaced one at a time, without a surge               has-turn
    halted                as they are: it is paused                             has-turn, or those of a canary
    waiting-for-turn      paused with the new template, they keep the old one   held-revision
    canary                the same; a second Deployment has the canary's        held-revision, canary
    canary-failed         the same; that one is gone                            held-revision, canary

    within canary         Starting   the step's replicas are created; the weight is still that of the step before
    (status.rollout)      Analyzing  they are routable, and the step has its weight; Held if a person or the step asks
                          Promoting  normal; the canary's replicas serve until that is done
                          Failed     canary-failed

Whatever the phase, old replicas that never served and cannot start are removed at once (`failed_replicas`), as they
would keep CPUs, GPUs and quota from the correction of their own fault.

Invariants: the operator takes the last routable replica only if `spec.rollout` says so (`maxUnavailable` of at least
`replicas`, or `maxSurge: 0`). Nothing blocks a surge while no old replica holds a place; a blocked one stays so until
no old replica is left, since a decision on the pending pod alone would flap. A replica that serves, or that merely
starts, does not count as failed; nothing is removed while Kubernetes might take another old replica instead. A canary's
weight grows, and it is promoted by its figures, only while all of its replicas are routable; nothing but time, figures
and `action` moves it, and without figures it stays; a failed one stays failed until the revision changes or a person
promotes it; equal inputs give an equal state, so that waiting writes nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Final, Literal

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
from argosy_operator.desired.upgrades import (
    held_revision,
    input_digest,
    is_healthy,
    turn_of,
    unhealthy_replicas,
)
from argosy_operator.names import (
    CANARY_ANNOTATION,
    DEPLOYMENTS,
    HELD_ANNOTATION,
    INPUT_ANNOTATION,
    KEY_ANNOTATION,
    NUDGE_ANNOTATION,
    TURN_ANNOTATION,
    Object,
    annotations_of,
    canary_name,
)
from argosy_operator.observation import (
    Observation,
    SplitFigures,
    Turn,
    deployment_condition,
    has_the_turn,
    rolling_update,
    serving_revision,
    split_figures,
    template_revision,
)
from argosy_operator.pod import Pod, min_time, seconds_between
from argosy_resource.resources import Resources
from argosy_resource.rollout import (
    MAX_STEPS,
    CanaryRollout,
    CanaryStep,
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
        found = {INPUT_ANNOTATION: self.input_digest}
        if self.held_revision:
            found[HELD_ANNOTATION] = self.held_revision
        if self.canary is not None:
            found[CANARY_ANNOTATION] = msgspec.json.encode(self.canary.state).decode()
        if self.turn is not None:
            found[TURN_ANNOTATION] = self.turn.text
        return found


def plan_rollout(
    service: InferenceService, observed: Observation, revision: str, *, key_digest: str
) -> RolloutPlan:
    """Decide how pods of `revision` replace the others now."""
    digest = input_digest(service)
    canary = _plan_canary(service, observed, revision, key_digest=key_digest)
    own, held = observed.without_canary, ""
    if canary is None:
        held = held_revision(service, own, revision, digest=digest, key_digest=key_digest)
    unhealthy = unhealthy_replicas(own) if held else ""
    if held and (own.rolling_elsewhere or unhealthy):
        plan = RolloutPlan(
            phase="waiting-for-turn",
            surge=service.spec.rollout.surge,
            unavailable=service.spec.rollout.unavailable,
            is_paused=True,
            held_revision=held,
            waits_for="" if unhealthy else own.rolling_elsewhere,
            unhealthy=unhealthy,
        )
    elif canary is not None and canary.held:
        plan = _trying(service, observed, revision, canary)
    else:
        plan = _rolling(service, own, revision, canary, is_own=bool(held))
    return msgspec.structs.replace(plan, input_digest=digest)


def _trying(
    service: InferenceService, observed: Observation, revision: str, canary: CanaryPlan
) -> RolloutPlan:
    """The change is tried on a canary, or has failed there. A replica of it that fails before its step has begun halts
    it until that one is ready."""
    halted_by = _halting_pod(observed, revision) if canary.is_starting else None
    is_failed = canary.state.phase == "failed"
    return RolloutPlan(
        phase="canary-failed" if is_failed else "halted" if halted_by else "canary",
        surge=service.spec.rollout.surge,
        unavailable=service.spec.rollout.unavailable,
        is_paused=True,
        held_revision=canary.held,
        canary=canary,
        halted_by=halted_by,
    )


def _rolling(
    service: InferenceService,
    observed: Observation,
    revision: str,
    canary: CanaryPlan | None,
    *,
    is_own: bool,
) -> RolloutPlan:
    """The Deployment replaces its pods. `is_own`: by the operator's own change, whose turn it is."""
    live = observed.deployment
    failed = failed_replicas(observed, revision)
    blocked = blocked_surge(service, observed, revision, failed)
    phase, node_wait_s = _without_room(service, observed, blocked)
    replicas = _replicas(observed, revision)
    surge, unavailable = rollout_bounds(service.spec.rollout, replicas, is_in_place=phase == "in-place")
    least = unavailable_without(failed, observed, revision, desired=service.spec.replicas)
    unavailable = max(unavailable, least)
    halted_by = _halting_pod(observed, revision)
    if halted_by is not None:
        phase = "halted"
        if live is not None and template_revision(live) == revision:
            # Kubernetes scales a paused Deployment to its size plus maxSurge: a smaller surge would remove replicas.
            present = rolling_update(live)
            surge, unavailable = present.get("maxSurge", surge), present.get("maxUnavailable", unavailable)
    turn, turn_left_s = None, 0.0
    if (
        is_own
        or (has_the_turn(live) and not is_healthy(service, observed, revision))
        or (canary is not None and canary.state.needs_turn and not observed.rolling_elsewhere)
    ):
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
    )


def _without_room(
    service: InferenceService, observed: Observation, blocked: BlockedSurge | None
) -> tuple[Phase, float]:
    """How the rollout goes on without what it lacks, and seconds until it replaces replicas in place."""
    if blocked is None:
        return "normal", 0.0
    if not may_replace_in_place(service.spec.rollout, service.spec.replicas):
        return "waiting-for-capacity", 0.0
    wait_s = _seconds_until_in_place(service, observed, blocked)
    return "waiting-for-node" if wait_s else "in-place", wait_s


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


NO_DEVICE: Final = "cannot allocate all claims"
"""The scheduler's words (plugin DynamicResources)."""
_ROOM: Final = (
    *("Insufficient memory", "Insufficient cpu", "Insufficient ephemeral-storage", "Insufficient hugepages"),
    *("Too many pods", "anti-affinity", "topology spread", "free ports"),
)
"""The scheduler's words for what an old replica gives back."""
ROOM_SECONDS: Final = 300
"""A rollout waits at least so long for memory or a node, which a cluster autoscaler may add, before it replaces
replicas in place. For GPUs, which it often cannot, the resource says how long."""
NUDGE_SECONDS: Final = 20
"""How often Kubernetes is asked again. A quota that was raised, or pods that have ended, are noticed so late."""
QUOTA: Final = "exceeded quota"
"""The API server's words for a pod that a ResourceQuota has no room for."""
Missing = Literal["gpu", "room", "quota"]


class BlockedSurge(Struct, frozen=True):
    """What a rollout's surge lacks, and a replica that is removed gives back."""

    missing: Missing
    """`gpu`: the scheduler finds no GPU, or no device of a claim, for a new pod. `room`: it finds no memory, CPUs or
    node by the pods' own rules (anti-affinity, topology spread), or a gate of another controller, such as Kueue's,
    keeps it from looking. `quota`: the API server refuses new pods for a ResourceQuota; there is no pod then."""
    words: str = ""
    """Those of scheduler or API server; empty once replicas are replaced in place, and nothing says them any more."""
    since: str = ""
    """Since when it is missing (RFC 3339)."""


def blocked_surge(
    service: InferenceService, observed: Observation, revision: str, failed: Collection[Pod] = ()
) -> BlockedSurge | None:
    """What this rollout lacks for an additional replica while old ones hold it; None if nothing. The replicas in
    `failed` are removed in any case.

    The live Deployment (this revision, no surge) keeps the state: the pending pod is scheduled as soon as the first old
    one is gone.
    """
    if service.spec.rollout.surge == 0:
        return None
    old = [pod for pod in observed.pods if pod.is_alive and pod.revision != revision]
    refusal = _quota_refusal(observed.deployment)
    if old and refusal and _is_of(observed, revision) and not all(pod in failed for pod in old):
        return BlockedSurge("quota", refusal["message"], refusal.get("lastTransitionTime") or "")
    holders = [pod for pod in old if pod.node]
    if all(pod in failed for pod in holders):
        return None
    lacking = _lacking(service.spec.resources)
    pending = [pod for pod in observed.pods if _is_pending(pod, revision, lacking)]
    leaving = sum(bool(pod.node) and (pod.is_terminating or pod in failed) for pod in observed.pods)
    if len(pending) > leaving:
        first = min(pending, key=lambda pod: (pod.unschedulable_since, pod.name))
        is_gpu = any(text in first.unschedulable for text in lacking)
        words = f"pod {first.name}: {first.unschedulable or first.gate_words}"
        return BlockedSurge("gpu" if is_gpu else "room", words, first.unschedulable_since)
    if _is_of(observed, revision) and rolling_update(observed.deployment or {}).get("maxSurge") == 0:
        return BlockedSurge("gpu" if lacking else "room")
    return None


def _seconds_until_in_place(service: InferenceService, observed: Observation, blocked: BlockedSurge) -> float:
    """Seconds that a rollout with a blocked surge still waits for what is missing, before it replaces replicas in
    place; 0 if it waits no more. A rollout that replaces in place already does not wait again."""
    live = observed.deployment
    if live is not None and rolling_update(live).get("maxSurge") == 0:
        return 0.0
    return max(0.0, patience(service, blocked) - seconds_between(blocked.since, observed.time))


def patience(service: InferenceService, blocked: BlockedSurge) -> int:
    """Seconds from the beginning of the shortage until replicas are replaced in place."""
    asked = service.spec.rollout.in_place_after_seconds
    return max(asked, ROOM_SECONDS) if blocked.missing == "room" else asked


def _quota_refusal(deployment: Any) -> Any:
    """The condition of a Deployment whose pods a ResourceQuota refuses; empty if it has none."""
    condition = deployment_condition(deployment, "ReplicaFailure")
    is_quota = condition.get("status") == "True" and QUOTA in condition.get("message", "")
    return condition if is_quota else {}


def nudge(deployment: Any, now: str) -> tuple[str, float]:
    """The value of the Deployment's annotation that has Kubernetes create refused pods now, and seconds until the next
    one; empty and 0 if none are refused.

    The ReplicaSet controller tries again ever later, after a quarter of an hour at last. The Deployment controller
    copies annotations to the ReplicaSet, and each change of that is tried at once.
    """
    condition = deployment_condition(deployment, "ReplicaFailure")
    if condition.get("status") != "True":
        return "", 0.0
    before = annotations_of(deployment).get(NUDGE_ANNOTATION, "")
    since = before or condition.get("lastTransitionTime") or ""
    age = seconds_between(since, now)
    if not since or not 0 <= age < NUDGE_SECONDS:
        return now, float(NUDGE_SECONDS)
    return before, NUDGE_SECONDS - age


def _is_pending(pod: Pod, revision: str, lacking: Collection[str]) -> bool:
    is_blocked = any(text in pod.unschedulable for text in (*lacking, *_ROOM)) or bool(pod.gate_words)
    return pod.is_alive and pod.revision == revision and is_blocked


def _lacking(resources: Resources) -> list[str]:
    """What the scheduler says of a pod for which no GPU is free, or no device of a claim that is the replica's own."""
    found = [] if resources.gpu is None else [f"Insufficient {resources.gpu.resource_name}"]
    is_own = any(claim.resource_claim_template_name is not None for claim in resources.claims)
    return [*found, NO_DEVICE] if is_own else found


def _is_of(observed: Observation, revision: str) -> bool:
    """Whether the Deployment has this revision's template already."""
    live = observed.deployment
    return live is not None and template_revision(live) == revision


_EXITED: Final = ("ContainerExited", "OOMKilled")
_OCCUPIED: Final = (
    *("Insufficient ", "Too many pods", NO_DEVICE, "anti-affinity", "topology spread", "in use", "in-use"),
    "volume count",
)
"""The scheduler's words for what another pod may give back."""
_NOT_OFFERED: Final = (
    *("didn't match Pod's node affinity/selector", "taint", "node(s) were unschedulable"),
    *("persistentvolumeclaim", "volume node affinity conflict"),
)
"""Its words for what no pod can give back."""


def failed_replicas(observed: Observation, revision: str) -> tuple[Pod, ...]:
    """The living replicas of other revisions than this one that need not be kept. None while another old replica starts
    or may recover: of old replicas that are not ready Kubernetes takes those of the oldest ReplicaSet first, and then
    those whose phase is Pending."""
    alive = [pod for pod in observed.pods if pod.is_alive]
    old = [pod for pod in alive if pod.revision != revision]
    is_served = any(pod.is_routable for pod in alive)
    is_stuck = not is_served and any(_wants_a_place(pod) for pod in alive if pod.revision == revision)
    failed = tuple(
        pod
        for pod in old
        if not pod.is_up and (pod.is_backing_off and is_stuck if pod.has_served else _cannot_start(pod))
    )
    kept = [pod for pod in old if pod not in failed and not pod.is_routable]
    return failed if all(is_stuck and pod.problem is not None for pod in kept) else ()


def unavailable_without(
    failed: Collection[Pod], observed: Observation, revision: str, *, desired: int
) -> int:
    """The least maxUnavailable with which Kubernetes removes the failed replicas; 0 if there are none. All others that
    serve stay: it removes old replicas that are not ready first."""
    if not failed:
        return 0
    kept = sum(
        pod.is_routable or pod.revision != revision
        for pod in observed.pods
        if pod.is_alive and pod not in failed
    )
    return max(0, desired - kept)


def _cannot_start(pod: Pod) -> bool:
    """Whether a replica that never served does not come up. One whose engine has ended once, and is started again
    without delay, may."""
    if pod.unschedulable:
        return True
    if pod.problem is None:
        return False
    return pod.is_backing_off or pod.restarts > 1 or pod.problem.reason not in _EXITED


def _wants_a_place(pod: Pod) -> bool:
    """Whether no node takes the pod, and what it lacks may be what another pod has."""
    is_elsewhere = any(words in pod.unschedulable for words in _NOT_OFFERED)
    return bool(pod.unschedulable) and (
        not is_elsewhere or any(words in pod.unschedulable for words in _OCCUPIED)
    )


MAX_MESSAGE: Final = 512
"""Characters of a failure that are remembered."""
ABORTED: Final = "aborted by spec.rollout.canary.action"
PROMOTED: Final = "promoted by spec.rollout.canary.action"
"""What is remembered of a canary that a person has ended."""
_STEPPING: Final = ("Starting", "Analyzing", "Held")


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


def _read_canary(deployment: Object | None) -> CanaryState | None:
    """What the Deployment remembers; None if that is nothing, or cannot be read."""
    text = annotations_of(deployment).get(CANARY_ANNOTATION)
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
    state = _read_canary(deployment)
    if (
        deployment is None
        or state is None
        or state.phase == "promoting"
        or service.spec.rollout.canary is None
        or service.spec.replicas == 0
    ):
        return ""
    return annotations_of(deployment["spec"]["template"]).get(KEY_ANNOTATION, "")


def has_canary_steps(obj: Object) -> bool:
    """Whether the resource has a canary that has still to pass a step."""
    rollout = obj.get("status", {}).get("rollout") or {}
    return rollout.get("phase") in _STEPPING and not obj["metadata"].get("deletionTimestamp")


def _plan_canary(
    service: InferenceService, observed: Observation, revision: str, *, key_digest: str
) -> CanaryPlan | None:
    """The canary rollout of `revision`; None if the Deployment rolls it out by itself, or is done with it.

    A service that has no routable replica has nothing to compare with, and engines whose key is no longer valid cannot
    wait: a router that starts now does not reach them.
    """
    canary, live = service.spec.rollout.canary, observed.deployment
    if canary is None or live is None or service.spec.replicas == 0:
        return None
    live_digest = annotations_of(live["spec"]["template"]).get(KEY_ANNOTATION)
    if key_digest and live_digest != key_digest:
        return None
    own = observed.without_canary
    serving = serving_revision(live)
    before = _read_canary(live)
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
