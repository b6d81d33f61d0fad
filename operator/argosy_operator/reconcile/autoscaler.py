"""Scales services by load: keeps each service's history, and has a service reconciled when its number changes.

Owns the histories, the last decisions, and from when on the number of a HorizontalPodAutoscaler counts instead. Must
not know how a number is decided (`desired.scaling`), nor write anything. Invariants: a history is lost with the
process, and a new one begins with windows that hold still; the number that a decision starts from is the Deployment's,
so that a restart of the operator changes nothing; a service that cannot be evaluated keeps its number, and holds up no
other one, since its figures are its tenant's to choose.

While spec.scaling decides, spec.replicas is not the number of replicas that there are, but an autoscaler takes it for
that: it leaves it as it is when the load is at its target, raises it to no more than the double at once, and so writes
numbers that it would not choose. Until a number counts spec.scaling goes on, so that some controller always decides;
once it counts it does until the last autoscaler is removed, also in a new operator, which reads it in status.scaling.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Final

import msgspec
from msgspec import Struct

from argosy_operator.cluster.store import Store
from argosy_operator.desired.scaling import ScalingDecision, ScalingHistory, decide
from argosy_operator.names import DEPLOYMENTS, INFERENCE_SERVICES, PODS, Name, Object, child_name, object_name
from argosy_operator.observation import Scalers, ServiceLoad, is_owned
from argosy_operator.pod import own_pods
from argosy_operator.status.problems import SCALED_ELSEWHERE
from argosy_resource.scaling import Scaling
from argosy_resource.types import InferenceService, parse

logger = logging.getLogger(__name__)

SERVICES_AT_ONCE: Final = 8
"""Services evaluated before others get the event loop."""
PODS_AS_A_SERVICE: Final = 64
"""So many pods of a service take as long as one more service."""


class _Scaled:
    """What is kept of one service."""

    def __init__(self, uid: str, now: float) -> None:
        self.uid = uid
        self.history = ScalingHistory(since=now)
        self.decision: ScalingDecision | None = None


class Autoscaler:
    """Decides the numbers of replicas of all services with `spec.scaling`."""

    def __init__(
        self,
        store: Store,
        *,
        loads: Callable[[], Mapping[str, ServiceLoad]],
        scalers: Callable[[Name], Scalers],
        now: Callable[[], float],
        wall: Callable[[], datetime.datetime],
        on_change: Callable[[Name], None],
    ) -> None:
        """`now` is a monotonic clock, `wall` the time with its zone."""
        self._store = store
        self._loads = loads
        self._scalers = scalers
        self._now = now
        self._wall = wall
        self._on_change = on_change
        self._scaled: dict[Name, _Scaled] = {}
        self._handovers = Handovers()
        self._parsed: dict[Name, tuple[Object, InferenceService]] = {}

    @property
    def is_needed(self) -> bool:
        return any(map(_has_scaling, self._store.all(INFERENCE_SERVICES)))

    @property
    def names(self) -> Set[Name]:
        """The services of which something is kept."""
        return self._scaled.keys() | self._parsed.keys() | self._handovers.names

    def evaluate_some(self, services: Set[str]) -> None:
        """Decide anew for the services (`namespace/name`), and announce those whose number changes."""
        loads = self._loads()
        for key in services:
            namespace, _, name = key.partition("/")
            obj = self._store.get(INFERENCE_SERVICES, namespace, name)
            if obj is not None and _is_scaled(obj):
                self._try(obj, loads)

    def evaluate(self) -> Iterator[None]:
        """Decide anew for every service, and announce those whose number changes. Yields every few
        (SERVICES_AT_ONCE)."""
        loads = self._loads()
        names: set[Name] = set()
        looked = 0
        for obj in self._store.all(INFERENCE_SERVICES):
            if _is_scaled(obj):
                name = object_name(obj)
                names.add(name)
                self._try(obj, loads)
                looked += 1 + self._store.count_children(PODS, name) // PODS_AS_A_SERVICE
                if looked >= SERVICES_AT_ONCE:
                    looked = 0
                    yield
        for gone in self.names - names:
            self._scaled.pop(gone, None)
            self._parsed.pop(gone, None)
            self._handovers.forget(gone)

    def forget(self) -> None:
        """Forget all decisions: another operator makes them now, and the Deployments have its numbers."""
        self._scaled.clear()
        self._parsed.clear()
        self._handovers.forget()

    def forget_one(self, name: Name) -> None:
        """Forget the decisions on one service: it is, or was, scaled by another."""
        self._scaled.pop(name, None)

    def scaled(self, service: InferenceService) -> InferenceService:
        """The service with the number of replicas that it should have now; itself without spec.scaling."""
        scaling = service.spec.scaling
        if scaling is None:
            return service
        decision, scalers = self.decision(service), self.scalers(service)
        if scalers.decide:
            wanted = service.spec.replicas
        elif decision is None:
            # An autoscaler that nobody has asked for may have chosen a number beyond the bounds.
            is_clamped = scalers.was_asked or self._present(service) is None
            wanted = self._current(service, scaling, is_clamped=is_clamped)
        else:
            wanted = decision.wanted
        if service.status.rollout is not None:
            # A Deployment that is paused for a canary could come back from zero with either revision.
            wanted = max(1, wanted)
        return msgspec.structs.replace(service, spec=msgspec.structs.replace(service.spec, replicas=wanted))

    def scalers(self, service: InferenceService) -> Scalers:
        """What else scales a service as its spec is stored, and whether that decides now."""
        scalers = self._scalers((service.metadata.namespace, service.metadata.name))
        if service.spec.scaling is None:
            return scalers
        decide = self._handovers.is_over(service, scalers, self._present(service))
        return msgspec.structs.replace(scalers, decide=decide)

    def decision(self, service: InferenceService) -> ScalingDecision | None:
        """The last decision on a service; None before the first."""
        kept = self._scaled.get((service.metadata.namespace, service.metadata.name))
        return None if kept is None or kept.uid != service.metadata.uid else kept.decision

    def _try(self, obj: Object, loads: Mapping[str, ServiceLoad]) -> None:
        try:
            self._evaluate(obj, loads)
        except Exception:  # a defect that one service shows must not stop the scaling of the others
            logger.exception("%s/%s: scaling failed", *object_name(obj))

    def _evaluate(self, obj: Object, loads: Mapping[str, ServiceLoad]) -> None:
        name, now = object_name(obj), self._now()
        service = self._read(name, obj)
        if service is None or service.spec.scaling is None or service.spec.paused:
            self._scaled.pop(name, None)
            return
        scalers = self.scalers(service)
        if scalers.decide or not scalers.was_asked:
            self._scaled.pop(name, None)
            return
        kept = self._scaled.get(name)
        if kept is None or kept.uid != service.metadata.uid:
            kept = self._scaled[name] = _Scaled(service.metadata.uid, now)
        current = (
            kept.decision.wanted
            if kept.decision is not None
            else self._current(service, service.spec.scaling, is_clamped=False)
        )
        pods = own_pods(service, self._store.children(PODS, name))
        before = kept.decision
        kept.decision, kept.history = decide(
            service.spec.scaling,
            load=loads.get(service.key),
            current=current,
            serving=frozenset(pod.uid for pod in pods if pod.is_routable),
            history=kept.history,
            now=now,
            wall=self._wall(),
            start_deadline=service.spec.rollout.progress_deadline_seconds,
        )
        if kept.decision.wanted != (before.wanted if before is not None else self._present(service)):
            self._on_change(name)

    def _read(self, name: Name, obj: Object) -> InferenceService | None:
        cached = self._parsed.get(name)
        if cached is not None and cached[0] is obj:
            return cached[1]
        try:
            service = parse(obj)
        except msgspec.ValidationError:
            return None  # its status says so
        self._parsed[name] = (obj, service)
        return service

    def _current(self, service: InferenceService, scaling: Scaling, *, is_clamped: bool = True) -> int:
        """The number before the first decision: the Deployment's, or that of the spec for a new service."""
        present = self._present(service)
        number = service.spec.replicas if present is None else present
        return min(max(number, scaling.min_replicas), scaling.max_replicas) if is_clamped else number

    def _present(self, service: InferenceService) -> int | None:
        live = self._store.get(DEPLOYMENTS, service.metadata.namespace, child_name(service))
        if live is None or not is_owned(live, service):
            return None
        replicas: int = live["spec"].get("replicas", 1)
        return replicas


