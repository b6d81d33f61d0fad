"""What a service's conditions are told from, and what is wrong with its replicas and its scaling, as reason and
message.

Owns the view that conditions depend on (the resource, one observation, the plan, counts of replicas); the causes that
Kubernetes reports: a Deployment that cannot create pods, a container that does not run, a pod that was evicted, a lost
node, a pod that no node takes; and what the status says of `spec.scaling`. Must not judge what that means for a
condition (`conditions`), nor decide a number of replicas (`desired.scaling`). Invariants: a message names the pod, and
equal inputs name the same one; reason and time of a number change only with the number, so that a service at rest
causes no write.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from argosy_operator.config import OperatorConfig
from argosy_operator.desired.children import Plan
from argosy_operator.desired.diff import GateChange
from argosy_operator.desired.pod_template import MODELS_VOLUME
from argosy_operator.desired.rollout import QUOTA
from argosy_operator.desired.scaling import ScalingDecision, lower_bound, unknown_time_zones
from argosy_operator.names import DEPLOYMENTS, LEADER_LABEL, deployment_name, object_name
from argosy_operator.observation import Observation, Routers, Scalers, deployment_condition, serving_revision
from argosy_operator.pod import Pod, Problem, seconds_between
from argosy_resource.engine_arguments import default_image_value
from argosy_resource.engine_command import claim_name
from argosy_resource.fleet_document import LostName
from argosy_resource.model import MODEL_MOUNT, Model
from argosy_resource.pod_fields import FETCH_CONTAINER
from argosy_resource.scaling import MAX_COLD_START_SECONDS, ScalingStatus
from argosy_resource.types import API_VERSION, KIND, InferenceService, ManagedFieldsEntry

UNSCHEDULABLE_SECONDS: Final = 300
"""A replica may wait this long for a node before the service is degraded. An autoscaler takes minutes to add one."""
UNMOUNTED_SECONDS: Final = 120
"""A replica's volumes may take this long before the status names them. Attaching a disk takes a minute."""
FOREIGN_WRITE_SECONDS: Final = 600
"""A write by an unknown client may be a person's (k9s, a dashboard): without another one for so long it was."""
SCALED_ELSEWHERE: Final = "HorizontalPodAutoscaler"
"""Reason in status.scaling while a HorizontalPodAutoscaler decides."""
_AUTOSCALERS: Final = frozenset({"kube-controller-manager", "keda-operator"})
"""Field managers of the HorizontalPodAutoscaler, and of KEDA, which scales to and from zero itself. Where autoscalers
are listed, what was written by those that are gone does not count."""
_SHOWN: Final = 3
_INTERACTIVE: Final = "kubectl"
"""People scale by hand, which is no controller that would do it again."""
_HOST_PATH_REMEDY: Final = (
    "; a node cache needs hostPath: set spec.model.cache.type to claim or none, or have the administrator label the "
    "namespace pod-security.kubernetes.io/enforce=privileged"
)
_FIRST_REFUSAL: Final = "; this was refused first: the ReplicaSet's Events have what is refused now"
"""Kubernetes sets the condition when a pod is refused, and does not renew its message while others are."""
_NO_CACHE_REMEDY: Final = (
    "; node {node} may have no node cache: its DaemonSet runs where nodeCache.nodeSelector and nodeCache.tolerations "
    "of the Helm chart allow it, and spec.placement must not lead to other nodes"
)
_IMAGE_REASONS: Final = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_SIZE_LIMIT_REMEDY: Final = "; the model is larger than spec.model.cache.sizeLimit"


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


