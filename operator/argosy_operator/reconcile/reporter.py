"""Reports on a service: patches its status, posts events, and looks again when time alone changes the report.

Owns the writes, the rate of events and the counting of equal ones; what a status says, and what is worth an event, is
decided in `status`. Invariants: a status is written only if it differs; an event never fails or delays a reconcile by
more than one request; equal events are one object that counts; a service that flaps posts at most EVENT_BURST events,
and one per EVENT_REFILL_SECONDS after that (as client-go's spam filter does); what is normal, such as scaling with a
load that comes and goes, leaves EVENT_RESERVE of them to warnings.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import msgspec
import xxhash
from msgspec import Struct

from argosy_operator.cluster.api import Api, ApiError
from argosy_operator.cluster.store import Store
from argosy_operator.config import OperatorConfig
from argosy_operator.desired.children import Plan
from argosy_operator.desired.diff import seconds_until_reopened
from argosy_operator.names import FIELD_MANAGER, INFERENCE_SERVICES, Name, Object, object_name
from argosy_operator.observation import Observation
from argosy_operator.pod import Problem
from argosy_operator.reconcile.child_writer import patched
from argosy_operator.reconcile.metrics import OperatorMetrics
from argosy_operator.reconcile.workqueue import Allowance, run_together
from argosy_operator.status.conditions import seconds_until_stuck
from argosy_operator.status.problems import (
    ignored_scale,
    seconds_until_degraded,
    seconds_until_scaled_once,
    seconds_until_unmounted,
    seconds_until_unready_too_long,
)
from argosy_operator.status.report import Event, events_between, events_of_change, invalid_status, status
from argosy_resource.scaling import ScalingStatus
from argosy_resource.types import API_VERSION, KIND, Condition, InferenceService, ObjectMeta

logger = logging.getLogger(__name__)

EVENT_BURST: Final = 25
"""Events that a service may post at once."""
EVENT_RESERVE: Final = 5
EVENT_REFILL_SECONDS: Final = 300.0
"""Seconds until a service may post one more."""
MAX_REMEMBERED: Final = 4096
"""Number of events whose count is kept, and of services whose rate is; the least recent are forgotten."""
MAX_MESSAGE: Final = 1024
"""Characters that the API server accepts."""


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
        sent = self._api.patch_status(INFERENCE_SERVICES, *name, patch, strategic=False)
        await patched(self._store, self._metrics, INFERENCE_SERVICES, "patch-status", sent)


class _Posted(Struct):
    count: int
    first: str


class EventRecorder:
    """Posts events about objects of one kind, services unless another one is named."""

    def __init__(
        self, api: Api, *, now: Callable[[], str], api_version: str = API_VERSION, kind: str = KIND
    ) -> None:
        self._api = api
        self._now = now
        self._api_version = api_version
        self._kind = kind
        self._posted: OrderedDict[str, _Posted] = OrderedDict()
        self._allowances: OrderedDict[str, Allowance] = OrderedDict()

    async def post(self, service: ObjectMeta, events: Iterable[Event]) -> None:
        """Post the events that the service's rate allows; an event that cannot be posted is logged and dropped."""
        allowed = []
        for event in events:
            if self._is_allowed(service.uid, reserve=0 if event.type == "Warning" else EVENT_RESERVE):
                allowed.append(event)
            else:
                logger.info("%s: too many events; dropped: %s", service.key, event.reason)
        await run_together(partial(self._post, service, event) for event in allowed)

    async def _post(self, service: ObjectMeta, event: Event) -> None:
        try:
            await self._api.apply(self._manifest(service, event))
        except ApiError as error:
            level = logging.INFO if error.is_namespace_ending else logging.WARNING
            logger.log(level, "%s: event %s was not posted: %s", service.key, event.reason, error)

    def _is_allowed(self, uid: str, reserve: int) -> bool:
        now = asyncio.get_running_loop().time()
        allowance = self._allowances.setdefault(uid, Allowance(EVENT_BURST, EVENT_REFILL_SECONDS, now))
        _keep_newest(self._allowances, uid)
        if allowance.wait(now, reserve) > 0:
            return False
        allowance.take()
        return True

    def _manifest(self, metadata: ObjectMeta, event: Event) -> dict[str, Any]:
        now = self._now()
        identity = "\0".join((metadata.uid, event.type, event.reason, event.message))
        name = f"{metadata.name}.{xxhash.xxh3_64_hexdigest(identity.encode())}"
        posted = self._posted.setdefault(f"{metadata.namespace}/{name}", _Posted(0, now))
        _keep_newest(self._posted, f"{metadata.namespace}/{name}")
        posted.count += 1
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": metadata.namespace},
            "involvedObject": {
                "apiVersion": self._api_version,
                "kind": self._kind,
                "name": metadata.name,
                "namespace": metadata.namespace,
                "uid": metadata.uid,
            },
            "type": event.type,
            "reason": event.reason,
            "message": event.message[:MAX_MESSAGE],
            "count": posted.count,
            "firstTimestamp": posted.first,
            "lastTimestamp": now,
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
        }


def _keep_newest(held: OrderedDict[str, Any], key: str) -> None:
    held.move_to_end(key)
    while len(held) > MAX_REMEMBERED:
        held.popitem(last=False)
