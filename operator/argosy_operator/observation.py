"""One observation of a service: what every decision, and the status, is made on.

Owns the value, and the reading of its parts: the load and the figures of a canary that routers report, merged; the
HorizontalPodAutoscalers that scale the service; the state of a rollout in its Deployment. Pods are read in `pod`. Must
not decide anything, nor know how its contents are asked for. Invariants: an observation does not change while it is
acted on; of a canary only counts of the asked revision at the asked weight count, so that a figure never mixes two
steps; what a router does not report is no data.

Field managers cannot tell of autoscalers: a write through a CustomResourceDefinition's scale subresource leaves no
entry in managedFields on Kubernetes 1.36. KEDA makes a HorizontalPodAutoscaler for each ScaledObject, and keeps it at
zero replicas.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from argosy_operator.names import (
    BUDGETS,
    DEPLOYMENTS,
    HELD_ANNOTATION,
    REVISION_LABEL,
    SERVICES,
    STATEFUL_SETS,
    TURN_ANNOTATION,
    Kind,
    Name,
    Object,
    annotations_of,
    controller_of,
    deployment_name,
    may_be_deployment,
)
from argosy_operator.pod import Pod
from argosy_protocol.reports import (
    SIDE_BOUNDS_S,
    TTFT_BOUNDS_S,
    TTFT_WINDOW_S,
    LoadReport,
    ModelProgress,
    ReplicaLoadReport,
    RolloutReport,
    ServiceLoadReport,
    SideReport,
)
from argosy_resource.engine_command import SERVICE_LABEL
from argosy_resource.fleet_document import LostName
from argosy_resource.types import GROUP, KIND, InferenceService

CHILD_KINDS: Final = (SERVICES, BUDGETS, DEPLOYMENTS, STATEFUL_SETS)
"""Kinds of the children that are watched. A Secret, the other child, is never read."""
QUANTILE: Final = 0.9
_MOST: Final = 10**9
"""Of sequences or tokens at one replica, and of the value of its cache."""
_MOST_COUNTED: Final = 2**45
"""Of a count, whatever routers report: a float has the sum of all buckets exactly."""
_DEPLOYMENT: Final = "Deployment/"
_MAX_NAME: Final = 253
"""Characters of an object's name. The API server does not bound that of a target, which is kept."""

TurnState = Literal["", "failed", "blocked"]
"""What became of a turn that has not ended within its deadline: the change does not work in this service, or the
cluster has no room for it. Empty before that."""


class ReplicaUse(Struct, frozen=True, kw_only=True):
    """One replica's load."""

    is_routable: bool = False
    """Whether some router would send it a request."""
    sequences: int = 0
    """Sequences that it computes or that wait there."""
    queued_tokens: int = 0
    kv_usage: float = 0.0
    cache_value: float = 0.0
    """Prompt tokens per second that its cache saves and no other would."""


class ServiceLoad(Struct, frozen=True, kw_only=True):
    """One service's load."""

    is_complete: bool = True
    """Whether every router has reported of late. If not, the load is a lower bound."""
    is_settled: bool = False
    """Whether every router has, but for those that have been silent for so long that nobody waits for them. What they
    hold in queues is missing, and how long ago they had a request; what they send is in the replicas' own figures, as
    far as these tell how much they compute."""
    held: int = 0
    """Requests that wait for a first replica."""
    queued: int = 0
    """Requests in the routers' queues, those held included."""
    queued_tokens: int = 0
    """Tokens that these are expected to cost."""
    idle_s: float = 0.0
    """Seconds without any request."""
    ttft_p90_s: float | None = None
    """Of the last minute; None if no answer began."""
    answers: int = 0
    """Streamed answers that began within the last minute."""
    is_window_covered: bool = True
    """Whether every router has run for that minute. A router that has just started knows of no earlier answer."""
    replicas: Mapping[str, ReplicaUse] = {}
    """By UID of the pod."""
    rollouts: tuple[RolloutReport | None, ...] = ()
    """What each router reports of a canary rollout; None from one that does not divide the service."""

    @property
    def sequences(self) -> int:
        """Sequences at replicas, and requests in the queues."""
        return self.queued + sum(each.sequences for each in self.replicas.values())

    @property
    def tokens(self) -> int:
        """Tokens that wait, at replicas and in the queues."""
        return self.queued_tokens + sum(each.queued_tokens for each in self.replicas.values())

    @property
    def routable(self) -> int:
        return sum(each.is_routable for each in self.replicas.values())


