"""Reports on a service: patches its status, posts events, and looks again when time alone changes the report.

Owns the writes; what a status says is decided in `status`. Invariant: a status is written only if it differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from argosy_operator.cluster.api_server import Api
from argosy_operator.cluster.store import Store
from argosy_operator.config import OperatorConfig
from argosy_operator.desired.children import Plan
from argosy_operator.desired.readiness_gate import seconds_until_reopened
from argosy_operator.errors import ApiError
from argosy_operator.kinds import INFERENCE_SERVICES, Name, Object, object_name
from argosy_operator.observed.observation import Observation
from argosy_operator.observed.pod import Problem
from argosy_operator.reconcile.event_recorder import EventRecorder
from argosy_operator.reconcile.metrics import OperatorMetrics
from argosy_operator.status.events import Event, events_between, events_of_change
from argosy_operator.status.model_cached import seconds_until_stuck
from argosy_operator.status.replica_problems import (
    seconds_until_degraded,
    seconds_until_unmounted,
    seconds_until_unready_too_long,
)
from argosy_operator.status.report import invalid_status, status
from argosy_operator.status.scaling_status import ignored_scale, seconds_until_scaled_once
from argosy_resource.scaling_spec import ScalingStatus
from argosy_resource.types import Condition, InferenceService, ObjectMeta


class Reporter:
    """Reports on all services. `look_again(name, seconds)` has one reconciled later."""

    def __init__(
        self,
        api: Api,
        store: Store,
        config: OperatorConfig,
        *,
        metrics: OperatorMetrics,
        now: Callable[[], str],
        look_again: Callable[[Name, float], None],
    ) -> None:
        self._api = api
        self._store = store
        self._config = config
        self._metrics = metrics
        self._now = now
        self._look_again = look_again
        self._events = EventRecorder(api, now=now)

    async def report(
        self,
        service: InferenceService,
        observed: Observation,
        plan: Plan,
        failure: Problem | None,
        scaling: ScalingStatus | None = None,
        *,
        asked: int | None = None,
        contested: tuple[str, ...] = (),
    ) -> None:
        """Report the outcome of a reconcile: `observed` after it, `plan` as it was acted on, `asked` the stored
        spec.replicas, if the service has another number by spec.scaling, `contested` the children that are left as
        others change them.

        Raises:
            ApiError: the API server refused the status.
        """
        now, name = self._now(), (service.metadata.namespace, service.metadata.name)
        report = status(
            service,
            observed,
            plan,
            config=self._config,
            now=now,
            failure=failure,
            scaling=scaling,
            contested=contested,
        )
        if report != service.status:
            await self._patch(name, service.metadata.uid, msgspec.to_builtins(report))
            events = events_of_change(service.status, report)
            if asked is not None and (told := ignored_scale(service, observed.scalers, asked)):
                events.append(Event("Warning", "ScaleIgnored", told))
            await self._events.post(service.metadata, events)
        alive = [pod for pod in observed.pods if pod.is_alive]
        deadline = service.spec.rollout.progress_deadline_seconds
        waits = [seconds_until_degraded(pod, now) for pod in alive if pod.unschedulable]
        waits += [seconds_until_unmounted(pod, now) for pod in alive if pod.unmounted_since]
        waits += [seconds_until_reopened(pod, now) for pod in alive]
        waits += [seconds_until_stuck(pod, now, deadline) for pod in alive if not pod.is_up]
        waits += [seconds_until_unready_too_long(pod, now, deadline) for pod in alive]
        waits += [
            pod.seconds_until_overdue(now)
            for replica in observed.pods
            if replica.node_template
            for pod in (replica, *replica.workers)
            if pod.is_terminating
        ]
        waits.append(seconds_until_scaled_once(service, observed.scalers, now))
        waits += [plan.rollout.node_wait_s, plan.rollout.turn_left_s, plan.nudge_wait_s]
        if later := [seconds for seconds in waits if seconds > 0]:
            self._look_again(name, min(later))
        has_missed_its_turn = plan.rollout.waits_for and not observed.rolling_elsewhere
        if has_missed_its_turn and not service.spec.paused:
            self._look_again(name, 0.0)

    async def report_invalid(self, obj: Object, message: str) -> None:
        """Report that a resource cannot be read, and why."""
        report = invalid_status(obj, message, now=self._now())
        held = obj.get("status", {})
        if any(held.get(field) != value for field, value in report.items()):
            await self._patch(object_name(obj), obj["metadata"]["uid"], report)
            before, after = (
                msgspec.convert(each.get("conditions", ()), tuple[Condition, ...]) for each in (held, report)
            )
            namespace, name = object_name(obj)
            metadata = ObjectMeta(name=name, namespace=namespace, uid=obj["metadata"]["uid"])
            await self._events.post(metadata, events_between(before, after))

    async def _patch(self, name: Name, uid: str, report: dict[str, Any]) -> None:
        patch = {"metadata": {"uid": uid}, "status": report}
        self._metrics.writes.labels(INFERENCE_SERVICES.name, "patch-status").inc()
        try:
            stored = await self._api.patch_status(INFERENCE_SERVICES, *name, patch, strategic=False)
        except ApiError as error:
            if error.status not in (404, 409):  # deleted, or created again under the same name
                raise
        else:
            self._store.put(INFERENCE_SERVICES, stored)