def _has_scaling(obj: Object) -> bool:
    return bool((obj.get("spec") or {}).get("scaling"))


def _is_scaled(obj: Object) -> bool:
    return _has_scaling(obj) and not obj["metadata"].get("deletionTimestamp")


class _Kept(Struct):
    uid: str
    replicas: int | None = None
    """spec.replicas before the autoscaler came, or the last that was not zero; None if not seen."""
    is_over: bool = False
    """Whether the autoscaler's number counts."""


class Handovers:
    """The handovers of all services."""

    def __init__(self) -> None:
        self._kept: dict[Name, _Kept] = {}

    @property
    def names(self) -> Set[Name]:
        """The services of which something is kept."""
        return self._kept.keys()

    def forget(self, name: Name | None = None) -> None:
        """Forget a service; all if None."""
        if name is None:
            self._kept.clear()
        else:
            self._kept.pop(name, None)

    def is_over(self, service: InferenceService, scalers: Scalers, present: int | None) -> bool:
        """Whether spec.replicas counts. `present` is the number of the Deployment, None without one."""
        name = (service.metadata.namespace, service.metadata.name)
        kept = self._kept.get(name)
        if kept is None or kept.uid != service.metadata.uid:
            kept = self._kept[name] = _Kept(service.metadata.uid)
        if not scalers.names:
            # What is not known for the moment goes on.
            kept.is_over = not scalers.is_known and (kept.is_over or _was_over(service))
            kept.replicas = service.spec.replicas
        elif not kept.is_over:
            kept.is_over = _begins_to_count(service, scalers, present, kept.replicas)
            if service.spec.replicas:
                kept.replicas = service.spec.replicas
        return kept.is_over


def _was_over(service: InferenceService) -> bool:
    """Whether the operator before this one let the number count."""
    status = service.status.scaling
    return status is not None and status.reason == SCALED_ELSEWHERE


def _begins_to_count(
    service: InferenceService, scalers: Scalers, present: int | None, before: int | None
) -> bool:
    wanted = service.spec.replicas
    if _was_over(service) or scalers.have_chosen:
        return True
    if wanted == 0:
        # KEDA writes zero, and wakes the service. Any other autoscaler stops at a zero, which was somebody else's; a
        # zero that was there before is only a number to start with.
        return scalers.are_kedas and before != 0
    loses_none = present is None or wanted >= present
    return loses_none and scalers.are_active