class ServiceView(Struct, frozen=True, kw_only=True):
    """Everything that a condition may depend on."""

    service: InferenceService
    observed: Observation
    plan: Plan
    config: OperatorConfig
    counts: Counts
    failure: Problem | None
    now: str
    contested: tuple[str, ...] = ()
    """Children, such as `Deployment tiny-engine`, that another writer changes each time and that are left alone."""

    @property
    def is_current(self) -> bool:
        """Whether the Deployment is as planned, and its controller has observed that."""
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
        """Whether exactly the wanted pods exist, ready or not."""
        return self.is_current and self.counts.updated == self.counts.alive == self.counts.desired

    @property
    def is_kept_from_plan(self) -> bool:
        """Whether another writer keeps the Deployment from what brings the wanted pods about. A webhook that merely
        takes images from a mirror does not."""
        live = self.observed.deployment
        if live is None or not self.contested or self.is_complete:
            return False
        asked, found = self.plan.deployment["spec"], live["spec"]
        return (
            serving_revision(live) != self.plan.revision
            or found.get("replicas", 1) != asked["replicas"]
            or bool(found.get("paused")) != asked["paused"]
        )

    @property
    def wanted_routable(self) -> int:
        """Number of routable replicas that Ready requires: at least one, unless none is desired. With spec.scaling the
        lower bound counts, since clients are served while replicas are added for the load."""
        desired, scaling = self.counts.desired, self.service.spec.scaling
        least = desired
        if scaling is not None:
            least, _ = lower_bound(scaling, datetime.datetime.fromisoformat(self.now))
        return min(desired, max(1, least - self.service.spec.rollout.unavailable))

    @property
    def is_scaling(self) -> bool:
        """Whether spec.scaling changes nothing but the number of replicas now, and enough of them are up."""
        deployment = self.observed.deployment
        return (
            self.service.spec.scaling is not None
            and deployment is not None
            and serving_revision(deployment) == self.plan.revision
            and self.counts.updated == self.counts.alive
            and self.counts.ready >= self.wanted_routable
        )

    @property
    def judged_pods(self) -> list[Pod]:
        """The living replicas whose problems the conditions tell, those of the planned revision first. Once there is
        one of these, others do not count: they are being replaced, and what was wrong with them may have been mended.
        While an older revision is kept, for a canary or until it is this service's turn, its replicas count as well."""
        alive = [pod for pod in self.observed.pods if pod.is_alive]
        planned = [pod for pod in alive if pod.revision == self.plan.revision]
        judged = planned if planned and not self.plan.rollout.held_revision else alive
        return sorted(judged, key=lambda pod: (pod.revision != self.plan.revision, pod.name))

    @property
    def fetches_model(self) -> bool:
        """Whether the planned replicas fetch their model before the engine starts."""
        containers = self.plan.deployment["spec"]["template"]["spec"].get("initContainers", ())
        return any(container["name"] == FETCH_CONTAINER for container in containers)

    @property
    def has_no_router(self) -> bool:
        routers = self.observed.routers
        return bool(self.config.router_url) and routers.known and routers.alive == 0

    @property
    def gets_no_requests(self) -> bool:
        """Whether routers know the replicas and send them nothing, though they were routable once: gates stay open."""
        return self._is_unsent and not self.observed.routers.unreachable

    @property
    def may_get_requests(self) -> bool:
        """Whether that is so of the routers that answer, and one that does not may serve clients all the same."""
        return self._is_unsent and bool(self.observed.routers.unreachable)

    @property
    def _is_unsent(self) -> bool:
        return (
            bool(self.config.router_url)
            and self.counts.routable > 0
            and self.service.key in self.observed.routers.unsent
        )

    @property
    def lost_names(self) -> tuple[LostName, ...]:
        """Names that the service claims and does not have, its main one first."""
        main = self.service.served_name
        return tuple(sorted(self.observed.lost_names, key=lambda lost: lost.name != main))

    @property
    def is_main_name_lost(self) -> bool:
        return any(lost.name == self.service.served_name for lost in self.observed.lost_names)

    def deployment_condition(self, kind: str) -> Mapping[str, Any]:
        return deployment_condition(self.observed.deployment, kind)

    def canary_condition(self, kind: str) -> Mapping[str, Any]:
        """A condition of the canary's own Deployment, while there is one."""
        if self.plan.canary is None:
            return {}
        return deployment_condition(
            self.observed.children.get((DEPLOYMENTS, object_name(self.plan.canary))), kind
        )


def failed_create(view: ServiceView) -> Problem | None:
    """Why the API server refuses pods of the service, or of its canary. A quota in which a rollout, or a pod that ends,
    makes room by itself is no problem."""
    condition = view.deployment_condition("ReplicaFailure")
    if condition.get("status") != "True":
        condition = view.canary_condition("ReplicaFailure")
    if condition.get("status") != "True":
        return None
    makes_room = view.plan.rollout.phase in ("in-place", "waiting-for-node") or view.counts.draining
    if makes_room and QUOTA in condition.get("message", ""):
        return None
    message = condition.get("message", "")
    if "PodSecurity" in message and "hostPath" in message:
        message += _HOST_PATH_REMEDY
    message += _FIRST_REFUSAL
    return Problem(condition.get("reason") or "FailedCreate", message)


