"""Reconciles one InferenceService: observe, decide, act, report.

Owns the order of these steps and what an error means for the status. Decisions are pure (`desired.diff`); when to
reconcile is the controller's business. Invariants: level-based, so any step may fail or be repeated; one observation
leads to one diff, and a second observation is for the report only; gates are set before anything else, and Deployments
are applied after the Secret; StatefulSets, whose contents pods say, are applied last, so that one which is refused
holds up nothing else, and what the pods call for is done though another child is refused; nothing is written that is
already so; there is no state but the cluster's.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Final

import msgspec

from argosy_operator.cluster.api_server import Api
from argosy_operator.cluster.kept_fields import oversize_problem
from argosy_operator.cluster.store import Store
from argosy_operator.config import OperatorConfig
from argosy_operator.desired.cached_condition import cached_patch
from argosy_operator.desired.deletion_cost import CostChange, cost_changes
from argosy_operator.desired.deployment_problem import deployment_problem
from argosy_operator.desired.diff import ChildChange, Diff, GateChange, compute_diff
from argosy_operator.desired.readiness_gate import gate_patch
from argosy_operator.errors import ApiError, OperatorError
from argosy_operator.kinds import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    PODS,
    STATEFUL_SETS,
    Kind,
    Name,
    kind_of,
    object_name,
)
from argosy_operator.names import TURN_ANNOTATION, deployment_name
from argosy_operator.observed.deployment import has_the_turn
from argosy_operator.observed.elapsed import seconds_between
from argosy_operator.observed.observation import Observation, Routers
from argosy_operator.observed.pod import Pod, Problem
from argosy_operator.observed.service_load import ServiceLoad
from argosy_operator.reconcile.autoscaler import Autoscaler
from argosy_operator.reconcile.child_writer import ChildWriter
from argosy_operator.reconcile.concurrent_steps import run_together
from argosy_operator.reconcile.key_secrets import KeySecrets
from argosy_operator.reconcile.metrics import OperatorMetrics
from argosy_operator.reconcile.named_secrets import NamedSecrets
from argosy_operator.reconcile.observer import Observer
from argosy_operator.reconcile.reporter import Reporter
from argosy_operator.reconcile.rollout_lock import RolloutLock
from argosy_operator.status.replica_problems import unmounted_pods
from argosy_operator.status.scaling_status import scaling_status
from argosy_protocol.model_progress import ModelProgress
from argosy_resource.name_claims import LostName
from argosy_resource.types import InferenceService, parse

_REPORTED: Final = (400, 403, 422)
"""HTTP statuses of refusals that do not go away by themselves, so a user should read of them."""

PATIENCE_S: Final = 60.0
"""Seconds for which other failures of one service are not told, since most pass: the API server is busy, say. One that
lasts does not: a webhook that does not answer refuses every change with 500."""

_SURPLUS_AT_ONCE: Final = 16
"""Objects that one reconcile deletes. Who may create Services can label any number as a service's children, and other
services wait for a worker meanwhile."""
_LAG_S: Final = 1.0
"""Seconds until a service is looked at again whose objects the watch, or the API server, does not show yet as they are.
Without a pause a worker would do nothing else meanwhile."""

_LEFT_OUT: Final = Problem(
    "FleetDocumentFull",
    "routers do not know this service: the document that tells them of all services is full, and this namespace takes "
    "the largest part of it; delete services of this namespace, or give them fewer and shorter aliases",
)

_Version = tuple[str, int | None]
"""UID and generation of a resource."""


def _version(obj: Mapping[str, Any]) -> _Version:
    return obj["metadata"]["uid"], obj["metadata"].get("generation")


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
        fetches: Callable[[], Mapping[str, ModelProgress]],
        unpolled: Callable[[], Set[str]],
        autoscaler: Autoscaler,
        loads: Callable[[], Mapping[str, ServiceLoad]],
        ask_loads: Callable[[], Awaitable[Mapping[str, ServiceLoad]]],
        is_known: Callable[[str], bool],
        wake: Callable[[Name], None],
        look_again: Callable[[Name, float], None],
    ) -> None:
        """`is_known` says of a namespace whether it was read and may be; `wake` has a service reconciled soon."""
        self._api = api
        self._store = store
        self._config = config
        self._metrics = metrics
        self._now = now
        self._is_known = is_known
        self._autoscaler = autoscaler
        self._look_again = look_again
        self._ask_loads = ask_loads
        self.key_secrets = KeySecrets(api, metrics)
        self.named_secrets = NamedSecrets(api)
        self._turn = RolloutLock(
            store, config.max_concurrent_rollouts, wake, now=now, is_left_alone=self._is_left_alone
        )
        self.costs: dict[Name, float] = {}
        """Seconds of CPU time that the last look at a service took."""
        self._left_alone: dict[Name, tuple[_Version, bool]] = {}
        """Whether a service is, and the version of it that says so."""
        self._failing: dict[Name, str] = {}
        """Since when the API server has carried out no change of a service's children (RFC 3339)."""
        self._observer = Observer(
            store,
            self._turn,
            routers=routers,
            fetches=fetches,
            unpolled=unpolled,
            loads=loads,
            now=now,
        )
        self._children = ChildWriter(api, store, metrics)
        self._reporter = Reporter(api, store, config, metrics=metrics, now=now, look_again=look_again)

    def use(self, config: OperatorConfig) -> None:
        """Reconcile with these settings from now on: other fleet keys are valid. Each service's Secret is checked."""
        self._config = config
        self.key_secrets.check_all_again()

    def begin(self) -> None:
        """Note that the operator leads from now on: what another one's clock said counts no longer than that."""
        self._observer.began = self._now()
        self._failing.clear()

    async def reconcile(
        self, key: Name, lost_names: tuple[LostName, ...], published: str, *, is_left_out: bool = False
    ) -> None:
        """Reconcile one resource once. `lost_names` are those that it claims and does not have, `published` is the
        canary revision by which the fleet document divides it, `is_left_out` whether that has no room for it.

        Raises:
            OperatorError: try again later; what a user should know of it is already in the status.
        """
        self._turn.begin(key)
        try:
            await self._reconcile(key, lost_names, published, is_left_out=is_left_out)
        finally:
            self._turn.wake_next()

    def wake_next(self) -> None:
        """Have services reconciled that wait for a turn, if one is free."""
        self._turn.wake_next()

    async def _reconcile(
        self, key: Name, lost_names: tuple[LostName, ...], published: str, *, is_left_out: bool
    ) -> None:
        if self._turn.is_unclear(key):
            await self._read_deployment(key)
        obj = self._store.get(INFERENCE_SERVICES, *key)
        if obj is None or obj["metadata"].get("deletionTimestamp"):
            self._turn.leave(key)
            self._left_alone.pop(key, None)
            self._failing.pop(key, None)
            self.costs.pop(key, None)
            self._observer.forget(key)
            return  # its children are deleted by their owner reference, and the fleet document is rendered again
        try:
            stored = parse(obj)
        except msgspec.ValidationError as error:
            await self._reporter.report_invalid(obj, oversize_problem(obj) or str(error))
            return
        began = time.thread_time()
        scalers = self._autoscaler.scalers(stored)
        service = self._autoscaler.scaled(stored)
        observed = self._observer.observe(service, lost_names, published, scalers)
        diff = compute_diff(service, observed, self._config)
        if diff.plan.rollout.waits_for and diff.plan.problem is None and not service.spec.paused:
            self._turn.wait(key)
        else:
            self._turn.leave(key)
        self._left_alone[key] = _version(obj), diff.plan.problem is not None
        decision = self._autoscaler.decision(service)
        # Decided once: what is not written now must not be written later, to a service that is another one by then.
        children = [each for each in diff.children if self._children.may_write(each)]
        contested = tuple(
            f"{each.wanted['kind']} {each.wanted['metadata']['name']}"
            for each in diff.children
            if each not in children
        )
        takes_turn = diff.takes_turn and any(kind_of(each.wanted) is DEPLOYMENTS for each in children)
        self.costs[key] = time.thread_time() - began
        failure: OperatorError | None = None
        try:
            # No await between the observation and the claim: see RolloutLock.
            with self._turn.claim(key) if takes_turn else nullcontext():
                is_current = await self._act(service, observed, diff, children)
            if not is_current:
                return  # deleted: its children go with it; a newer resource, or the rest, is reconciled next
        except OperatorError as error:
            failure = error
            if isinstance(error, ApiError):
                if error.is_namespace_ending:
                    return  # the resource is deleted as well, in its turn
                if error.status and self._turn.is_unclear(key):
                    with suppress(ApiError):  # then the next reconcile reads it
                        await self._read_deployment(key)
                if error.status not in _REPORTED and not self._fails_for_long(key):
                    raise
        else:
            self._failing.pop(key, None)
        problem = Problem(failure.reason, str(failure)) if failure is not None else diff.plan.problem
        if problem is None and is_left_out:
            problem = _LEFT_OUT
        later = self._observer.observe(service, lost_names, published, scalers)
        scaling = scaling_status(service, decision, diff.gates, self._now(), observed.scalers)
        asked = stored.spec.replicas
        with nullcontext() if failure is None else suppress(ApiError):  # what failed first is raised
            await self._reporter.report(
                service, later, diff.plan, problem, scaling, asked=asked, contested=contested
            )
        if failure is not None:
            raise failure

    def _fails_for_long(self, key: Name) -> bool:
        """Note that a change of a service failed. Whether all have for PATIENCE_S."""
        now = self._now()
        return seconds_between(self._failing.setdefault(key, now), now) >= PATIENCE_S

    async def _read_deployment(self, key: Name) -> None:
        """Have the store know what became of a write whose answer is missing.

        Raises:
            ApiError: that is still not known.
        """
        live = await self._api.get(DEPLOYMENTS, key[0], deployment_name(key[1]))
        if live is not None:
            self._store.put(DEPLOYMENTS, live)
        self._turn.note_read(key)

    async def _act(
        self, service: InferenceService, observed: Observation, diff: Diff, children: Sequence[ChildChange]
    ) -> bool:
        """Do what was decided. False if the resource turned out to be deleted, or newer than what was observed, or if
        the rest follows."""
        await run_together(partial(self._set_gate, service, observed, gate) for gate in diff.gates)
        if children and not await self._is_current(service):
            return False
        changes: dict[Kind, list[ChildChange]] = {DEPLOYMENTS: [], STATEFUL_SETS: []}
        for change in children:
            changes.setdefault(kind_of(change.wanted), []).append(change)
        deployments, node_sets = changes.pop(DEPLOYMENTS), changes.pop(STATEFUL_SETS)
        steps: list[Callable[[], Awaitable[None]]] = [
            partial(self._apply, service, observed, each) for others in changes.values() for each in others
        ]
        if diff.secret is not None:
            secret, is_suspect = diff.secret, diff.is_key_suspect
            unmounted = unmounted_pods(observed.pods, observed.time)
            steps.insert(
                0,
                partial(self.key_secrets.ensure, service, secret, is_suspect=is_suspect, unmounted=unmounted),
            )
        try:
            await run_together(steps)
            is_done = await self._act_on_deployments(service, observed, diff, deployments)
        except OperatorError:
            with suppress(OperatorError):  # what failed first is reported
                await self._act_on_pods(service, observed, diff, node_sets)
            raise
        await self._act_on_pods(service, observed, diff, node_sets)
        if not is_done:
            self._look_again((service.metadata.namespace, service.metadata.name), 0.0)
        return is_done

    async def _act_on_deployments(
        self, service: InferenceService, observed: Observation, diff: Diff, deployments: list[ChildChange]
    ) -> bool:
        """False if something is left to be looked at before a Deployment may be applied."""
        if deployments and not await self.named_secrets.check(service):
            return False
        for change in deployments:  # in the plan's order
            await self._apply(service, observed, change)
        if diff.ends_turn:
            await self._end_turn(observed.deployment)
        await self._delete(service, [each for each in diff.surplus if each[0] is not STATEFUL_SETS])
        return True

    async def _act_on_pods(
        self, service: InferenceService, observed: Observation, diff: Diff, node_sets: list[ChildChange]
    ) -> None:
        """What the pods that there are call for, whether the other children can be applied or not."""
        now = self._now()
        steps = [partial(self._apply, service, observed, each) for each in node_sets]
        steps.append(
            partial(self._delete, service, [each for each in diff.surplus if each[0] is STATEFUL_SETS])
        )
        steps += [partial(self._children.delete_pod, service.metadata.namespace, pod) for pod in diff.broken]
        steps += [
            partial(self._patch_pod, service, cached.pod, cached_patch(cached, now=now))
            for cached in diff.cached
        ]
        await run_together(steps)

    async def _delete(
        self, service: InferenceService, surplus: Sequence[tuple[Kind, Mapping[str, Any]]]
    ) -> None:
        for kind, obj in surplus[:_SURPLUS_AT_ONCE]:
            await self._children.delete(kind, obj)
        if len(surplus) > _SURPLUS_AT_ONCE:
            self._look_again((service.metadata.namespace, service.metadata.name), _LAG_S)

    async def _set_gate(self, service: InferenceService, observed: Observation, gate: GateChange) -> None:
        router_lives = observed.routers.alive > 0
        patch = gate_patch(gate.pod, gate.status, now=self._now(), router_lives=router_lives)
        await self._patch_pod(service, gate.pod, patch)

    async def _apply(self, service: InferenceService, observed: Observation, change: ChildChange) -> None:
        if change.removed_replicas:
            await self._mark_least_valuable(service, observed, change.removed_replicas)
        await self._children.apply(change)

    async def _end_turn(self, deployment: Mapping[str, Any] | None) -> None:
        """Have the Deployment say no more that it has the turn, if it still does after it was applied: the service is
        paused, or somebody else has written the annotation as well."""
        assert deployment is not None
        live = self._store.get(DEPLOYMENTS, *object_name(deployment))
        if live is None or live["metadata"]["uid"] != deployment["metadata"]["uid"] or not has_the_turn(live):
            return
        await self._children.remove_annotation(DEPLOYMENTS, live, TURN_ANNOTATION)

    async def _mark_least_valuable(
        self, service: InferenceService, observed: Observation, removed: int
    ) -> None:
        """Have the Deployment give up the replicas whose caches are worth least."""
        loads = await self._ask_loads()
        changes = cost_changes(observed.without_canary.pods, loads.get(service.key), removed)
        await run_together(partial(self._set_deletion_cost, service, change) for change in changes)

    async def _set_deletion_cost(self, service: InferenceService, change: CostChange) -> None:
        self._metrics.writes.labels(PODS.name, "patch").inc()
        try:
            stored = await self._api.patch(PODS, service.metadata.namespace, change.pod.name, change.patch)
        except ApiError as error:
            if error.status not in (404, 409):  # gone, or replaced
                raise
        else:
            self._store.put(PODS, stored)

    def _is_left_alone(self, key: Name) -> bool:
        """Whether a service's Deployment is not applied: for a problem of its plan, or as its namespace is refused."""
        if not self._is_known(key[0]):
            return True
        obj = self._store.get(INFERENCE_SERVICES, *key)
        if obj is None:
            self._left_alone.pop(key, None)
            return False
        known, is_left_alone = self._left_alone.get(key, (None, False))
        if known != _version(obj):
            try:
                is_left_alone = deployment_problem(parse(obj), self._config) is not None
            except msgspec.ValidationError:
                is_left_alone = False
            self._left_alone[key] = _version(obj), is_left_alone
        return is_left_alone

    async def _patch_pod(self, service: InferenceService, pod: Pod, patch: dict[str, Any]) -> None:
        """Patch the status of a pod, which may be gone by now."""
        self._metrics.writes.labels(PODS.name, "patch-status").inc()
        try:
            stored = await self._api.patch_status(
                PODS, service.metadata.namespace, pod.name, patch, strategic=True
            )
        except ApiError as error:
            if error.status not in (404, 409):  # gone, or replaced: an event is on the way
                raise
        else:
            self._store.put(PODS, stored)

    async def _is_current(self, service: InferenceService) -> bool:
        """Whether the resource is as it was observed. Asks the API server, because the store may lag behind, and each
        kind on its own: an old number of replicas beside a new Deployment would cost living replicas. A newer resource
        is stored, and reconciled next."""
        metadata = service.metadata
        live = await self._api.get(INFERENCE_SERVICES, metadata.namespace, metadata.name)
        if live is None or live["metadata"].get("deletionTimestamp"):
            return False
        if (live["metadata"]["uid"], live["metadata"].get("generation")) == (
            metadata.uid,
            metadata.generation,
        ):
            return True
        is_newer = self._store.put(INFERENCE_SERVICES, live)
        self._look_again((metadata.namespace, metadata.name), 0.0 if is_newer else _LAG_S)
        return False