class FleetLoad(Mapping[str, ServiceLoad]):
    """The last reports of all routers, by `namespace/name` of the service. A service's are merged when it is first
    asked for: most reconciles ask for one."""

    def __init__(self, reports: Iterable[LoadReport], *, is_complete: bool, is_settled: bool = False) -> None:
        self._is_complete, self._is_settled, self._is_window_covered = is_complete, is_settled, True
        self._reports: dict[str, list[ServiceLoadReport]] = {}
        self._merged: dict[str, ServiceLoad] = {}
        for report in reports:
            if report.uptime_s is not None and report.uptime_s < TTFT_WINDOW_S:
                self._is_window_covered = False
            for service in report.services:
                self._reports.setdefault(service.service, []).append(service)

    def __getitem__(self, service: str) -> ServiceLoad:
        if (known := self._merged.get(service)) is not None:
            return known
        merged = self._merged[service] = _merged(
            self._reports[service],
            is_complete=self._is_complete,
            is_settled=self._is_settled,
            is_window_covered=self._is_window_covered,
        )
        return merged

    def __iter__(self) -> Iterator[str]:
        return iter(self._reports)

    def __len__(self) -> int:
        return len(self._reports)


def _merged(
    reports: list[ServiceLoadReport], *, is_complete: bool, is_settled: bool, is_window_covered: bool
) -> ServiceLoad:
    by_uid: dict[str, list[ReplicaLoadReport]] = {}
    for report in reports:
        for replica in report.replicas:
            by_uid.setdefault(replica.uid or replica.name, []).append(replica)
    counts = [report.ttft_counts for report in reports if len(report.ttft_counts) == len(TTFT_BOUNDS_S) + 1]
    answers = [sum(column) for column in zip(*counts, strict=True)]
    return ServiceLoad(
        is_complete=is_complete,
        is_settled=is_settled,
        held=sum(report.held for report in reports),
        queued=sum(report.queued for report in reports),
        queued_tokens=sum(report.queued_tokens for report in reports),
        idle_s=min(report.idle_s for report in reports),
        ttft_p90_s=quantile(answers, QUANTILE),
        answers=sum(answers),
        is_window_covered=is_window_covered,
        replicas={uid: _replica(each) for uid, each in by_uid.items()},
        rollouts=tuple(report.rollout for report in reports),
    )


def _replica(reports: list[ReplicaLoadReport]) -> ReplicaUse:
    return ReplicaUse(
        is_routable=any(each.routable for each in reports),
        sequences=_bounded(
            max(max(each.requests for each in reports), sum(each.inflight for each in reports))
        ),
        queued_tokens=_bounded(max(each.queued_tokens for each in reports)),
        kv_usage=min(1.0, max(0.0, *(each.kv_usage for each in reports))),
        cache_value=float(min(_MOST, sum(each.cache_value for each in reports))),
    )


def _bounded(count: int) -> int:
    return min(_MOST, max(0, count))


def quantile(counts: Sequence[int], share: float, bounds: Sequence[float] = TTFT_BOUNDS_S) -> float | None:
    """The time to first token (or another one that is counted by `bounds`) below which `share` of the counts are,
    interpolated within its bucket; None if there are none. Beyond the last bound, that bound."""
    below = list(accumulate(counts))
    if not below or not below[-1]:
        return None
    rank = share * below[-1]
    number = bisect_left(below, rank)
    if number >= len(bounds):
        return bounds[-1]
    low = bounds[number - 1] if number else 0.0
    return low + (bounds[number] - low) * (rank - below[number] + counts[number]) / counts[number]