def container_problem(view: ServiceView) -> Problem | None:
    """A container that does not run; pods of the planned revision first, since they show whether the change works."""
    for pod in view.judged_pods:
        if pod.problem is not None:
            return Problem(pod.problem.reason, f"pod {pod.name}: {problem_message(view, pod.problem)}")
    return None


def problem_message(view: ServiceView, problem: Problem) -> str:
    """The message of a pod's problem, with what is known of the resource and not in the pod: the Secret that a fetch
    lacks, the claim that is mounted, or the value of the chart that names an image which the manifest does not."""
    message, engine, images = problem.message or problem.reason, view.service.spec.engine, view.plan.images
    if problem.reason not in _IMAGE_REASONS:
        return message + _named(view.service.spec.model, message)
    is_fetchers = images.fetch != (engine.image or images.engine) and images.fetch in message
    if engine.image and not is_fetchers:
        return message
    value = default_image_value("argosy" if is_fetchers else engine.type)
    return f"{message}; the manifest does not name this image: it is {value} of the Helm chart"


def _named(model: Model, message: str) -> str:
    """What a message of a fetch or an engine means by a path or a field; empty if it names none."""
    if model.secret_ref is not None and "spec.model.secretRef" in message:
        return f"; spec.model.secretRef names {model.secret_ref.name}"
    claim = claim_name(model.source)
    if claim is not None and MODEL_MOUNT in message:
        return (
            f"; {MODEL_MOUNT} is the root of the PersistentVolumeClaim {claim}, which spec.model.source names"
        )
    return ""


def failed_pod(view: ServiceView) -> Problem | None:
    """The newest pod of the planned revision that failed for good (evicted, say), while its replacement is not ready:
    the same may happen to that one. Pods that are deleted end as they should."""
    if view.counts.ready >= view.counts.desired:
        return None
    failed = [
        pod
        for pod in view.observed.pods
        if pod.is_finished
        and not pod.is_terminating
        and pod.problem is not None
        and pod.revision == view.plan.revision
    ]
    if not failed:
        return None
    pod = max(failed, key=lambda pod: (pod.created, pod.name))
    assert pod.problem is not None
    message = pod.problem.message or pod.problem.reason
    if pod.problem.reason == "Evicted" and f'"{MODELS_VOLUME}" exceeds the limit' in message:
        message = message.rstrip(". ") + _SIZE_LIMIT_REMEDY
    return Problem(pod.problem.reason, f"pod {pod.name}: {message}")


def lost_node(view: ServiceView) -> Problem | None:
    for pod in sorted(view.observed.pods, key=lambda pod: pod.name):
        if pod.is_alive and pod.is_lost:
            return Problem("NodeLost", f"pod {pod.name}: node {pod.node} does not answer")
    return None


def unschedulable(view: ServiceView) -> Problem | None:
    for pod in view.judged_pods:
        if pod.gate_words:
            return Problem("SchedulingGated", f"pod {pod.name}: {pod.gate_words}")
        if pod.unschedulable:
            reason = "ClaimNotFound" if _lacks_claim(pod) else "Unschedulable"
            return Problem(reason, f"pod {pod.name}: {pod.unschedulable}")
    return None


def missing_claim(name: str) -> str:
    """The scheduler's words for a PersistentVolumeClaim of this name that does not exist."""
    return f'persistentvolumeclaim "{name}" not found'


def _lacks_claim(pod: Pod) -> bool:
    """Whether the scheduler misses a PersistentVolumeClaim: waiting alone does not change that."""
    return "persistentvolumeclaim" in pod.unschedulable and "not found" in pod.unschedulable


def unmounted(view: ServiceView) -> str:
    """The replica whose node has not prepared it for UNMOUNTED_SECONDS, and where Kubernetes says why; empty if none
    is."""
    for pod in view.judged_pods:
        if pod.unmounted_since and seconds_until_unmounted(pod, view.now) <= 0:
            remedy = ""
            cache = view.service.spec.model.cache
            if cache is not None and cache.type == "node":
                remedy = _NO_CACHE_REMEDY.format(node=pod.node)
            return (
                f"pod {pod.name}: its volumes are not mounted yet, or its network is not set up: "
                f"kubectl describe pod {pod.name}{remedy}"
            )
    return ""


def without_workers(view: ServiceView) -> str:
    """The replica that has an address and not all of its further nodes, and where Kubernetes says why; empty if there
    is none."""
    wanted = view.service.spec.parallelism.nodes - 1
    for pod in sorted(view.observed.pods, key=lambda pod: pod.name):
        is_waiting = pod.is_alive and not pod.is_up and pod.address and pod.revision == view.plan.revision
        present = sum(worker.is_alive for worker in pod.workers)
        if is_waiting and present < wanted:
            return (
                f"pod {pod.name}: {present} of its {wanted} workers exist: "
                f"kubectl describe statefulset -l {LEADER_LABEL}={pod.uid}"
            )
    return ""


