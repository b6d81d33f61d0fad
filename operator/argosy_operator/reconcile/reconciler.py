"""Brings one InferenceService to its desired state: read, decide, apply, prune, open gates, report.

Owns the order of these steps and what an error means for the status. Decisions are pure functions elsewhere
(`desired`, `gate`, `status`); when to reconcile is the controller's business.
Invariants: level-based, so any step may fail or be repeated; nothing is written that is already so; an object
that is not ours is never touched; there is no state but the cluster's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from argosy_operator.cluster.api import Api
from argosy_operator.cluster.store import Store, service_of
from argosy_operator.config import OperatorConfig
from argosy_operator.desired.drift import must_apply, stamped
from argosy_operator.desired.plan import Plan, desired
from argosy_operator.desired.readiness_gate import decide, gate_patch
from argosy_operator.desired.rollout import has_the_turn
from argosy_operator.errors import ApiError, ChildNotOwned, OperatorError
from argosy_operator.kinds import (
    BUDGETS,
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    PODS,
    SERVICES,
    Kind,
    Name,
    Object,
    kind_of,
    object_name,
)
from argosy_operator.names import APPLIED_ANNOTATION, KEY_ANNOTATION, child_name
from argosy_operator.observed.observation import Observed, Routers, is_owned
from argosy_operator.observed.pod import Problem, read_pod
from argosy_operator.reconcile.event_recorder import EventRecorder, news
from argosy_operator.reconcile.key_secrets import KeySecrets
from argosy_operator.reconcile.metrics import OperatorMetrics
from argosy_operator.resource.types import InferenceService, parse
from argosy_operator.status.report import invalid_status, seconds_until_degraded, status
from argosy_protocol.fleet import NameConflict

logger = logging.getLogger(__name__)

PRUNED: Final = (DEPLOYMENTS, SERVICES, BUDGETS)
"""Kinds whose children are deleted when no plan names them any more."""
_REPORTED: Final = (400, 403, 422)
"""Refusals that will not go away by themselves, so a user should read of them."""


class Reconciler:
    """Reconciles single resources against the store and the API server."""

    def __init__(
        self,
        api: Api,
        store: Store,
        config: OperatorConfig,
        *,
        metrics: OperatorMetrics,
        now: Callable[[], str],
        routers: Callable[[], Routers],
        on_turn_ended: Callable[[], None],
        look_again: Callable[[Name, float], None],
    ) -> None:
        self._api = api
        self._store = store
        self._config = config
        self._metrics = metrics
        self._now = now
        self._routers = routers
        self.key_secrets = KeySecrets(api, metrics)
        self._on_turn_ended = on_turn_ended
        self._look_again = look_again
        self._events = EventRecorder(api, now=now)
        self._turn = asyncio.Lock()
        """Held from the decision that a service has its turn until the Deployment says so."""
        self._stubborn: dict[tuple[Kind, Name], tuple[str, int]] = {}
        """Objects that differ right after being applied (a mutating webhook): what was sent, and the
        generation it led to. They are left alone until either changes, else the two would write for ever."""

    async def reconcile(self, key: Name, conflicts: tuple[NameConflict, ...]) -> None:
        """One pass over one resource.

        Raises:
            OperatorError: try again later; what a user should know of it is already in the status.
        """
        obj = self._store.get(INFERENCE_SERVICES, *key)
        if obj is None or obj["metadata"].get("deletionTimestamp"):
            return  # children go by their owner reference, the fleet document is rendered anew
        try:
            service = parse(obj)
        except msgspec.ValidationError as error:
            await self._report_invalid(obj, str(error))
            return
        failure: OperatorError | None = None
        try:
            await self._set_gates(service)
            if not service.spec.paused:
                plan = self._plan(service, conflicts)
                if self._creates(plan) and not await self._exists(service):
                    return  # its deletion took its children along, and the news of that came first
                if plan.rollout.has_turn:
                    async with self._turn:
                        plan = self._plan(service, conflicts)
                        await self._apply(service, plan)
                else:
                    await self._apply(service, plan)
                await self._prune(service, plan)
        except OperatorError as error:
            failure = error
            if isinstance(error, ApiError) and error.status not in _REPORTED:
                raise
        problem = Problem(failure.reason, str(failure)) if failure is not None else None
        await self._report(service, conflicts, problem)
        if failure is not None:
            raise failure

    def _plan(self, service: InferenceService, conflicts: tuple[NameConflict, ...]) -> Plan:
        return desired(service, self._observe(service, conflicts), self._config)

    def _observe(self, service: InferenceService, conflicts: tuple[NameConflict, ...]) -> Observed:
        key = (service.metadata.namespace, service.metadata.name)
        deployment = self._store.get(DEPLOYMENTS, service.metadata.namespace, child_name(service))
        return Observed(
            deployment=deployment if deployment is not None and is_owned(deployment, service) else None,
            pods=tuple(read_pod(obj) for obj in self._store.children(PODS, key)),
            routers=self._routers(),
            conflicts=conflicts,
            rolling_elsewhere=self._rolling_elsewhere(key),
            lacks_canary=self._lacks_canary(service),
        )

    def _rolling_elsewhere(self, key: Name) -> str:
        """Another service that has the turn."""
        for obj in self._store.all(DEPLOYMENTS):
            service = service_of(obj)
            if service is not None and service != key and has_the_turn(obj):
                return "/".join(service)
        return ""

    def _lacks_canary(self, service: InferenceService) -> bool:
        canary = service.spec.router.canary
        if canary is None:
            return False
        obj = self._store.get(INFERENCE_SERVICES, service.metadata.namespace, canary.service)
        return obj is None or bool(obj["metadata"].get("deletionTimestamp"))

    async def _set_gates(self, service: InferenceService) -> None:
        routers = self._routers()
        for obj in self._store.children(PODS, (service.metadata.namespace, service.metadata.name)):
            pod = read_pod(obj)
            change = decide(pod, routers)
            if change is None:
                continue
            patch = gate_patch(pod, change, now=self._now(), router_lives=routers.alive > 0)
            try:
                stored = await self._patch_status(PODS, object_name(obj), patch, strategic=True)
            except ApiError as error:
                if error.status not in (404, 409):  # gone, or replaced by a namesake: its event is on the way
                    raise
            else:
                self._store.put(PODS, stored)

    def _creates(self, plan: Plan) -> bool:
        children = (plan.service, plan.budget, plan.deployment)
        return any(self._store.get(kind_of(child), *object_name(child)) is None for child in children)

    async def _exists(self, service: InferenceService) -> bool:
        """Asks the API server, because the store may lag behind."""
        metadata = service.metadata
        live = await self._api.get(INFERENCE_SERVICES, metadata.namespace, metadata.name)
        return (
            live is not None
            and live["metadata"]["uid"] == metadata.uid
            and not live["metadata"].get("deletionTimestamp")
        )

    async def _apply(self, service: InferenceService, plan: Plan) -> None:
        is_suspect = self._is_key_suspect(service, plan)
        await self.key_secrets.ensure(service, stamped(plan.secret), is_suspect=is_suspect)
        for manifest in (plan.service, plan.budget, plan.deployment):
            wanted = stamped(manifest)
            kind, name = kind_of(wanted), object_name(wanted)
            live = self._store.get(kind, *name) or await self._api.get(kind, *name)
            if live is not None and not is_owned(live, service):
                raise ChildNotOwned(kind.name, name[1])
            if not must_apply(wanted, live):
                continue
            sent = (wanted["metadata"]["annotations"][APPLIED_ANNOTATION], _generation(live))
            if self._stubborn.get((kind, name)) == sent:
                continue
            stored = await self._write(wanted, live)
            if kind is DEPLOYMENTS and has_the_turn(live) and not has_the_turn(stored):
                self._on_turn_ended()
            if must_apply(wanted, stored):
                logger.warning(
                    "%s %s/%s is changed by another writer as soon as it is applied", kind.name, *name
                )
                self._stubborn[kind, name] = (sent[0], _generation(stored))

    def _is_key_suspect(self, service: InferenceService, plan: Plan) -> bool:
        """Whether the Secret may be missing or old. Told without reading it: the Deployment, applied after the
        Secret, carries its digest, and a pod says when the Secret is gone."""
        observed = self._observe(service, ())
        if observed.deployment is None:
            return True
        wanted = plan.deployment["spec"]["template"]["metadata"]["annotations"][KEY_ANNOTATION]
        live = observed.deployment["spec"]["template"]["metadata"].get("annotations", {}).get(KEY_ANNOTATION)
        return wanted != live or any(
            pod.problem is not None and pod.problem.reason == "CreateContainerConfigError"
            for pod in observed.pods
        )

    async def _write(self, manifest: Object, live: Mapping[str, Any] | None) -> Object:
        """Applies to exactly the object that was looked at, or to none: the store may lag behind, and what took
        the object's place since may be somebody else's."""
        kind = kind_of(manifest)
        self._metrics.writes.labels(kind.name, "apply").inc()
        if live is not None:
            manifest = {**manifest, "metadata": {**manifest["metadata"], "uid": live["metadata"]["uid"]}}
        stored = await self._api.apply(manifest)
        self._store.put(kind, stored)
        return stored

    async def _patch_status(self, kind: Kind, name: Name, patch: Object, *, strategic: bool) -> Object:
        self._metrics.writes.labels(kind.name, "patch-status").inc()
        return await self._api.patch_status(kind, *name, patch, strategic=strategic)

    async def _prune(self, service: InferenceService, plan: Plan) -> None:
        wanted = {(kind_of(manifest), object_name(manifest)) for manifest in plan.objects}
        for kind in PRUNED:
            for obj in self._store.children(kind, (service.metadata.namespace, service.metadata.name)):
                if (kind, object_name(obj)) in wanted or not is_owned(obj, service):
                    continue
                self._metrics.writes.labels(kind.name, "delete").inc()
                await self._api.delete(kind, *object_name(obj), uid=obj["metadata"]["uid"])

    async def _report(
        self, service: InferenceService, conflicts: tuple[NameConflict, ...], failure: Problem | None
    ) -> None:
        observed = self._observe(service, conflicts)
        plan = desired(service, observed, self._config)
        now, name = self._now(), (service.metadata.namespace, service.metadata.name)
        report = status(service, observed, plan, config=self._config, now=now, failure=failure)
        if report != service.status:
            await self._send_status(name, service.metadata.uid, msgspec.to_builtins(report))
            await self._events.post(service, news(service.status.conditions, report.conditions))
        waits = [
            seconds_until_degraded(pod, now) for pod in observed.pods if pod.is_alive and pod.unschedulable
        ]
        if waits and min(waits) > 0:
            self._look_again(name, min(waits))

    async def _report_invalid(self, obj: Object, message: str) -> None:
        report = invalid_status(obj, message, now=self._now())
        held = obj.get("status", {})
        if any(held.get(field) != value for field, value in report.items()):
            await self._send_status(object_name(obj), obj["metadata"]["uid"], report)

    async def _send_status(self, name: Name, uid: str, report: Object) -> None:
        patch = {"metadata": {"uid": uid}, "status": report}
        try:
            stored = await self._patch_status(INFERENCE_SERVICES, name, patch, strategic=False)
        except ApiError as error:
            if error.status not in (404, 409):  # deleted, or created anew under the same name
                raise
        else:
            self._store.put(INFERENCE_SERVICES, stored)


def _generation(obj: Mapping[str, Any] | None) -> int:
    return 0 if obj is None else obj["metadata"].get("generation", 0)