class Figures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One side's figures. Counts of latencies are by the buckets of SIDE_BOUNDS_S; empty without any."""

    attempts: int = 0
    failures: int = 0
    client_errors: int = 0
    streams: int = 0
    """Streamed attempts whose time to first token counts."""
    ttft_p90_s: float | None = None
    ttft: tuple[int, ...] = ()
    itl: tuple[int, ...] = ()
    """Streamed answers by the mean time between their tokens."""
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    sampled: int = 0
    """Answers of whose prompts one token was drawn."""
    sampled_cached: int = 0
    """Those whose token was cached."""
    expected: int = 0
    """Answers of which one token was drawn that was expected to be cached."""
    expected_cached: int = 0

    @property
    def error_rate(self) -> float | None:
        return self.failures / self.attempts if self.attempts else None

    @property
    def client_error_rate(self) -> float | None:
        return self.client_errors / self.attempts if self.attempts else None

    @property
    def itl_p90_s(self) -> float | None:
        return quantile(self.itl, QUANTILE, SIDE_BOUNDS_S)

    @property
    def cached_share(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def hit_ratio(self) -> float | None:
        """Cached tokens, divided by those that were expected; None if none were."""
        return self.cached_tokens / self.predicted_tokens if self.predicted_tokens else None


class SplitFigures(Struct, frozen=True, kw_only=True):
    """Both sides' figures."""

    is_complete: bool = False
    """Whether every router has reported of late, and divides the service as asked."""
    is_detailed: bool = True
    """Whether every router counts all that SideReport has. Those of the previous release do not, and what they leave
    out is not zero."""
    routers: int = 1
    """Number of routers whose counts are in the figures."""
    stable: Figures = Figures()
    """Of the last window."""
    canary: Figures = Figures()
    stable_total: Figures = Figures()
    """Since the service is divided by this weight, as far as routers have counted that."""
    canary_total: Figures = Figures()


def split_figures(load: ServiceLoad | None, revision: str, weight: int) -> SplitFigures:
    """The figures of the canary `revision` at this weight."""
    if load is None:
        return SplitFigures()
    counted = [
        each
        for each in load.rollouts
        if each is not None and each.canary_revision == revision and each.weight == weight
    ]
    return SplitFigures(
        is_complete=load.is_complete and len(counted) == len(load.rollouts) > 0,
        is_detailed=all(each.canary_total is not None for each in counted),
        routers=max(1, len(counted)),
        stable=_figures(each.stable for each in counted),
        canary=_figures(each.canary for each in counted),
        stable_total=_figures(each.stable_total for each in counted if each.stable_total is not None),
        canary_total=_figures(each.canary_total for each in counted if each.canary_total is not None),
    )


def bucket_of(counts: Sequence[int], share: float) -> int:
    """Index of the bucket that has the quantile `share`; there is a count."""
    below = list(accumulate(counts))
    return bisect_left(below, share * below[-1])


def bucket_at(seconds: float) -> int:
    """Index of the first bucket of SIDE_BOUNDS_S whose upper bound is at least so large."""
    return bisect_left(SIDE_BOUNDS_S, seconds)


def _figures(reports: Iterable[SideReport]) -> Figures:
    reports = list(reports)
    coarse = _sum_of_columns([each.ttft_counts for each in reports], len(TTFT_BOUNDS_S) + 1)
    ttft = _sum_of_columns([each.ttft for each in reports], len(SIDE_BOUNDS_S) + 1)
    is_fine = sum(ttft) >= sum(coarse)  # otherwise some router knows the other bounds only
    return Figures(
        attempts=_sum(each.attempts for each in reports),
        failures=_sum(each.failures for each in reports),
        client_errors=_sum(each.client_errors for each in reports),
        streams=max(sum(coarse), sum(ttft)),
        ttft_p90_s=quantile(ttft, QUANTILE, SIDE_BOUNDS_S) if is_fine else quantile(coarse, QUANTILE),
        ttft=ttft,
        itl=_sum_of_columns([each.itl for each in reports], len(SIDE_BOUNDS_S) + 1),
        prompt_tokens=_sum(each.prompt_tokens for each in reports),
        predicted_tokens=_sum(each.predicted_tokens for each in reports),
        cached_tokens=_sum(each.cached_tokens for each in reports),
        sampled=_sum(each.sampled for each in reports),
        sampled_cached=_sum(each.sampled_cached for each in reports),
        expected=_sum(each.expected for each in reports),
        expected_cached=_sum(each.expected_cached for each in reports),
    )


def _sum_of_columns(counts: list[tuple[int, ...]], length: int) -> tuple[int, ...]:
    """The sums by bucket of those that have so many; empty if none has."""
    return tuple(
        _sum(column) for column in zip(*(each for each in counts if len(each) == length), strict=True)
    )


def _sum(counts: Iterable[int]) -> int:
    return min(_MOST_COUNTED, sum(counts))


class Scaler(Struct, frozen=True, kw_only=True):
    """A HorizontalPodAutoscaler whose target is an InferenceService, or could be the Deployment of one."""

    name: str
    service: Name
    """What stands for the target: the service, or the `deployment_target`."""
    is_active: bool = False
    """Whether it has the metrics to decide."""
    has_chosen: bool = False
    """Whether the number in spec.replicas is one that it has chosen by its metrics."""
    is_kedas: bool = False
    """Whether KEDA has made it for a ScaledObject."""

    @property
    def key(self) -> Name:
        return self.service[0], self.name


class Scalers(Struct, frozen=True, kw_only=True):
    """The HorizontalPodAutoscalers of one service."""

    was_asked: bool = True
    """Whether the API server has been asked for them, whatever it answered."""
    is_known: bool = False
    """Whether the API server lists them."""
    names: tuple[str, ...] = ()
    """Sorted; empty if there is none, or if that is not known."""
    are_active: bool = False
    """Whether one of them has the metrics to decide."""
    have_chosen: bool = False
    """Whether one of them has chosen the number in spec.replicas by its metrics."""
    are_kedas: bool = False
    """Whether one of them is KEDA's, which writes zero itself."""
    of_deployment: tuple[str, ...] = ()
    """Sorted names of those whose target is the service's Deployment, whose number the operator writes."""
    decide: bool = False
    """Whether spec.replicas is the number of replicas, and spec.scaling waits."""


def summarize(scalers: Iterable[Scaler], *, is_known: bool) -> Scalers:
    """What matters of the autoscalers of one service."""
    found = list(scalers)
    return Scalers(
        is_known=is_known,
        names=tuple(sorted(each.name for each in found)),
        are_active=any(each.is_active for each in found),
        have_chosen=any(each.has_chosen for each in found),
        are_kedas=any(each.is_kedas for each in found),
    )


def deployment_target(namespace: str, deployment: str) -> Name:
    """What stands for a Deployment where services are named, none of which has this name."""
    return namespace, f"{_DEPLOYMENT}{deployment}"


def target_deployment(target: Name) -> Name | None:
    """The Deployment that a `deployment_target` stands for; None if it is a service."""
    namespace, name = target
    return (namespace, name.removeprefix(_DEPLOYMENT)) if name.startswith(_DEPLOYMENT) else None


def read_scaler(obj: Mapping[str, Any]) -> Scaler | None:
    """Read a HorizontalPodAutoscaler; None if it scales something else."""
    metadata, target = obj["metadata"], obj.get("spec", {}).get("scaleTargetRef", {})
    name, namespace = target.get("name", ""), metadata.get("namespace", "")
    if len(name) > _MAX_NAME:
        return None
    group, kind = target.get("apiVersion", "").partition("/")[0], target.get("kind")
    if (group, kind) == ("apps", "Deployment") and may_be_deployment(name):
        return Scaler(name=metadata["name"], service=deployment_target(namespace, name))
    if (group, kind) != (GROUP, KIND):
        return None
    status = obj.get("status", {})
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    is_active = conditions.get("ScalingActive", {}).get("status") == "True"
    return Scaler(
        name=metadata["name"],
        service=(namespace, name),
        is_active=is_active,
        has_chosen=_has_chosen(conditions, is_active=is_active),
        is_kedas=any(owner.get("kind") == "ScaledObject" for owner in metadata.get("ownerReferences") or ()),
    )


def _has_chosen(conditions: Mapping[str, Mapping[str, Any]], *, is_active: bool) -> bool:
    """Read the conditions as the controller of Kubernetes 1.36 writes them (pkg/controller/podautoscaler).

    Any condition means that it has looked at the service, no more. SucceededRescale stands beside the number that it
    has just written; without metrics that was a bound, and ScaleUpLimit says that it wants more. ScalingLimited comes
    with the first number it computes, so ScalingDisabled after it means that somebody wrote zero since.
    """
    reasons = {name: each.get("reason", "") for name, each in conditions.items()}
    if reasons.get("ScalingActive") == "ScalingDisabled":
        return "ScalingLimited" in reasons
    has_written = reasons.get("AbleToScale") == "SucceededRescale"
    return is_active and has_written and reasons.get("ScalingLimited") != "ScaleUpLimit"


class Routers(Struct, frozen=True, kw_only=True):
    """The last reports of the routers, merged."""

    known: bool = False
    """Whether the routers have been asked at all since the operator started."""
    alive: int = 0
    """Number of routers that answer."""
    routable: frozenset[str] = frozenset()
    """UIDs of pods to which at least one router sends requests."""
    unreachable: tuple[str, ...] = ()
    """Sorted names of the pods of routers that run and have not answered for a minute."""
    unsent: frozenset[str] = frozenset()
    """Services (`namespace/name`) with replicas that routers know and have sent no requests to for a minute, to none of
    them. Those that are silent do not count, and may do so."""
    draining: frozenset[str] = frozenset()
    """UIDs of pods that a router reports as draining, and to which none sends requests."""


class Observation(Struct, frozen=True, kw_only=True):
    """Everything, besides the resource, that a decision and the status may depend on."""

    deployment: Object | None = None
    """The Deployment that the service controls."""
    children: Mapping[tuple[Kind, Name], Object] = {}
    """Live objects of CHILD_KINDS that carry the service's label or the name of one of its children, whoever
    controls them."""
    pods: tuple[Pod, ...] = ()
    """The replicas. Pods that are further nodes of one are in its `workers`."""
    routers: Routers = Routers()
    fetches: Mapping[str, ModelProgress] = {}
    """The last report of each model fetch that runs, by UID of its pod."""
    unpolled_fetches: frozenset[str] = frozenset()
    """UIDs of the pods whose model fetch runs and was not asked yet since the operator, or the fetch, started."""
    lost_names: tuple[LostName, ...] = ()
    """Names that the service claims and does not have."""
    rolling_elsewhere: str = ""
    """Another service (`namespace/name`) that a change of the operator's is being rolled out to; empty if none."""
    lacks_canary: bool = False
    """Whether the service names a canary that does not exist."""
    published_canary: str = ""
    """The canary revision by which the fleet document divides the service; empty if it does not."""
    load: ServiceLoad | None = None
    """What the routers report of the service while it may have a canary; None if none has reported, or nobody asks."""
    scalers: Scalers = Scalers()
    """The HorizontalPodAutoscalers of a service with spec.scaling."""
    began: str = ""
    """When this operator began to lead, by its own clock (RFC 3339); empty if that is not known."""
    time: str = ""
    """When it was taken (RFC 3339). What waits for time alone is decided by it."""

    @property
    def without_canary(self) -> Observation:
        """The observation without the pods of a canary rollout's own Deployment."""
        if not any(pod.is_canary for pod in self.pods):
            return self
        return msgspec.structs.replace(self, pods=tuple(pod for pod in self.pods if not pod.is_canary))


def is_owned(obj: Object, service: InferenceService) -> bool:
    return controller_uid(obj) == service.metadata.uid


def controller_uid(obj: Mapping[str, Any]) -> str | None:
    """UID of the object that controls this one; None if none does."""
    return controller_of(obj).get("uid")


class Turn(Struct, frozen=True):
    """A service's turn in the staged rollout of the operator's own changes, as an annotation of its Deployment."""

    since: str
    """When the service got it (RFC 3339). Empty if that is not known: an earlier state of the operator wrote `true`."""
    state: TurnState = ""

    @property
    def text(self) -> str:
        return f"{self.since} {self.state}".rstrip()


def template_revision(deployment: Object) -> str:
    """The revision of the Deployment's pod template; empty if it has none."""
    revision: str = deployment["spec"]["template"]["metadata"].get("labels", {}).get(REVISION_LABEL, "")
    return revision


def container_image(deployment: Object, name: str) -> str:
    """Image of a container, or init container, of the Deployment's pod template; empty if it has none of this name."""
    spec = deployment["spec"]["template"].get("spec", {})
    containers = (*spec.get("containers", ()), *spec.get("initContainers", ()))
    return next((container.get("image", "") for container in containers if container["name"] == name), "")


def serving_revision(deployment: Object) -> str:
    """The revision that a Deployment's pods should have now: its template's, unless that waits for its turn."""
    annotations = annotations_of(deployment)
    return annotations.get(HELD_ANNOTATION) or template_revision(deployment)


def has_the_turn(deployment: Object | None) -> bool:
    """Whether the operator's own change is being rolled out to this Deployment's service."""
    return TURN_ANNOTATION in annotations_of(deployment)


def serves(deployment: Object) -> bool:
    """Whether it is the Deployment of a service, and a replica of it is ready. The count of these is not a tenant's to
    choose: each costs a replica that runs, while labels and numbers of replicas cost nothing."""
    metadata = deployment["metadata"]
    service = metadata.get("labels", {}).get(SERVICE_LABEL)
    ready = deployment.get("status", {}).get("readyReplicas") or 0
    return bool(service) and metadata["name"] == deployment_name(service) and ready > 0


def read_turn(deployment: Object | None) -> Turn | None:
    """The turn that the Deployment says its service has; None if it has none."""
    if deployment is None or not has_the_turn(deployment):
        return None
    since, _, state = deployment["metadata"]["annotations"][TURN_ANNOTATION].partition(" ")
    return Turn(since if since[:1].isdigit() else "", state if state in ("failed", "blocked") else "")


def deployment_condition(deployment: Object | None, kind: str) -> Object:
    """The Deployment's condition of this type; empty if it has none."""
    found = (deployment or {}).get("status", {}).get("conditions", ())
    return next((each for each in found if each["type"] == kind), {})


def rolling_update(deployment: Object) -> dict[str, int]:
    """maxSurge and maxUnavailable of the Deployment, as far as it has them."""
    found: dict[str, int] = deployment["spec"].get("strategy", {}).get("rollingUpdate", {})
    return found