def unmounted_pods(replicas: Iterable[Pod], now: str) -> frozenset[tuple[str, bool]]:
    """UIDs of the pods whose nodes have not prepared them, each with whether that takes UNMOUNTED_SECONDS or more."""
    return frozenset(
        (pod.uid, seconds_until_unmounted(pod, now) <= 0)
        for replica in replicas
        for pod in (replica, *replica.workers)
        if pod.is_alive and pod.unmounted_since
    )


def seconds_until_unmounted(pod: Pod, now: str) -> float:
    """Seconds until the status says that a pod's volumes are not mounted; 0 or less if it does now."""
    return UNMOUNTED_SECONDS - seconds_between(pod.unmounted_since, now)


def unschedulable_too_long(view: ServiceView) -> Problem | None:
    """A replica that no node has taken for UNSCHEDULABLE_SECONDS, or ever can. A rollout that waits for a GPU does not
    count: it has a deadline of its own."""
    if view.plan.rollout.phase in ("in-place", "waiting-for-capacity", "waiting-for-node"):
        return None
    left = [seconds_until_degraded(pod, view.now) for pod in view.judged_pods if pod.unschedulable]
    return unschedulable(view) if left and min(left) <= 0 else None


def unready_too_long(view: ServiceView) -> str:
    """The replica that has not been ready for as long as a rollout may go without progress, which Kubernetes watches
    during rollouts only; empty if there is none."""
    deadline = view.service.spec.rollout.progress_deadline_seconds
    for pod in view.judged_pods:
        if pod.unready_since and seconds_until_unready_too_long(pod, view.now, deadline) <= 0:
            return f"pod {pod.name} has not been ready for {deadline} s"
    return ""


def seconds_until_unready_too_long(pod: Pod, now: str, deadline: int) -> float:
    """Seconds until a replica has not been ready for `deadline` seconds; 0 or less if it has, or is ready."""
    return deadline - seconds_between(pod.unready_since, now) if pod.unready_since else 0.0


def seconds_until_degraded(pod: Pod, now: str) -> float:
    """Seconds until a pod that cannot be scheduled makes its service degraded; 0 or less if it does now."""
    if _lacks_claim(pod):
        return 0.0
    return UNSCHEDULABLE_SECONDS - seconds_between(pod.unschedulable_since, now)


def scaling_status(
    service: InferenceService,
    decision: ScalingDecision | None,
    gates: Iterable[GateChange],
    now: str,
    scalers: Scalers,
) -> ScalingStatus | None:
    """The status of a service whose spec.replicas is the number that was decided; None without spec.scaling.

    Args:
        gates: the readiness gates that change now. One that opens for the first time shows how long a replica takes.
        now: RFC 3339.
        scalers: what decides instead.
    """
    if service.spec.scaling is None:
        return None
    if scalers.decide:
        told = f"{_named_scalers(scalers)} decides"
        decision = ScalingDecision(service.spec.replicas, SCALED_ELSEWHERE, told)
    before = service.status.scaling or ScalingStatus()
    wanted = service.spec.replicas
    cold_start = max(
        (
            _seconds_between(gate.pod.created, now)
            for gate in gates
            if gate.status == "True" and not gate.pod.gate
        ),
        default=before.cold_start_seconds,
    )
    is_elsewhere = decision is not None and decision.reason == SCALED_ELSEWHERE
    if before.time and before.wanted == wanted and is_elsewhere == (before.reason == SCALED_ELSEWHERE):
        reason, message, time = before.reason, before.message, before.time
    else:
        reason = decision.reason if decision is not None else "Initial"
        message, time = decision.message if decision is not None else "", now
    return ScalingStatus(
        wanted=wanted, reason=reason, message=message, time=time, cold_start_seconds=cold_start
    )


def scaling_problem(service: InferenceService, scalers: Scalers, now: str) -> Problem | None:
    """Why spec.replicas or spec.scaling does not do what it says at `now` (RFC 3339); None if it does."""
    scaling = service.spec.scaling
    if scalers.of_deployment:
        name = service.metadata.name
        message = (
            f"HorizontalPodAutoscaler {listed(scalers.of_deployment)} scales the Deployment {deployment_name(name)}, "
            "whose number of replicas the operator writes: each undoes what the other does. Let scaleTargetRef be "
            f"apiVersion: {API_VERSION}, kind: {KIND}, name: {name} (of KEDA's in the ScaledObject), or remove it"
        )
        return Problem("DeploymentScaled", message)
    if scaling is None:
        return None
    if scalers.names:
        who = (
            "decides the number of replicas, and spec.scaling waits"
            if scalers.decide
            else "has chosen no number of replicas yet, and spec.scaling decides until then"
        )
        message = (
            f"{_named_scalers(scalers)} {who}: remove spec.scaling, or the "
            "HorizontalPodAutoscaler (KEDA's with its ScaledObject)"
        )
        return Problem("ScaledTwice", message)
    others = sorted(
        {entry.manager for entry in _foreign_writes(service, scalers) if _seconds_left(entry, now) > 0}
    )
    if others:
        message = (
            f"{', '.join(others)} writes spec.replicas through the scale subresource, and spec.scaling decides: remove "
            "one of the two; kubectl scale takes the field over from one that is gone"
        )
        return Problem("ScaledTwice", message)
    if unknown := unknown_time_zones(scaling):
        named = ", ".join(unknown)
        return Problem(
            "UnknownTimeZone", f"schedules in {named} are ignored: the operator has no such time zone"
        )
    return None


def router_problem(routers: Routers) -> Problem | None:
    """What keeps figures of some router from the operator; None if nothing does."""
    if not routers.unreachable:
        return None
    message = (
        f"router {listed(routers.unreachable)} runs and has not answered the operator for a minute: what "
        "it holds in queues does not count, fewer replicas follow from what replicas and other routers report, and "
        "neither does the service go to zero nor a canary on"
    )
    return Problem("RouterUnreachable", message)


def ignored_scale(service: InferenceService, scalers: Scalers, asked: int) -> str:
    """What is told of a `kubectl scale` that is the last edit and changes nothing, because spec.scaling decides; empty
    if there is none, or its edit was reported before.

    Args:
        asked: spec.replicas as it is stored; the service has the number that was decided.
    """
    wanted, metadata = service.spec.replicas, service.metadata
    is_reported = service.status.observed_generation == metadata.generation
    if service.spec.scaling is None or scalers.decide or is_reported or asked == wanted:
        return ""
    edits = [entry for entry in metadata.managed_fields if entry.subresource != "status"]
    newest = max((entry.time for entry in edits), default="")
    if not any(
        entry.subresource == "scale" and entry.manager.startswith(_INTERACTIVE) and entry.time == newest
        for entry in edits
    ):
        return ""
    return (
        f"spec.replicas is {asked}, which has no effect while spec.scaling is set: it has decided on {wanted}, between "
        "its minReplicas and maxReplicas; change these, or remove spec.scaling"
    )


def seconds_until_scaled_once(service: InferenceService, scalers: Scalers, now: str) -> float:
    """Seconds until the next foreign write of spec.replicas counts no more; 0 if there is none."""
    if service.spec.scaling is None:
        return 0.0
    left = [_seconds_left(entry, now) for entry in _foreign_writes(service, scalers)]
    return min((seconds for seconds in left if 0 < seconds < math.inf), default=0.0)


def _named_scalers(scalers: Scalers) -> str:
    if not scalers.names:
        return "a HorizontalPodAutoscaler"  # while it is not known which
    return f"HorizontalPodAutoscaler {listed(scalers.names)}"


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:_SHOWN])
    more = len(names) - _SHOWN
    return shown + (f" and {more} more" if more > 0 else "")


def _foreign_writes(service: InferenceService, scalers: Scalers) -> Iterator[ManagedFieldsEntry]:
    return (
        entry
        for entry in service.metadata.managed_fields
        if entry.subresource == "scale"
        and not entry.manager.startswith(_INTERACTIVE)
        and not (scalers.is_known and entry.manager in _AUTOSCALERS)
    )


def _seconds_left(entry: ManagedFieldsEntry, now: str) -> float:
    """For how long a foreign write still counts. The operator's number has replaced it at once; only an autoscaler,
    which is silent while its own metrics rest, writes again."""
    if entry.manager in _AUTOSCALERS or not entry.time:
        return math.inf
    return max(0.0, FOREIGN_WRITE_SECONDS - seconds_between(entry.time, now))


def _seconds_between(start: str, end: str) -> int:
    return min(MAX_COLD_START_SECONDS, max(0, round(seconds_between(start, end))))
